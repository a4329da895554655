"""Fixtures that all test folders share."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import is_hypothesis_test, settings

# How long an example takes depends more on the machine than on the code.
settings.register_profile("few examples", deadline=None, max_examples=50)
settings.register_profile("many examples", deadline=None, max_examples=200)

TESTS = Path(__file__).parent
LEFT_OUT = pytest.StashKey[int]()
FOREIGN = ("SLURM_", "SBATCH_", "BSL_", "TORCHELASTIC_", "PYTEST_XDIST_")
SLURM_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "ip", "nsenter", "unshare")
SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/sbin"
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


WAITING = ("tests/slurm", "tests/docs", "tests/process")
"""Tiers that mostly wait, for clusters and processes, in this order. The files of COMPUTING are spread among theirs."""
COMPUTING = "tests/train"
TOGETHER = ("tests/docs",)
"""Folders whose files share what takes minutes, so that one process runs all of them. Elsewhere, it runs a file."""


def scope_of(test: str) -> str:
    """Return what shares a process of pytest-xdist with this test: its file, or one of TOGETHER; itself on a GPU."""
    file = test.partition("::")[0]
    if file.startswith("tests/gpu"):
        # They share no fixture, and time on a card is short.
        return test
    return next((folder for folder in TOGETHER if file.startswith(folder)), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a file in one process and in order, so that fixtures of a module are made once."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    return ByFile(config, log)


def asks_for_long(config: pytest.Config) -> bool:
    return re.search(r"(?<!not )\blong\b", config.option.markexpr) is not None


def pytest_configure(config: pytest.Config) -> None:
    """Choose the number of examples of a property.

    Let Ctrl-C end what tests start: a job of a shell or of nohup begins with SIGINT ignored; programs inherit it.
    """
    settings.load_profile("many examples" if asks_for_long(config) else "few examples")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files; review them as text")


def in_order(tests: Sequence[str]) -> dict[str, float]:
    """Return where the file of each test belongs: what waits, with what computes in between, and pure tests at the end.

    So one process computes while another waits.
    """
    files = dict.fromkeys(test.partition("::")[0] for test in tests)
    tiers = [[file for file in files if file.startswith(f"{tier}/")] for tier in (*WAITING, COMPUTING)]
    waiting, computing = list(chain(*tiers[:-1])), tiers[-1]
    places = {file: float(place) for place, file in enumerate(waiting)}
    places |= {file: place * len(waiting) / len(computing) for place, file in enumerate(computing)}
    return {file: places.get(file, inf) for file in files}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the files, and leave the long tier out, unless `-m` says what to do with it.

    With many examples, a property is of the long tier.
    """
    if asks_for_long(config):
        for item in filter(lambda item: is_hypothesis_test(getattr(item, "obj", None)), items):
            item.add_marker("long")
    places = in_order([item.nodeid for item in items])
    items.sort(key=lambda item: places[item.nodeid.partition("::")[0]])
    if re.search(r"\blong\b", config.option.markexpr):
        return
    left_out = [item for item in items if item.get_closest_marker("long")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("long")]
        config.stash[LEFT_OUT] = len(left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Report what was left out, and how many seconds the tests of each tier took, including their fixtures."""
    if num_left_out := config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(f"left out: {num_left_out} tests of the long tier; `make long` runs them")
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds["/".join(report.nodeid.split("/")[:2])] += report.duration
    if sum(seconds.values()) > 60:
        tiers = ", ".join(f"{tier} {taken:.0f} s" for tier, taken in seconds.most_common())
        terminalreporter.write_line(f"seconds by tier: {tiers}")


@pytest.fixture
def check_golden(request: pytest.FixtureRequest) -> Callable[[Path, str], None]:
    """`check_golden(path, text)` asserts that the golden file holds exactly this text; `--update-golden` writes it."""

    def check(path: Path, text: str) -> None:
        if request.config.getoption("--update-golden"):
            path.write_text(text)
        assert text == path.read_text(), f"{path.name} differs: review it, then run pytest --update-golden"

    return check


@pytest.fixture
def check_text(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., None]:
    """`check_text(*lines)` asserts that the golden file of the module has exactly these lines under the test's name.

    Call it once in a test. `TMP` is the test's folder. `--update-golden` writes them, and drops tests that are gone.
    """
    module = request.path.relative_to(TESTS)
    path = TESTS / "golden" / module.parent / f"{module.stem.removeprefix('test_')}.txt"

    def check(*lines: str) -> None:
        text = re.sub(r" +$", "", "\n".join(lines).replace(str(tmp_path), "TMP"), flags=re.MULTILINE).strip("\n") + "\n"
        parts = re.split(r"^=== (.*)\n", path.read_text() if path.exists() else "", flags=re.MULTILINE)[1:]
        held = dict(zip(parts[::2], parts[1::2], strict=True))
        if request.config.getoption("--update-golden"):
            held |= {request.node.name: text}
            held = {name: held[name] for name in sorted(held) if hasattr(request.module, name.partition("[")[0])}
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"=== {name}\n{text}" for name, text in held.items()))
        assert text == held.get(request.node.name), f"{path} differs: review it, then run pytest --update-golden"

    return check


@pytest.fixture(autouse=True)
def clean_environ(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Hide the variables of jobs and of bsl in the caller's shell, and the caller's home, from every test."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.getbasetemp() / "state"))
    for name in list(os.environ):
        if (name.startswith(FOREIGN) and name != "SLURM_CONF") or name in RANK_VARIABLES:
            monkeypatch.delenv(name)


@dataclass(frozen=True)
class FakeSlurm:
    """Slurm commands that give the answers a test prepares, as real processes on PATH."""

    folder: Path

    def answer(self, command: str, stdout: str = "", *, stderr: str = "", rc: int = 0, sleep_s: float = 0) -> None:
        """Set what `command` answers from now on."""
        for kind, text in {"stdout": stdout, "stderr": stderr, "rc": str(rc), "sleep": str(sleep_s)}.items():
            (self.folder / f"{command}.{kind}").write_text(text)

    def calls(self, command: str) -> list[dict[str, Any]]:
        """Return each call so far: its `argv`, `cwd` and `env`."""
        log = self.folder / "calls.jsonl"
        records = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return [record for record in records if record["argv"][0] == command]


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeSlurm]:
    """`fake_slurm("sbatch", "squeue")` puts those commands on PATH, and no other of Slurm's."""

    def install(*commands: str) -> FakeSlurm:
        folder = tmp_path / "fake-slurm"
        bin_folder = folder / "bin"
        bin_folder.mkdir(parents=True)
        for command in commands:
            (bin_folder / command).symlink_to(Path(__file__).parent / "slurm_fake" / "fake")
        # The fakes need `env python3`; the machine's own Slurm must not be found.
        (bin_folder / "python3").symlink_to(sys.executable)
        monkeypatch.setenv("PATH", str(bin_folder))
        monkeypatch.setenv("FAKE_SLURM", str(folder))
        monkeypatch.setattr("bigsci_launch.scheduler.command.AGAIN_AFTER_S", 0.0)
        return FakeSlurm(folder)

    return install


def _reason_to_skip() -> str | None:
    path = f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"
    missing = [name for name in SLURM_PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        return f"Slurm tests need {', '.join(missing)} (slurm/minicluster/install.sh installs them)"
    if os.geteuid() != 0:
        return "Slurm tests need root: nodes are namespaces"
    done = subprocess.run(
        ["unshare", "--net", "--pid", "--mount", "--uts", "--fork", "true"], capture_output=True, check=False, text=True
    )
    return f"Slurm tests need namespaces: {done.stderr.strip()}" if done.returncode else None


@pytest.fixture(scope="session")
def slurm_packages() -> None:
    """Skip the test if no real Slurm can be started."""
    if reason := _reason_to_skip():
        pytest.skip(reason)

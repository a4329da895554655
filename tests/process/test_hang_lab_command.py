"""`bsl hang-lab` as a user runs it, including unprepared ranks; and nothing outlives it, however it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bigsci_launch.errors import INSTALL_TRAIN, LabError
from bigsci_launch.hang_lab.judgement import Judgement
from bigsci_launch.hang_lab.needs import missing_need
from bigsci_launch.hang_lab.nursery import Nursery
from bigsci_launch.hang_lab.runner import Standing, Trial, reproduce
from bigsci_launch.hang_lab.zoo import find_reproduction
from bigsci_launch.procfs import read_process
from tests.support.command import invoke
from tests.support.waiting import wait_until

BSL = [sys.executable, "-m", "bigsci_launch"]


def test_list_knows_every_class_of_the_taxonomy() -> None:
    done = subprocess.run([*BSL, "hang-lab", "list", "--json"], capture_output=True, text=True, timeout=300, check=True)
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1
    assert len({entry["class"] for entry in document["classes"]} - {"H00"}) == 87
    assert all(entry["reason"] for entry in document["classes"] if not entry["reproducible"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["H73"], "Slurm"),
        (["H999"], "'H999'"),
        (["H01", "--ranks", "3"], "even number"),
        (["H01", "--culprit", "4"], "no rank 4"),
    ],
)
def test_what_cannot_be_done_is_said(arguments: list[str], words: str) -> None:
    done = invoke("hang-lab", "run", *arguments)
    assert done.exit_code == 2
    assert words in done.stderr


@pytest.mark.torch
@pytest.mark.parametrize(("name", "culprit"), [("H01", 0), pytest.param("H36-stopped", 3, marks=pytest.mark.long)])
def test_run_compares_the_verdict_with_the_truth(name: str, culprit: int, tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    argv = [*BSL, "hang-lab", "run", name, "--culprit", str(culprit), "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False, env=environment)
    document = json.loads(done.stdout)
    assert document["judgement"] in (Judgement.RIGHT.value, Judgement.TOO_EARLY.value), document
    assert document["verdict"]["suspects"] == [culprit]
    assert done.returncode == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.torch
def test_a_rank_that_may_not_be_read(tmp_path: Path) -> None:
    """Root can read every rank, so H75 has no effect on it; here root gives up its right to trace."""
    setpriv = shutil.which("setpriv")
    if setpriv is None or os.geteuid() != 0:
        pytest.skip("needs root, and setpriv to give a right away")
    less = [setpriv, "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"]
    argv = [*less, *BSL, "hang-lab", "run", "H75", "--json"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False, env=environment)
    document = json.loads(done.stdout)
    assert document["judgement"] in (Judgement.RIGHT.value, Judgement.TOO_EARLY.value), document


def test_without_torch_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    argv = [*BSL, "hang-lab", "run", "H01"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 2 and "ModuleNotFoundError" in done.stderr
    assert done.stderr.splitlines()[-1] == f"hint: {INSTALL_TRAIN}"


@contextmanager
def held(name: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Yield `bsl hang-lab run NAME --hold` once the hang has formed, and the process ids of its ranks."""
    environment = {**os.environ, "TMPDIR": str(folder)}
    argv = [*BSL, "hang-lab", "run", name, "--hold"]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        *ranks, last = [process.stdout.readline() for _ in range(5)]
        assert last.startswith("bsl spy "), last
        try:
            yield process, [int(line.split()[-1]) for line in ranks]
        finally:
            process.kill()


def are_gone(pids: list[int]) -> bool:
    return all((process := read_process(pid)) is None or process.state == "Z" for pid in pids)


@pytest.mark.torch
@pytest.mark.parametrize(
    "ending",
    # test_run_compares_the_verdict_with_the_truth holds the end of a command that no signal ends.
    [signal.SIGINT, *(pytest.param(other, marks=pytest.mark.long) for other in ("enter", signal.SIGTERM))],
)
def test_holding_ends_with_everything_gone(ending: str | signal.Signals, tmp_path: Path) -> None:
    with held("H55", tmp_path) as (process, pids):
        assert not are_gone(pids)
        if isinstance(ending, signal.Signals):
            process.send_signal(ending)
        else:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        process.wait(180)
        assert are_gone(pids)
    assert not list(tmp_path.iterdir())


@pytest.mark.torch
def test_ranks_do_not_outlive_a_command_that_is_killed(tmp_path: Path) -> None:
    """After SIGKILL nobody cleans up; the kernel signals the runners, and they end what they run."""
    with held("H31", tmp_path) as (process, pids):
        process.kill()
        wait_until(lambda: are_gone(pids))


@pytest.mark.torch
def test_a_frozen_disk_is_thawed_when_the_block_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nursery: Nursery
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    reproduction = find_reproduction("H61")
    if reason := missing_need(reproduction):
        pytest.skip(reason)
    seen: list[Standing] = []
    with pytest.raises(ZeroDivisionError), reproduce(Trial(reproduction, 4, 1), nursery=nursery) as standing:
        seen.append(standing)
        raise ZeroDivisionError
    assert are_gone(list(seen[0].pids.values()))
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    assert not list(tmp_path.iterdir())


@pytest.mark.torch
def test_a_reproduction_that_fails_to_start_says_why(nursery: Nursery) -> None:
    trial = Trial(find_reproduction("H01"), 4, 1, {"MASTER_PORT": "no port"}, timeout_s=180.0)
    with pytest.raises(LabError, match=r"rank \d .*no port"), reproduce(trial, nursery=nursery):
        pass


@pytest.mark.long
@pytest.mark.parametrize(("name", "fenced"), [("H01", [1]), ("H55", [1]), ("H00", [])])
def test_under_survive_the_culprit_is_fenced_and_what_is_healthy_is_left_alone(name: str, fenced: list[int]) -> None:
    """That a watcher has a rank fenced, and the job continues, is in test_watch.py; these are reproductions."""
    argv = [*BSL, "hang-lab", "run", name, "--recover", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=400, check=False)
    document = json.loads(done.stdout)
    assert [each["rank"] for each in document["fenced"]] == fenced, document
    assert document["is_right"] and done.returncode == 0, document

"""Real processes that hang in known places."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.hang_lab.nursery import Nursery, open_nursery
from bigsci_launch.spy.look.collect import unpack
from tests.support.ports import find_port
from tests.support.waiting import wait_until

from .attempt_records import Attempt
from .recorded_ranks import Ranks

PROGRAMS = Path(__file__).parent / "programs"
SETTLE_S = 0.4


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return Attempt(tmp_path / "run" / "attempts" / "0001")


@dataclass(frozen=True)
class Launched:
    """A launcher whose ranks have all reported that they are about to hang."""

    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self.process.pid

    def descendants(self) -> list[int]:
        """Return every process below the launcher."""
        found, left = [], [self.pid]
        for pid in left:
            more = [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in words_of(path)]
            found += more
            left += more
        return found

    def states(self) -> dict[int, str]:
        """Return the kernel's state letter for every descendant."""
        return {pid: state_of(pid) for pid in self.descendants()}


def words_of(path: Path) -> list[str]:
    """Return the words in a file, or none if it is gone."""
    try:
        return path.read_text().split()
    except OSError:
        return []


def state_of(pid: int) -> str:
    """Return the kernel's state letter for a process, or an empty string if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _end(launched: Launched) -> None:
    """Kill everything that was started, stopped or not; a process that waits for a writer gets one first."""
    pids = launched.descendants()
    launched.process.kill()
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    launched.process.wait(180)
    wait_until(lambda: all(state_of(pid) in ("", "Z") for pid in pids))


Launch = Callable[..., Launched]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """`launch("hung_rank.py", ["load_batch {ready}", ...])` starts one rank per entry and waits until all are ready.

    `{ready}` becomes the FIFO into which each rank writes a line when it is about to hang.
    """
    started: list[Launched] = []

    def start(
        program: str, arguments: list[str], *, numbered: bool = True, limit_s: float = 180.0, **environment: str
    ) -> Launched:
        fifo = tmp_path_factory.mktemp("ready") / "ready"
        os.mkfifo(fifo)
        groups = [word for text in arguments for word in ("--", *text.format(ready=fifo).split())]
        argv = [sys.executable, str(PROGRAMS / "start_ranks.py"), *([] if numbered else ["--no-rank"])]
        reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        process = subprocess.Popen(
            [*argv, str(PROGRAMS / program), *groups], env={**os.environ, **environment}, stderr=subprocess.DEVNULL
        )
        launched = Launched(process)
        started.append(launched)
        _await_lines(reader, len(arguments), limit_s)
        time.sleep(SETTLE_S)
        return launched

    yield start
    for launched in started:
        _end(launched)


def _await_lines(reader: int, count: int, limit_s: float) -> None:
    end, num_ready = time.monotonic() + limit_s, 0
    while num_ready < count:
        assert time.monotonic() < end, f"{num_ready} of {count} ranks were ready in {limit_s} s"
        with contextlib.suppress(BlockingIOError):
            num_ready += os.read(reader, 4096).count(b"\n")
        time.sleep(0.02)
    os.close(reader)


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """A process that has imported torch, from which ranks are forked."""
    pytest.importorskip("torch")
    with open_nursery() as opened:
        yield opened


@pytest.fixture(scope="session")
def agent_path() -> Path:
    return Path(__file__).parents[2] / "diagnostics" / "node_agent.py"


@pytest.fixture(scope="session")
def ask_agent(agent_path: Path) -> Callable[..., dict[str, Any]]:
    """`ask_agent(launcher_pid=.., ...)` runs the agent as a program and returns its document."""

    def ask(limit_s: float = 180.0, **request: Any) -> dict[str, Any]:
        argv = [sys.executable, "-I", "-S", str(agent_path), json.dumps(request)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=limit_s, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return unpack(json.loads(done.stdout))

    return ask


@pytest.fixture
def free_port() -> int:
    return find_port()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    folder = tmp_path / "small"
    folder.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", "size=256k", "bsl-test", str(folder)]
    mounted = subprocess.run(argv, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Use up the space in a file system, to the last block."""
    with (folder / "ballast").open("wb", buffering=0) as stream, contextlib.suppress(OSError):
        while stream.write(b"x" * 4096):
            pass
    with pytest.raises(OSError, match="No space left"):
        (folder / "more").write_text("more")


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    found = Ranks(tmp_path)
    yield found
    for runner in found.runners:
        runner.terminate()
        try:
            runner.wait(20)
        except subprocess.TimeoutExpired:
            runner.kill()
            runner.wait()

"""Starts ranks that hang, as `bsl submit --local` does, asks `bsl spy` about them, and leaves no process of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ranks import BSL

from bigsci_launch.content import module_argv, packaged
from bigsci_launch.launch.job.frozen import NAME, job_program
from bigsci_launch.minicluster.proctree import descendants
from bigsci_launch.procfs import Process, read_process, read_processes
from bigsci_launch.runs.attempts import read_exit
from bigsci_launch.runs.layout import AttemptDir, RunDir, read_json

PROGRAMS = Path(__file__).parent / "programs"
READY_S = 60.0
END_S = 4.0
KILLED_S = 10.0
ANSWER_S = 40.0
POLL_S = 0.1
STAMP = re.compile(r"^\S+Z ")
"""What a runner puts before each line of a log."""


@dataclass(frozen=True, slots=True)
class Hang:
    """Ranks that hang: their program and its arguments, and the function in which the hang is.

    `culprit` is the rank that the other one waits for, or the only one. `spins` says that a kernel keeps the card busy,
    `looks_busy` that the rank computes all the time, and that nothing on a CPU tells it from a rank that works.
    """

    name: str
    program: str
    arguments: tuple[str, ...]
    waits_in: str
    world_size: int = 1
    culprit: int = 0
    spins: bool = False
    looks_busy: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def waiting(self) -> int:
        """The rank that waits: the one that is no culprit, if there are two."""
        return 1 - self.culprit if self.world_size == 2 else 0


@dataclass(frozen=True, slots=True)
class Answer:
    """What `bsl spy` printed; `document` is empty where it gave no answer, and `why` says what it said instead."""

    document: Mapping[str, Any]
    seconds: float
    why: str = ""


class Ranks:
    """The ranks of one hang, from start to end."""

    def __init__(self, hang: Hang, run: RunDir, launcher: subprocess.Popen[bytes]) -> None:
        self.hang, self.run, self.launcher = hang, run, launcher

    @property
    def attempt(self) -> AttemptDir:
        return self.run.attempt("0001")

    def wait_until_ready(self) -> None:
        """Wait until every rank is about to hang.

        Raises:
            TimeoutError: one does not come so far; with its last words.
        """
        wanted = [self.run.path / f"ready-{rank}" for rank in range(self.hang.world_size)]
        if _wait(lambda: all(path.exists() for path in wanted) or self.launcher.poll() is not None, READY_S):
            time.sleep(1.0)
        missing = [rank for rank, path in enumerate(wanted) if not path.exists()]
        if missing:
            raise TimeoutError(f"rank {missing[0]} was not ready: {self.log(missing[0])[-600:]}")

    def log(self, rank: int) -> str:
        """What a rank has printed, without the times."""
        path = self.attempt.log_file(rank)
        text = path.read_text(errors="replace") if path.exists() else ""
        return "\n".join(STAMP.sub("", line) for line in text.splitlines())

    def pid(self, rank: int) -> int:
        return int(read_json(self.attempt.pid_file(rank))["pid"])

    def exit_of(self, rank: int) -> dict[str, Any]:
        path = self.attempt.exit_file(rank)
        return dict(read_json(path)) if path.exists() else {}

    def reason(self) -> dict[str, Any]:
        """Why the attempt ended, as its exit.json says."""
        return read_exit(self.attempt) or {}

    def wait_until_ended(self, limit_s: float) -> bool:
        """Wait for the launcher, which ends all ranks when one has failed."""
        return _wait(lambda: self.launcher.poll() is not None, limit_s)

    def disturbances(self) -> list[str]:
        """What has happened to ranks that should still wait: they are gone, stopped or traced."""
        states = {rank: _states(self.pid(rank)) for rank in range(self.hang.world_size)}
        return [
            f"rank {rank} is {found or 'gone'}" for rank, found in states.items() if not found or set(found) & {*"TtZX"}
        ]

    def spy(self, settle_s: float) -> Answer:
        """Ask about the launcher's ranks, as somebody does who knows nothing of the run."""
        where = ["--local", "--pid", str(self.launcher.pid), "--settle", str(settle_s)]
        return ask([*where, "--output", str(self.run.bundles / "look")], settle_s + ANSWER_S)

    def end(self) -> list[int]:
        """End every process, and return those that do not die."""
        processes = read_processes()
        ours = [processes[pid] for pid in descendants([self.launcher.pid], processes)]
        for _ in range(2):  # the launcher ends the ranks, and kills them when it is told again
            if self.launcher.poll() is None:
                self.launcher.send_signal(signal.SIGTERM)
                self.wait_until_ended(END_S)
        for process in ours:
            if _is_there(process):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        _wait(lambda: self.launcher.poll() is not None and not any(map(_is_there, ours)), KILLED_S)
        return [process.pid for process in ours if _is_there(process)]


@contextmanager
def started(hang: Hang, folder: Path, device: str) -> Iterator[Ranks]:
    """Start the ranks of a hang in `folder`; at the end no process of them is left."""
    run = RunDir(folder)
    attempt = run.attempt("0001")
    attempt.make()
    program = [sys.executable, str(PROGRAMS / hang.program), device, str(folder), *hang.arguments]
    with attempt.job_output.open("wb") as output:
        launcher = subprocess.Popen(
            [*_launcher(attempt, hang.world_size), *program],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **hang.environment},
        )
    ranks = Ranks(hang, run, launcher)
    try:
        yield ranks
    finally:
        if left := ranks.end():
            raise RuntimeError(f"processes {left} cannot be killed")


def ask(arguments: Sequence[str], limit_s: float) -> Answer:
    """Run `bsl spy --json` with these arguments."""
    began = time.monotonic()
    command = [sys.executable, "-c", BSL, "spy", *arguments, "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
        document = json.loads(done.stdout) if done.returncode in (0, 4) else {}
        why = "" if document else f"exit code {done.returncode}: {done.stderr[-600:]}"
    except (subprocess.TimeoutExpired, ValueError) as error:
        document, why = {}, str(error)[:600]
    return Answer(document, round(time.monotonic() - began, 1), why)


def _launcher(attempt: AttemptDir, world_size: int) -> list[str]:
    """Return the command of the local launcher, up to the program."""
    program = attempt.path / NAME
    program.write_bytes(job_program())
    runner = packaged("diagnostics", "rank_runner.py")
    return [
        *module_argv(sys.executable, "bigsci_launch.scheduler.local"),
        *("--attempt-dir", str(attempt.path), "--world-size", str(world_size), "--wait-s", "0"),
        *("--exit-reason", str(program), "--lease", str(attempt.lease)),
        *("--", sys.executable, "-I", "-S", str(runner), "--attempt-dir", str(attempt.path)),
        *("--topology", f"dp={world_size}", "--ranks-per-node", str(world_size), "--"),
    ]


def _wait(is_true: Callable[[], bool], limit_s: float) -> bool:
    until = time.monotonic() + limit_s
    while not is_true():
        if time.monotonic() > until:
            return False
        time.sleep(POLL_S)
    return True


def _is_there(process: Process) -> bool:
    found = read_process(process.pid)
    return found is not None and found.is_alive and found.start_ticks == process.start_ticks


def _states(pid: int) -> str:
    """Return the kernel's letters for the threads of a process, each once."""
    found = set()
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            found.add(path.read_text(errors="replace").rpartition(")")[2].split()[0])
    return "".join(sorted(found))

"""Runs one foreign program in a folder of its own, reads its diary, and leaves no process behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from foreign.case import ForeignCase

PROGRAMS = Path(__file__).parent / "programs"
MARK = "FOREIGN_RUN"
KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "USER", "SLURM_CONF")
POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Setup:
    """Interpreters by name, "" for the default one, and a folder of extra packages for the programs."""

    interpreters: dict[str, str]
    site: Path | None


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a diary: the time in seconds, and the words."""

    at_s: float
    words: str


@dataclass(slots=True)
class Running:
    """A program that has been started."""

    case: ForeignCase
    folder: Path
    launcher: subprocess.Popen[bytes]
    began_s: float

    def diary(self) -> list[Entry]:
        path = self.folder / "diary.txt"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return [Entry(float(at), words) for at, _, words in (line.partition(" ") for line in lines) if words]

    def reached_s(self) -> float | None:
        """When the state was reached, in seconds of the clock, settling time left out; None if it was not."""
        pattern = re.compile(self.case.sign)
        times = sorted(entry.at_s for entry in self.diary() if pattern.match(entry.words))
        return times[self.case.sign_count - 1] if len(times) >= self.case.sign_count else None

    def pids(self) -> dict[int, int]:
        """The rank of each process that wrote one down."""
        found = re.finditer(r"rank (\d+) pid (\d+)$", "\n".join(entry.words for entry in self.diary()), re.MULTILINE)
        return {int(match[2]): int(match[1]) for match in found}

    @property
    def told(self) -> Path:
        """Where a launcher writes by what it is to be asked about: arguments of `bsl spy`, such as a Slurm job's id."""
        return self.folder / "ask.txt"

    def whom(self) -> list[str]:
        """The arguments of `bsl spy` that name this program: the launcher's process, unless it tells otherwise."""
        return self.told.read_text().split() if self.told.exists() else ["--local", "--pid", str(self.launcher.pid)]

    def output(self) -> str:
        return (self.folder / "output.txt").read_text(errors="replace")


@contextmanager
def started(case: ForeignCase, setup: Setup, folder: Path) -> Iterator[Running]:
    """Start the program of a case in `folder`; at the end no process of it is left."""
    folder.mkdir(parents=True)
    mark = uuid.uuid4().hex
    environment = {name: os.environ[name] for name in KEPT if name in os.environ}
    environment |= {"OMP_NUM_THREADS": "1", "FOREIGN_LOG": str(folder / "diary.txt"), MARK: mark}
    environment |= {"PYTHONPATH": str(setup.site)} if setup.site else {}
    python = setup.interpreters[case.interpreter]
    environment["PATH"] = f"{Path(python).parent}:{environment.get('PATH', '/usr/bin:/bin')}"
    environment |= {name: value.format(folder=folder) for name, value in case.environment}
    values = {
        "python": python,
        "program": PROGRAMS / case.program,
        "programs": PROGRAMS,
        "culprit": case.culprit,
        "port": _free_port(),
        "world_size": case.world_size,
        "folder": folder,
    }
    command = [word.format(**values) for word in case.command]
    with (folder / "output.txt").open("wb") as output:
        launcher = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield Running(case, folder, launcher, time.time())
    finally:
        _end(launcher, mark)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _end(launcher: subprocess.Popen[bytes], mark: str) -> None:
    """End the launcher's process group, then whatever still carries the mark in its environment."""
    if launcher.poll() is None:
        os.killpg(launcher.pid, signal.SIGTERM)
        os.killpg(launcher.pid, signal.SIGCONT)
    for _ in range(10):
        for pid in _marked(mark):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        launcher.poll()
        if not _marked(mark):
            break
        time.sleep(POLL_S)
    launcher.wait()


def _marked(mark: str) -> list[int]:
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:
                continue
    return found

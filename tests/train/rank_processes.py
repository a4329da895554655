"""Starts the processes of ranks: forked from one that has imported torch, or new ones where there is a GPU."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

SERVER = Path(__file__).parent / "programs" / "forked_ranks.py"
SHARED = 0o002
"""The umask of ranks, as where a project shares its files."""
START_TIMEOUT_S = 600.0


class RankProcess(Protocol):
    """What tests need of `subprocess.Popen`."""

    pid: int

    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int, /) -> None: ...
    def kill(self) -> None: ...


class StartRank(Protocol):
    """Start `python PROGRAM...` with this environment; what it prints goes into `log`."""

    def __call__(self, program: Sequence[str], environment: Mapping[str, str], log: Path) -> RankProcess: ...


class ForkServer:
    """A running `programs/forked_ranks.py`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._held = b""
        self._started: list[int] = []
        self.statuses: dict[int, int] = {}

    def start(self, program: Sequence[str], environment: Mapping[str, str], log: Path) -> RankProcess:
        assert self._process.stdin is not None
        request = {"program": list(program), "environment": dict(environment), "log": str(log)}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        end = time.monotonic() + START_TIMEOUT_S
        while not self._started:
            assert time.monotonic() < end, "no rank was forked"
            self.read(1.0)
        return ForkedProcess(self, self._started.pop())

    def read(self, timeout_s: float) -> None:
        """Read what the server has to say, and wait for it for at most so long."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], max(0.0, timeout_s))[0]:
            return
        data = os.read(self._process.stdout.fileno(), 65536)
        assert data, "the process from which ranks are forked has ended"
        *lines, self._held = (self._held + data).split(b"\n")
        for line in map(json.loads, lines):
            if "started" in line:
                self._started.append(line["started"])
                self.statuses.pop(line["started"], None)  # a number that is used again
            else:
                self.statuses[line["ended"]] = line["status"]


class ForkedProcess:
    """A rank with the interface of `subprocess.Popen`."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server = server
        self.pid = pid
        self._status: int | None = None

    @property
    def returncode(self) -> int | None:
        return self._status

    def poll(self) -> int | None:
        return self._poll(0.0)

    def _poll(self, timeout_s: float) -> int | None:
        if self._status is None:
            if self.pid not in self._server.statuses:
                self._server.read(timeout_s)
            self._status = self._server.statuses.get(self.pid)
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (timeout if timeout is not None else float("inf"))
        while (status := self._poll(min(1.0, end - time.monotonic()))) is None:
            if time.monotonic() >= end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return status

    def send_signal(self, number: int, /) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_new(program: Sequence[str], environment: Mapping[str, str], log: Path) -> RankProcess:
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, *program], env=environment, stdout=output, stderr=subprocess.STDOUT, umask=SHARED
        )


@contextmanager
def rank_starter() -> Iterator[StartRank]:
    """Yield a function that starts ranks. A process that has found a GPU cannot be forked."""
    if Path("/dev/nvidiactl").exists():
        yield start_new
        return
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with subprocess.Popen(
        [sys.executable, str(SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, umask=SHARED
    ) as process:
        try:
            yield ForkServer(process).start
        finally:
            assert process.stdin is not None
            process.stdin.close()

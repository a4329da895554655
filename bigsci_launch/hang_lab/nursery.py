"""Forks ranks from a process that has imported torch: they start in one second, and new processes in five.

Meant for tests and benchmarks, which start many reproductions one after another.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from bigsci_launch.errors import LabError
from bigsci_launch.hang_lab.programs import RANK_VARIABLES, lab_program

END_TIMEOUT_S = 10.0


class Nursery:
    """A running `diagnostics/lab/nursery.py`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._is_ready = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], output: Path) -> int:
        """Start a runner with `arguments` for rank_runner.py; return its process id, which is also its session id.

        Raises:
            LabError: the nursery has ended.
        """
        if not self._is_ready:
            self._is_ready = self._read() == "ready"
        request = {"arguments": list(arguments), "environment": dict(environment), "output": str(output)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise LabError("the process from which ranks are forked has ended (its error is above)")
        return line


@contextmanager
def open_nursery() -> Iterator[Nursery]:
    """Yield a nursery. It ends with the block, and so does every process that was forked from it."""
    process = subprocess.Popen(
        [sys.executable, str(lab_program("nursery"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **RANK_VARIABLES},
    )
    try:
        yield Nursery(process)
    finally:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        process.stdout.close()
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

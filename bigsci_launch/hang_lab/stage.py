"""Sets up and takes down the disk or network that a reproduction needs, by means of `diagnostics/lab/stages.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from bigsci_launch.errors import LabError
from bigsci_launch.hang_lab.needs import search_path
from bigsci_launch.hang_lab.programs import lab_program
from bigsci_launch.safe_files import parse_json

UNDO_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Variables for every rank, and namespaces that share the ranks between them in equal parts."""

    variables: Mapping[str, str] = field(default_factory=dict)
    namespaces: tuple[str, ...] = ()

    def environment(self, rank: int, world_size: int) -> dict[str, str]:
        own = dict(self.variables)
        if self.namespaces:
            own["BSL_LAB_NAMESPACES"] = self.namespaces[rank * len(self.namespaces) // world_size]
        return own


class SetStage:
    """The process of a stage. Closing its standard input undoes the stage."""

    def __init__(self, process: subprocess.Popen[str], surroundings: Surroundings) -> None:
        self._process, self.surroundings = process, surroundings

    def undo(self) -> None:
        """Take the stage down and wait until that is done. Idempotent.

        Raises:
            LabError: taking it down failed.
        """
        if self._process.stdin and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(UNDO_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise LabError(f"the stage (pid {self._process.pid}) could not be taken down, and was killed") from None


@contextmanager
def set_stage(name: str | None) -> Iterator[SetStage | None]:
    """Set the stage `name`, and undo it after the block, if that has not been done before.

    Raises:
        LabError: it cannot be set.
    """
    if name is None:
        yield None
        return
    argv = [sys.executable, "-I", "-S", str(lab_program("stages")), name]
    process = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PATH": search_path()}
    )
    try:
        yield SetStage(process, _read_surroundings(process, name))
    finally:
        SetStage(process, Surroundings()).undo()
        if process.stdout:
            process.stdout.close()


def _read_surroundings(process: subprocess.Popen[str], name: str) -> Surroundings:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise LabError(f"the stage {name} could not be set up (its error is above)")
    ready: dict[str, Any] = parse_json(line)
    return Surroundings(ready["environment"], tuple(ready["namespaces"]))

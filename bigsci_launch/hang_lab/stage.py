"""What a reproduction needs around it (a disk, a network), made and undone by `diagnostics/lab/stages.py`."""

from __future__ import annotations

import json
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

UNDO_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What ranks are started with: variables, and the namespaces that the halves of them live in."""

    variables: Mapping[str, str] = field(default_factory=dict)
    namespaces: tuple[str, ...] = ()

    def environment(self, rank: int, world_size: int) -> dict[str, str]:
        """The environment of `rank`."""
        own = dict(self.variables)
        if self.namespaces:
            own["BSL_LAB_NAMESPACES"] = self.namespaces[rank * len(self.namespaces) // world_size]
        return own


class SetStage:
    """A stage's process. Closing its input undoes the stage."""

    def __init__(self, process: subprocess.Popen[str], surroundings: Surroundings) -> None:
        self._process, self.surroundings = process, surroundings

    def undo(self) -> None:
        """Take the stage down and wait until it is. Idempotent.

        Raises:
            LabError: it does not come down.
        """
        if self._process.stdin and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(UNDO_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise LabError(f"the stage (pid {self._process.pid}) did not come down; was killed") from None


@contextmanager
def set_stage(name: str | None) -> Iterator[SetStage | None]:
    """The stage `name`; undone at the end, if it was not before.

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
        raise LabError(f"the stage {name} could not be set (its error is above)")
    ready: dict[str, Any] = json.loads(line)
    return Surroundings(ready["environment"], tuple(ready["namespaces"]))

"""Deletes a run that has ended: its attempts, logs, checkpoints and dumps."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bigsci_launch.checkpoints.folder import CheckpointsDir, remove, set_aside
from bigsci_launch.checkpoints.verify import list_checkpoints
from bigsci_launch.errors import RunDirError
from bigsci_launch.printable import one_line
from bigsci_launch.runs.attempts import query_attempts
from bigsci_launch.runs.find import run_argument
from bigsci_launch.runs.layout import RunDir, read_record
from bigsci_launch.runs.ownership import require_own_run
from bigsci_launch.units import format_bytes

RECORDED = {"schema_version", "run_id", "name", "topology"}
"""What the record of every run has. Other programs keep a `run.json` too."""


@dataclass(frozen=True, slots=True)
class Removal:
    """What goes if a run is deleted. `others` are the files that the program itself has left, below one folder or file
    each; `links` are folders elsewhere that it links to, which stay."""

    run: RunDir
    num_attempts: int
    steps: tuple[int, ...]
    num_files: int
    num_bytes: int
    others: tuple[str, ...]
    links: tuple[Path, ...]

    @property
    def lines(self) -> list[str]:
        steps = ", ".join(map(str, self.steps))
        saved = f", checkpoints of steps {steps}" if steps else ", no checkpoint of `bsl train`"
        others = [f"with what the program left: {', '.join(self.others)}"] if self.others else []
        stays = [f"stays: {link} -> {link.resolve()}" for link in self.links]
        attempts = f"{self.num_attempts} attempt{'' if self.num_attempts == 1 else 's'}"
        what = f"{attempts}{saved}: {self.num_files} files, {format_bytes(self.num_bytes)}"
        return [f"{self.run.path}: {what}", *others, *stays]


def plan_removal(run: RunDir) -> Removal:
    """Return what would go.

    Raises:
        RunDirError: the run is another user's, its record is not one that `bsl submit` wrote, one of its attempts has
            not ended, as far as is known, or one of its checkpoints is pinned.
    """
    if not read_record(run.record).keys() >= RECORDED:
        raise RunDirError(f"{run.record}: not the record of a run: nothing is deleted")
    require_own_run(run, "delete it")
    attempts = [*run.attempts(), *run.queued_attempts()]
    for name, job in query_attempts(attempts).items():
        if not (job.state.is_over or job.is_gone):
            why = f" ({job.reason})" if job.reason else ""
            raise RunDirError(
                f"run {run.name}: attempt {name} has not ended: {job.state.value}{why}",
                hint=f"`bsl status {run_argument(run)}` shows what is known, and `bsl cancel` ends it",
            )
    states = list_checkpoints(CheckpointsDir(run.checkpoints))
    if pinned := [str(state.step) for state in states if state.is_pinned]:
        raise RunDirError(
            f"run {run.name}: pinned checkpoints are kept: step {', '.join(pinned)}",
            hint=f"`bsl checkpoint pin {run_argument(run)} --step {pinned[0]} --undo` unpins one",
        )
    files = list(_files(run.path))
    return Removal(
        run=run,
        num_attempts=len(attempts),
        steps=tuple(state.step for state in states),
        num_files=len(files),
        num_bytes=sum(path.lstat().st_size for path in files),
        others=tuple(_others(run)),
        links=tuple(path for path in files if path.is_symlink() and path.is_dir()),
    )


def remove_run(removal: Removal) -> None:
    """Delete the run. If this is killed or fails, what is left has a hidden name and is no run.

    Raises:
        OSError: something could not be deleted.
    """
    remove(set_aside(removal.run.path))


def _others(run: RunDir) -> Iterator[str]:
    """Yield each entry of the run directory that `bsl` did not make, with its size."""
    for path in sorted(run.path.iterdir()):
        if path not in run.own_entries:
            files = list(_files(path)) if path.is_dir() and not path.is_symlink() else [path]
            size = format_bytes(sum(each.lstat().st_size for each in files))
            yield f"{one_line(path.name)}{'/' if path.is_dir() else ''} ({size})"


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files below `folder`, and its links to other folders, which are not followed."""
    for at, folders, names in os.walk(folder):
        yield from (Path(at, name) for name in names)
        yield from (path for name in folders if (path := Path(at, name)).is_symlink())

"""trackio: a run in its own store, where TRACKIO_DIR says, or in the cache of Hugging Face."""

from __future__ import annotations

import os
from collections.abc import Sequence

import trackio
from trackio.sqlite_storage import SQLiteStorage

from bigsci_launch.export.trackers.seam import NO_STEP, PROJECT, TrackedNote, TrackedRun, TrackedStep


class TrackioRun:
    """A run of trackio. Its own process for a dashboard is not started."""

    def __init__(self, run: TrackedRun) -> None:
        project = os.environ.get("TRACKIO_PROJECT") or PROJECT
        name = f"{run.name}-{run.id[:8]}"
        newest = SQLiteStorage.get_max_step_for_run(project, name) if _is_there(project) else None
        self._newest: int = NO_STEP if newest is None else newest
        self._run = trackio.init(
            project=project,
            name=name,
            config=dict(run.settings),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def newest_step(self) -> int:
        return self._newest

    def log(self, steps: Sequence[TrackedStep]) -> None:
        for each in steps:
            self._run.log(dict(each.values), step=each.step)

    def annotate(self, note: TrackedNote) -> None:
        self._run.alert(note.title, text=note.text)

    def close(self) -> None:
        self._run.finish()


def _is_there(project: str) -> bool:
    return project in SQLiteStorage.get_projects()


def open_run(run: TrackedRun) -> TrackioRun:
    return TrackioRun(run)

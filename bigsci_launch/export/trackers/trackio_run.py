"""trackio: a run in its own store, where TRACKIO_DIR says, or in the cache of Hugging Face."""

from __future__ import annotations

import os
from collections.abc import Sequence

import trackio
from trackio.sqlite_storage import SQLiteStorage

from bigsci_launch.export.trackers.seam import (
    NO_STEP,
    PROJECT,
    TrackedNote,
    TrackedRun,
    TrackedStep,
    wait_until_written,
)

ELSEWHERE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
"""With one of these, trackio stores on another machine, and cannot tell what is there."""


class TrackioRun:
    """A run of trackio. Its own process for a dashboard is not started."""

    def __init__(self, run: TrackedRun) -> None:
        project = os.environ.get("TRACKIO_PROJECT") or PROJECT
        name = f"{run.name}-{run.id[:8]}"
        self._is_local = not any(os.environ.get(each) for each in ELSEWHERE)
        self._newest = _newest_step(project, name) if self._is_local else None
        self._run = trackio.init(
            project=project,
            name=name,
            config=dict(run.settings),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def newest_step(self) -> int | None:
        return self._newest

    def log(self, steps: Sequence[TrackedStep]) -> None:
        for each in steps:
            self._run.log(dict(each.values), step=each.step)

    def annotate(self, note: TrackedNote) -> None:
        """Add an alert.

        Raises:
            BslError: trackio, which does it in a thread, did not store it.
        """
        if self._has(note):
            return
        self._run.alert(note.title, text=note.text, step=note.step)
        if self._is_local:
            wait_until_written(lambda: self._has(note), f"trackio: the alert {note.title!r} is not stored")

    def _has(self, note: TrackedNote) -> bool:
        """Whether the store has it: a follower that was killed may not have noted that."""
        alerts = SQLiteStorage.get_alerts(self._run.project, self._run.name)
        return any((each["title"], each["text"]) == (note.title, note.text) for each in alerts)

    def close(self) -> None:
        self._run.finish()


def _newest_step(project: str, name: str) -> int:
    newest = SQLiteStorage.get_max_step_for_run(project, name) if project in SQLiteStorage.get_projects() else None
    return NO_STEP if newest is None else newest


def open_run(run: TrackedRun) -> TrackioRun:
    return TrackioRun(run)

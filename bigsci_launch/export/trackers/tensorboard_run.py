"""TensorBoard: event files in the run directory. A step is one record, so that it is there as a whole or not at all."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from bigsci_launch.export.trackers.seam import NO_STEP, TrackedNote, TrackedRun, TrackedStep
from bigsci_launch.safe_files import make_folder

NOTES = "notes"


class EventFiles:
    """The event files of a run. Each process that follows it writes one of its own."""

    def __init__(self, run: TrackedRun) -> None:
        make_folder(run.folder)
        paths = sorted(run.folder.glob("events.out.tfevents.*"))
        steps = [event.step for path in paths for event in EventFileLoader(str(path)).Load() if _is_step(event)]
        self._newest = max(steps, default=NO_STEP)
        self._writer = EventFileWriter(str(run.folder))

    def newest_step(self) -> int:
        return self._newest

    def log(self, steps: Sequence[TrackedStep]) -> None:
        for each in steps:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in each.values.items()]
            self._add(each.time, each.step, Summary(value=values))
        self._writer.flush()

    def annotate(self, note: TrackedNote) -> None:
        self._add(note.time, note.step, text_pb(NOTES, f"**{note.title}** {note.text}"))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add(self, moment: float | None, step: int | None, summary: Summary) -> None:
        when = time.time() if moment is None else moment
        self._writer.add_event(Event(wall_time=when, step=step or 0, summary=summary))


def _is_step(event: Event) -> bool:
    return any(value.tag != NOTES for value in event.summary.value)


def open_run(run: TrackedRun) -> EventFiles:
    return EventFiles(run)

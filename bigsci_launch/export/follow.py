"""Follows the records of a run, and gives each step to a tracker once, over all attempts.

The tracker itself knows best which step is its newest; where it cannot tell, a cursor in the run directory does. A step
that an attempt does again after a restart is not given again: what the tracker has of it stays.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from bigsci_launch.checkpoints.restart import files_of_steps
from bigsci_launch.config.load import load_resolved
from bigsci_launch.errors import BslError, RunDirError
from bigsci_launch.export.facts import TAIL_BYTES, tokens_per_step
from bigsci_launch.export.trackers.seam import NO_STEP, TrackedNote, TrackedRun, TrackedStep, open_tracker
from bigsci_launch.runs.attempts import read_job
from bigsci_launch.runs.events import read_last_events
from bigsci_launch.runs.find import find_attempt
from bigsci_launch.runs.layout import AttemptDir, RunDir, read_json
from bigsci_launch.runs.watching.ledger import RunFinding, read_findings
from bigsci_launch.safe_files import make_folder, write_file
from bigsci_launch.watch.show.history import StepPoint, points_of_records, read_points, read_printed

SCHEMA_VERSION = 1
MOST_AT_ONCE = 500
"""Steps that a tracker gets before the cursor is written again."""
SETTINGS = ("parallelism", "model", "training", "optimizer")


@dataclass(slots=True)
class Cursor:
    """What a tracker has: its newest step, and the keys of its notes."""

    step: int | None = None
    notes: set[str] = field(default_factory=set)


class TrackerFollower:
    """Keeps one tracker up to date with a run. One process for each tracker of a run may do that at a time."""

    def __init__(self, run: RunDir, name: str) -> None:
        self._run, self._name = run, name
        make_folder(run.exports)
        self._cursor = read_cursor(run, name)
        self._tracker = open_tracker(name, tracked_run(run, name))
        newest = self._tracker.newest_step()
        if newest is not None:
            self._cursor.step = None if newest == NO_STEP else newest
        self._read: set[str] = set()

    def catch_up(self) -> int:
        """Give the tracker what is new. Return the number of steps."""
        num_steps = 0
        attempts = [each for each in self._run.attempts() if each.name not in self._read]
        for attempt in attempts:
            beginning = beginning_of(attempt, self._cursor.step)
            steps = new_steps(attempt, self._cursor.step)
            num_steps += len(steps)
            for first in range(0, len(steps), MOST_AT_ONCE):
                block = steps[first : first + MOST_AT_ONCE]
                self._tracker.log(block)
                self._cursor.step = block[-1].step
                self._write_cursor()
            # trackio finds a run again only if it has steps: a note before them would be another run's after a kill.
            self._annotate(beginning)
        self._read.update(attempt.name for attempt in attempts[:-1])
        for finding in read_findings(self._run):
            self._annotate(note_of(finding))
        return num_steps

    def close(self) -> None:
        self._tracker.close()

    def _annotate(self, note: TrackedNote) -> None:
        if note.key not in self._cursor.notes:
            self._tracker.annotate(note)
            self._cursor.notes.add(note.key)
            self._write_cursor()

    def _write_cursor(self) -> None:
        document = {"schema_version": SCHEMA_VERSION, "step": self._cursor.step, "notes": sorted(self._cursor.notes)}
        write_file(self._run.tracker_cursor(self._name), f"{json.dumps(document, indent=2)}\n")


def read_cursor(run: RunDir, name: str) -> Cursor:
    """Return the cursor of a tracker; an empty one if it has none.

    Raises:
        RunDirError: it cannot be read, or is damaged. The steps would be given again.
    """
    path = run.tracker_cursor(name)
    if not path.exists():
        return Cursor()
    document = read_json(path)
    step, notes = (document.get("step"), document.get("notes")) if isinstance(document, dict) else (None, None)
    if not isinstance(step, int | None) or not isinstance(notes, list):
        raise RunDirError(f"{path}: not a cursor of a tracker", hint="remove it: the tracker then gets all steps again")
    return Cursor(step, {str(key) for key in notes})


def tracked_run(run: RunDir, name: str) -> TrackedRun:
    """Return the run as tracker `name` knows it.

    Raises:
        RunDirError: its record cannot be read.
    """
    record = read_json(run.record)
    number = str(record.get("run_id") or run.name) if isinstance(record, dict) else run.name
    return TrackedRun(run.name, number, run.tracker_files(name), _settings(run))


def _settings(run: RunDir) -> dict[str, Any]:
    with suppress(BslError):
        document = load_resolved(find_attempt(run).config).model_dump(mode="json")
        return {name: document[name] for name in SETTINGS if document.get(name)}
    return {}


def new_steps(attempt: AttemptDir, newest: int | None) -> list[TrackedStep]:
    """Return the steps of an attempt that are higher than `newest`, in their order."""
    tokens = tokens_per_step(attempt)
    steps = (_tracked(point, tokens) for point in _points(attempt, newest) if newest is None or point.step > newest)
    return [step for step in steps if step.values]


def _points(attempt: AttemptDir, newest: int | None) -> Sequence[StepPoint]:
    """Return the newest steps, if they reach back to what is known; else all."""
    if newest is None:
        return read_points(attempt)
    records = [record for path in files_of_steps(attempt) for record in read_last_events(path, TAIL_BYTES)]
    records.sort(key=lambda record: record.get("time") or 0.0)
    points = points_of_records(records) or read_printed(attempt, TAIL_BYTES)
    return points if points and points[0].step <= newest else read_points(attempt)


def _tracked(point: StepPoint, tokens: int | None) -> TrackedStep:
    rate = tokens / point.seconds if tokens and point.seconds else None
    values = {
        "loss": point.loss,
        "grad_norm": point.grad_norm,
        "seconds_per_step": point.seconds,
        "tflops_per_rank": point.tflops,
        "tokens_per_second": rate,
    }
    return TrackedStep(point.step, point.time, {name: value for name, value in values.items() if value is not None})


def beginning_of(attempt: AttemptDir, step: int | None) -> TrackedNote:
    """Return the note that an attempt has begun, after `step`."""
    record = None
    with suppress(RunDirError):
        record = read_job(attempt)
    label, when = (record.label, record.submitted) if record is not None else ("no job", time.time())
    return TrackedNote(attempt.name, f"attempt {attempt.name}", label, step, when)


def note_of(finding: RunFinding) -> TrackedNote:
    """Return a finding as a note. One that is over and comes again is another."""
    key = f"{finding.key}@{finding.noticed:.0f}"
    return TrackedNote(key, finding.kind.replace("_", " "), finding.sentence, finding.step, finding.noticed)

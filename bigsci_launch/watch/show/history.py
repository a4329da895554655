"""The steps of all attempts of a run, as they reported them: losses, gradient norms, seconds. Files of any size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigsci_launch.checkpoints.restart import STEP, files_of_steps, newest_logs
from bigsci_launch.runs.layout import AttemptDir, RunDir
from bigsci_launch.runs.step_forms import forms_of
from bigsci_launch.safe_files import open_stream, parse_json
from bigsci_launch.step_lines import StepForm, StepReader

BLOCK_BYTES = 8 << 20
LONGEST_LINE = 1 << 16
"""A line of a step is shorter: what follows in a longer one, such as a progress bar, is another."""


@dataclass(frozen=True, slots=True)
class StepPoint:
    """What was reported of a step. What was not is None; a loss may be NaN."""

    step: int
    loss: float | None = None
    grad_norm: float | None = None
    seconds: float | None = None
    tflops: float | None = None
    time: float | None = None


@dataclass(frozen=True, slots=True)
class AttemptHistory:
    """The steps of an attempt in the order of their numbers; one that was reported twice counts once."""

    attempt: AttemptDir
    points: tuple[StepPoint, ...] = ()


def read_history(run: RunDir) -> list[AttemptHistory]:
    """Return the steps of every attempt, the oldest first; an attempt without any has no points.

    Raises:
        RunDirError: the run cannot be read.
    """
    return [AttemptHistory(attempt, read_points(attempt)) for attempt in run.attempts()]


def read_points(attempt: AttemptDir) -> tuple[StepPoint, ...]:
    """Return the steps of an attempt: from the records of its ranks, else from the lines that its program printed."""
    files = files_of_steps(attempt)
    records: Iterable[dict[str, Any]] = (record for path in files for record in _records(path))
    if len(files) > 1:
        records = sorted(records, key=lambda record: record.get("time") or 0.0)
    return points_of_records(records) or read_printed(attempt)


def points_of_records(records: Iterable[Mapping[str, Any]]) -> tuple[StepPoint, ...]:
    """Return the steps among a rank's records."""
    return _by_step(_point(record) for record in records if _is_step(record))


def read_printed(attempt: AttemptDir, tail_bytes: int | None = None) -> tuple[StepPoint, ...]:
    """Return the steps in the newest log that has any; with `tail_bytes`, only those near its end."""
    forms = forms_of(attempt)
    for path in newest_logs(attempt):
        if found := _by_step(_printed(path, tail_bytes, forms)):
            return found
    return ()


def _by_step(points: Iterable[StepPoint]) -> tuple[StepPoint, ...]:
    found = {point.step: point for point in points}
    return tuple(found[step] for step in sorted(found))


def _records(path: Path) -> Iterator[dict[str, Any]]:
    for block in _blocks(path, None):
        for line in block.splitlines():
            if STEP in line:
                with suppress(ValueError):  # torn
                    record = parse_json(line, allow_nan=True)
                    if isinstance(record, dict):
                        yield record


def _is_step(record: Mapping[str, Any]) -> bool:
    return record.get("kind") == "step" and isinstance(record.get("step"), int)


def _point(record: Mapping[str, Any]) -> StepPoint:
    names = ("loss", "grad_norm", "seconds", "tflops", "time")
    return StepPoint(record["step"], **{name: _number(record.get(name)) for name in names})


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _printed(path: Path, tail_bytes: int | None, forms: Sequence[StepForm]) -> Iterator[StepPoint]:
    reader = StepReader(forms)
    for block in _blocks(path, tail_bytes):
        for line in reader.steps_in(block.decode("utf-8", "replace")):
            if line.step is not None and not line.is_evaluation:
                yield StepPoint(line.step, line.loss, line.grad_norm, line.seconds)


def _blocks(path: Path, tail_bytes: int | None) -> Iterator[bytes]:
    """Yield a file in blocks of whole lines; what has no end of a line for very long is cut."""
    try:
        with open_stream(path, follow=True) as stream:
            if tail_bytes is not None:
                stream.seek(max(0, stream.seek(0, 2) - tail_bytes))
            rest = b""
            while block := stream.read(BLOCK_BYTES):
                whole, newline, after = block.rpartition(b"\n")
                yield rest + whole + newline
                rest = after[-LONGEST_LINE:]
            yield rest
    except OSError:
        return

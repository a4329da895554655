"""Records of ranks, and of the controller of `survive`, as log_events."""

from __future__ import annotations

from typing import Any

from bigsci_launch.runs.generations.read import number_in, parse_line, whole_in
from bigsci_launch.safe_files import parse_json
from bigsci_launch.watch.judge.log_event import IN_BACKGROUND, LogEvent


def read_record(line: str, rank: int) -> LogEvent | None:
    """Return the content of a record; None for a line that is not a record, `output` for one without progress."""
    try:
        record = parse_json(line, allow_nan=True)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    return _log_event(record, rank)


def read_generation_record(line: str) -> LogEvent | None:
    """Return the content of a record of the controller; None for a line that is not a record."""
    found = parse_line(line)
    if found is None:
        return None
    return LogEvent("generation", found.time, step=found.step, phase=found.what, world_size=found.world_size)


def _log_event(record: dict[str, Any], rank: int) -> LogEvent:
    kind, time, step = record["kind"], number_in(record.get("time")), whole_in(record.get("step"))
    if kind == "start":
        return LogEvent("start", time, rank, step)
    if kind == "heartbeat":
        return LogEvent("phase", time, rank, step, str(record.get("phase")))
    if kind == "step":
        return LogEvent(
            "step",
            time,
            rank,
            step,
            seconds=number_in(record.get("seconds")),
            loss=number_in(record.get("loss")),
            grad_norm=number_in(record.get("grad_norm")),
            batch_size=whole_in(record.get("global_batch_size")),
            text="skipped" if record.get("num_skipped") else "",
        )
    if kind == "evaluation":
        return LogEvent(
            "evaluated", time, rank, step, seconds=number_in(record.get("seconds")), loss=number_in(record.get("loss"))
        )
    if kind == "save":
        text = IN_BACKGROUND if "stalled_s" in record else ""
        return LogEvent("saved", time, rank, step, seconds=number_in(record.get("seconds")), text=text)
    if kind == "load":
        return LogEvent("phase", time, rank, whole_in(record.get("checkpoint_step")), "loaded")
    if kind == "end":
        return LogEvent("end", time, rank, step, text=str(record.get("reason") or ""))
    return LogEvent("output", time, rank)

"""Records of ranks, and of the controller of `survive`, as sightings."""

from __future__ import annotations

from typing import Any

from bigsci_launch.runs.generations.read import number_in, parse_line, whole_in
from bigsci_launch.safe_files import parse_json
from bigsci_launch.watch.judge.sighting import Sighting


def read_record(line: str, rank: int) -> Sighting | None:
    """Return what a record says; None for a line that is no record, `output` for one that says nothing of progress."""
    try:
        record = parse_json(line, allow_nan=True)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    return _sighting(record, rank)


def read_generation_record(line: str) -> Sighting | None:
    """Return what a record of the controller says; None for a line that is no record."""
    found = parse_line(line)
    if found is None:
        return None
    return Sighting("generation", found.time, step=found.step, phase=found.what, world_size=found.world_size)


def _sighting(record: dict[str, Any], rank: int) -> Sighting:
    kind, time, step = record["kind"], number_in(record.get("time")), whole_in(record.get("step"))
    if kind == "start":
        return Sighting("start", time, rank, step)
    if kind == "heartbeat":
        return Sighting("phase", time, rank, step, str(record.get("phase")))
    if kind == "step":
        return Sighting(
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
        return Sighting(
            "evaluated", time, rank, step, seconds=number_in(record.get("seconds")), loss=number_in(record.get("loss"))
        )
    if kind == "save":
        return Sighting("saved", time, rank, step, seconds=number_in(record.get("seconds")))
    if kind == "load":
        return Sighting("phase", time, rank, whole_in(record.get("checkpoint_step")), "loaded")
    if kind == "end":
        return Sighting("end", time, rank, step, text=str(record.get("reason") or ""))
    return Sighting("output", time, rank)

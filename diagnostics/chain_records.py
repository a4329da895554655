"""Reads what the starts of a run left. Part of chain.py: standard library only, Python 3.8 or newer."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import safe_files
from chain_decision import Chain, Mark, Start
from exit_outside import read_ended_by

if TYPE_CHECKING:
    from typing import Any

    Record = dict[str, Any]

ATTEMPT = re.compile(r"([0-9]+)(?:\.r([0-9]+))?")
TAG = re.compile(r"global_step([0-9]+)|([0-9]+)")
ITERATION = re.compile(rb"iteration\s+(\d+)\s*/\s*(\d+)\s*\|")
TAIL_BYTES = 2**16
MAX_LOGS = 16
"""Logs that are searched for a step, the newest first: one rank of a program prints it."""


def read_json(path: Path) -> Record:
    """Return the record in `path`; an empty one if it is missing or torn."""
    try:
        record = safe_files.read_json(path)
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def write_record(path: Path, record: Record) -> None:
    """Replace the file at `path` by `record`."""
    safe_files.write_file(path, json.dumps(record, indent=1) + "\n")


def order(path: Path) -> tuple[int, int]:
    """Return number and restart of an attempt's directory; they order the starts of a run."""
    match = ATTEMPT.fullmatch(path.name)
    return (int(match[1]), int(match[2] or 0)) if match else (-1, -1)


def base_of(attempt: Path) -> Path:
    """Return the attempt that a requeue belongs to."""
    return attempt.with_name(attempt.name.partition(".")[0])


def queued_attempts(run: Path) -> list[Path]:
    """Return the attempts that wait behind another one."""
    return sorted((path.parent for path in (run / "attempts").glob("*/queued")), key=order)


def read_chain(attempt: Path) -> Chain:
    """Return the bounds of the chain that a start belongs to."""
    record = read_json(attempt / "chain.json")
    return Chain(**{name: record[name] for name in Chain._fields if name in record})


def starts_before(attempt: Path, *, including: bool) -> list[Path]:
    """Return the starts of the chain, oldest first, up to `attempt`, which is left out unless `including`."""
    first = read_json(attempt / "chain.json").get("first") or base_of(attempt).name
    bounds = order(attempt.with_name(first)), order(attempt)
    found = [path for path in attempt.parent.iterdir() if bounds[0] <= order(path) <= bounds[1]]
    started = [path for path in found if not (path / "queued").exists()]
    return sorted((path for path in started if including or path != attempt), key=order)


def read_starts(paths: list[Path], chain: Chain, newest: Mark | None) -> list[Start]:
    """Return what is known of the starts. `newest` is the checkpoint after the last of them."""
    later = [mark_before(path) for path in paths[1:]] + [newest]
    return [read_start(path, chain, after) for path, after in zip(paths, later)]


def read_start(attempt: Path, chain: Chain, after: Mark | None) -> Start:
    end, began = read_json(attempt / "exit.json"), read_json(attempt / "chain.json").get("started")
    step, total = steps_of(attempt, has_records=chain.total_steps is not None)
    return Start(
        name=attempt.name,
        reason=end.get("reason"),
        step=step,
        checkpoint=after,
        started=began or end.get("started"),
        total_steps=total,
        is_cancelled=(base_of(attempt) / "cancelled").exists(),
        ended_by=read_ended_by(attempt),
    )


def steps_of(attempt: Path, *, has_records: bool) -> tuple[int | None, int | None]:
    """Return the last step that a start made, and the last of the run if that is printed; 0: none, None: not known."""
    events = [path for path in (attempt / "events").glob("rank-*.jsonl") if path.stat().st_size]
    if events or has_records:
        return max((step for path in events for step in recorded_steps(path)), default=0), None
    logs = [*(attempt / "logs").glob("rank-*.log"), base_of(attempt) / "job.out"]
    found = [number for path in newest_files(logs) for number in ITERATION.findall(tail(path))]
    return max(((int(step), int(total)) for step, total in found), default=(None, None))


def recorded_steps(path: Path) -> list[int]:
    steps = []
    for line in tail(path).splitlines():
        if b'"step"' in line:
            with contextlib.suppress(ValueError, AttributeError, TypeError):
                record = safe_files.parse_json(line, allow_nan=True)
                steps += [int(record["step"])] if record.get("kind") == "step" else []
    return steps


def newest_files(paths: list[Path]) -> list[Path]:
    found = [(path.stat().st_mtime, path) for path in paths if path.exists()]
    return [path for _, path in sorted(found, reverse=True)[:MAX_LOGS]]


def tail(path: Path) -> bytes:
    try:
        with safe_files.open_stream(path, follow=True) as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - TAIL_BYTES))
            return stream.read()
    except OSError:
        return b""


def newest_checkpoint(run: Path) -> Mark | None:
    """Return the checkpoint that the `latest` files of the run's folder name; None if there is none."""
    marks = []
    for path in (run / "checkpoints").glob("latest*"):
        with contextlib.suppress(OSError):
            match = TAG.fullmatch(safe_files.read_file(path, follow=True).decode("utf-8", "replace").strip())
            step = int(match[1] or match[2]) if match else None
            marks.append(Mark(step, path.stat().st_mtime))
    return max(marks, key=lambda mark: (mark.step is not None, mark.step or 0, mark.time), default=None)


def mark_before(attempt: Path) -> Mark | None:
    """Return the newest checkpoint at the beginning of a start, as the start recorded it."""
    record = read_json(attempt / "chain.json").get("checkpoint")
    return Mark(record["step"], record["time"]) if record else None


def note_start(attempt: Path, newest: Mark | None, number: int) -> None:
    """Record when a start began, from which checkpoint, and the starts of its chain so far."""
    record = read_json(attempt / "chain.json")
    began = {"num_starts": number, "started": time.time(), "checkpoint": newest._asdict() if newest else None}
    write_record(attempt / "chain.json", {**record, **began})

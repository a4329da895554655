"""The losses of an attempt by step: from the records of its ranks, else from the lines that its program printed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from bigsci_launch.iteration_line import parse_iterations
from bigsci_launch.runs.layout import AttemptDir, rank_files
from bigsci_launch.safe_files import open_stream, parse_json

PART_BYTES = 32 << 20
"""How much of the beginning or the end of a file is read: the steps around a restart are there."""
MAX_LOGS_READ = 16
STEP = b'"kind": "step"'

Part = Literal["begin", "end"]


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses of an attempt. `log` is the log of the rank that reported them; `records` are its records of steps.

    A program without records has only lines in its log, and `records` is empty.
    """

    attempt: AttemptDir
    by_step: Mapping[int, float]
    log: Path
    records: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)


def read_losses(attempt: AttemptDir, part: Part) -> Losses | None:
    """Return the losses at the beginning or at the end of an attempt; None if it has reported none.

    If a step was reported twice, the later report counts.
    """
    by_rank: dict[int, dict[int, dict[str, Any]]] = {}
    for rank, path in _files_with_steps(attempt):
        if records := _step_records(path, part):
            by_rank[rank] = records
            if not _may_be_several(attempt):
                break
    if by_rank:
        first = min(by_rank, key=lambda rank: min(by_rank[rank]))
        reported = [each for found in by_rank.values() for each in found.values()]
        if len(by_rank) > 1:
            reported.sort(key=_moment)
        records = {record["step"]: record for record in reported}
        losses = {step: record["loss"] for step, record in records.items()}
        return Losses(attempt, losses, attempt.log_file(first), records)
    for path in newest_logs(attempt):
        printed = parse_iterations(_read(path, part).decode("utf-8", "replace"))
        if losses := {line.step: line.loss for line in printed if line.loss is not None}:
            return Losses(attempt, losses, path)
    return None


def read_kinds(attempt: AttemptDir, *kinds: str) -> Iterator[dict[str, Any]]:
    """Yield the records of these kinds at the beginning of an attempt, by rank; steps are not searched for them."""
    wanted = [f'"kind": "{kind}"'.encode() for kind in kinds]
    for path in rank_files(attempt.events, ".jsonl").values():
        for line in _read(path, "begin").splitlines():
            if any(text in line for text in wanted) and (record := _parse(line)) and record.get("kind") in kinds:
                yield record


def files_of_steps(attempt: AttemptDir) -> list[Path]:
    """Return the records of the rank that reports steps, or of each that has."""
    found = (path for _, path in _files_with_steps(attempt))
    return list(found) if _may_be_several(attempt) else list(islice(found, 1))


def _files_with_steps(attempt: AttemptDir) -> Iterator[tuple[int, Path]]:
    for rank, path in rank_files(attempt.events, ".jsonl").items():
        if _has_steps(path):
            yield rank, path


def _may_be_several(attempt: AttemptDir) -> bool:
    """Whether several ranks may have reported steps, one after the other: with `survive`, a generation with fewer
    ranks has another last one."""
    return attempt.generations.exists()


def _moment(record: Mapping[str, Any]) -> float:
    return float(record.get("time") or 0.0)


def _has_steps(path: Path) -> bool:
    """Whether a rank reports steps: one that does reports each. Only a part of the file is searched."""
    return STEP in _read(path, "begin", 1 << 16) or STEP in _read(path, "end", 1 << 16)


def _step_records(path: Path, part: Part) -> dict[int, dict[str, Any]]:
    lines = (line for line in _read(path, part).splitlines() if STEP in line)
    records = [record for line in lines if (record := _parse(line))]
    return {record["step"]: record for record in records if _is_step(record)}


def _is_step(record: Mapping[str, Any]) -> bool:
    is_number = isinstance(record.get("loss"), (int, float))
    return record.get("kind") == "step" and is_number and isinstance(record.get("step"), int)


def _parse(line: bytes) -> dict[str, Any]:
    try:
        record = parse_json(line, allow_nan=True)
    except ValueError:  # torn, or cut where reading began
        return {}
    return record if isinstance(record, dict) else {}


def newest_logs(attempt: AttemptDir) -> list[Path]:
    """Return the logs that may have lines of steps, the one written last first."""
    found = []
    for path in [*rank_files(attempt.logs, ".log").values(), attempt.job_output]:
        try:
            found.append((path.stat().st_mtime, path))
        except OSError:
            continue
    return [path for _, path in sorted(found, reverse=True)[:MAX_LOGS_READ]]


def _read(path: Path, part: Part, num_bytes: int = PART_BYTES) -> bytes:
    try:
        with open_stream(path, follow=True) as stream:
            if part == "end":
                stream.seek(max(0, stream.seek(0, os.SEEK_END) - num_bytes))
            return stream.read(num_bytes)
    except OSError:
        return b""

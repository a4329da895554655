"""Reads what a run recorded about its ranks: which were started, how each ended, what it raised, where it last was.

Nothing else is read: an injected fault of a rank is not evidence.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from bigsci_launch.runs.events import read_last_events
from bigsci_launch.runs.generations.read import read_generations
from bigsci_launch.runs.layout import AttemptDir, rank_files, read_record
from bigsci_launch.runs.step_forms import forms_of
from bigsci_launch.safe_files import open_stream
from bigsci_launch.step_lines import parse_steps

LOG_TAIL_BYTES = 65536
EVENT_TAIL_BYTES = 8192
MAX_LINE = 80
TRACEBACK = "Traceback (most recent call last)"
_STAMP = re.compile(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+)Z ")
_PREFIX = re.compile(r"^(?:\[default\d+\]:|\[rank\d+\]: )+")
"""torchrun puts the first before every line of a rank, torch puts the second before every line of its traceback."""
_FRAME = re.compile(r'^\s+File "(.+)", line (\d+), in (.+)$')
_LAST_LINE = re.compile(r"^([A-Za-z_][\w.]*)(?:: (.*))?$")
_ABORT = re.compile(r"terminate called after throwing an instance of '([\w:]+)'")
_WHAT = re.compile(r"^\s*what\(\):\s*(.+)$")
_LIBRARIES = ("site-packages", "dist-packages", "/lib/python", "<frozen ", "<string>")

RankRecord = dict[str, Any]


def read_records(attempt: AttemptDir | None) -> dict[str, Any]:
    """Return `expected` (from pid files), `exits`, `errors`, the first `tracebacks` in logs, and the last
    `heartbeats`."""
    if attempt is None:
        return {}
    generations = read_generations(attempt)
    started = [_pick(item, "rank", "node", "host", "pid") for item in _read_all(attempt.pids)]
    expected = [item for item in started if generations is None or generations.has(int(item["rank"]))]
    ranks = [int(item["rank"]) for item in expected]
    return {
        "expected": expected,
        "exits": _read_all(attempt.exits),
        "errors": [_error_of(item) for item in _read_all(attempt.errors)],
        "tracebacks": [
            found
            for rank in ranks
            if (found := first_traceback(attempt.log_file(rank), rank) or first_abort(attempt.log_file(rank), rank))
        ],
        "heartbeats": [found for rank in ranks if (found := last_heartbeat(attempt.event_file(rank), rank))],
    }


def log_sizes(attempt: AttemptDir | None) -> dict[int, int]:
    """Return how many bytes each rank of an attempt has printed."""
    sizes = {}
    for rank, path in rank_files(attempt.logs, ".log").items() if attempt is not None else ():
        with suppress(OSError):
            sizes[rank] = path.stat().st_size
    return sizes


def read_printed(attempt: AttemptDir | None, before: Mapping[int, int]) -> list[RankRecord]:
    """Return what ranks have printed since their logs had the sizes `before`: {rank, lines, last, step}.

    `step` is the last one that they have printed, or None.
    """
    found = []
    forms = forms_of(attempt) if attempt is not None else ()
    for rank, size in sorted(log_sizes(attempt).items()):
        if attempt is not None and size > before.get(rank, size):
            lines = [text for _, text in _stamped_lines(attempt.log_file(rank), before[rank]) if text.strip()]
            steps = [step for step, _ in parse_steps("\n".join(lines), forms)]
            if lines:
                step = steps[-1] if steps else None
                found.append({"rank": rank, "lines": len(lines), "last": lines[-1].strip()[:MAX_LINE], "step": step})
    return found


def _read_all(folder: Path) -> list[RankRecord]:
    """Return the records of ranks, without files that are being written right now."""
    records = (read_record(path) for path in rank_files(folder, ".json").values())
    return [record for record in records if record.get("rank") is not None]


def _pick(document: Mapping[str, Any], *keys: str) -> RankRecord:
    return {key: document.get(key) for key in keys}


def _error_of(document: Mapping[str, Any]) -> RankRecord:
    """Return an error file with only the place of the exception, not the whole traceback."""
    place = place_of(str(document.get("traceback") or "").splitlines())
    picked = _pick(document, "rank", "node", "type", "message", "time", "step")
    return {**picked, "place": place, "source": "its error file"}


def first_traceback(log: Path, rank: int) -> RankRecord | None:
    """Return the first traceback in the tail of a rank's log: {rank, time, type, message, place, source}, or None."""
    lines = iter(_stamped_lines(log))
    time = next((time for time, text in lines if TRACEBACK in text), None)
    if time is None:
        return None
    body: list[str] = []
    for _, text in lines:
        if text and not text.startswith((" ", "\t")):
            match = _LAST_LINE.match(text)
            error_type, message = match.groups() if match else (text[:200], None)
            return {"rank": rank, "time": time, "type": error_type, "message": (message or "")[:200],
                    "place": place_of(body), "source": "its log"}  # fmt: skip
        body.append(text)
    return None


def first_abort(log: Path, rank: int) -> RankRecord | None:
    """Return the first uncaught C++ exception in the tail of a log, in the format of `first_traceback`, or None."""
    error_type, began = "", 0.0
    for time, text in _stamped_lines(log):
        if match := _ABORT.search(text):
            error_type, began = match[1], time
        elif error_type and (match := _WHAT.match(text)):
            return {"rank": rank, "time": began, "type": error_type, "message": match[1][:200], "place": "",
                    "source": "its log"}  # fmt: skip
    return None


def _stamped_lines(log: Path, begin: int = 0) -> Iterator[tuple[float, str]]:
    """Yield the lines in the tail of a log, from byte `begin` on, each with its time stamp in seconds; 0 for a line
    without one."""
    try:
        with open_stream(log, follow=True) as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(begin, size - LOG_TAIL_BYTES))
            text = stream.read().decode("utf-8", "replace")
    except OSError:
        return
    for line in text.splitlines():
        match = _STAMP.match(line)
        time = datetime.fromisoformat(match[1] + "+00:00").timestamp() if match else 0.0
        yield time, _PREFIX.sub("", line[match.end() :] if match else line)


def place_of(lines: Iterable[str]) -> str:
    """Return the last frame of a traceback outside libraries, else the last one: `read_shard (train.py:88)`."""
    frames = [match.groups() for line in lines if (match := _FRAME.match(line))]
    own = [frame for frame in frames if not any(part in frame[0] for part in _LIBRARIES)]
    if not frames:
        return ""
    file, line, function = (own or frames)[-1]
    return f"{function} ({file.rpartition('/')[2]}:{line})"


def last_heartbeat(events: Path, rank: int) -> RankRecord | None:
    """Return the last phase that a rank entered: {rank, phase, step, time, first_step}; None if it recorded none."""
    records = read_last_events(events, EVENT_TAIL_BYTES)
    beats = [record for record in records if record.get("kind") == "heartbeat"]
    if not beats:
        return None
    last = beats[-1]
    step = _step_of(last)
    return {"rank": rank, "phase": last.get("phase"), "step": step, "time": last.get("time"),
            "first_step": _first_step(records)}  # fmt: skip


def _first_step(records: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the first step since the rank started, if its start is among the records."""
    starts = [index for index, record in enumerate(records) if record.get("kind") == "start"]
    steps = [_step_of(record) for record in records[starts[-1] :] if record.get("phase") == "step"] if starts else []
    return steps[0] if steps else None


def _step_of(record: Mapping[str, Any]) -> int:
    step = record.get("step")
    return step if isinstance(step, int) else 0

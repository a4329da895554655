"""What the fields of a run's records hold. Any user of a shared disk may write there, and disks lose bytes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

MOST_RANKS = 1 << 20
MOST_S = 60_000_000_000.0
"""Seconds since the epoch, or before it where a clock was never set: the years from 69 to 3871 have a date."""


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST_RANKS


def _is_moment(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MOST_S


KNOWN: Mapping[str, Callable[[object], bool]] = {
    **dict.fromkeys(("node", "host", "signal", "type", "message", "traceback", "error", "last_words"), _is_text),
    **dict.fromkeys(("kind", "phase", "reason", "cause", "job_id", "spy_bundle", "slurm_reason"), _is_text),
    **dict.fromkeys(("pid", "step", "code", "exit_code", "start_ticks", "first_step", "launcher"), _is_whole),
    **dict.fromkeys(("time", "started", "ended", "terminated", "submitted"), _is_moment),
    **dict.fromkeys(("first_failure", "coordinate"), lambda value: isinstance(value, dict)),
    **dict.fromkeys(("evidence", "suspects", "collectives", "failed"), lambda value: isinstance(value, list)),
    "rank": _is_rank,
}


def record_of(document: object) -> dict[str, Any]:
    """Return a document as a record, without the fields that hold another type than its writers give them; empty if it
    is none. None may be anywhere."""
    return _of_known_types(document) if isinstance(document, dict) else {}


def _of_known_types(value: Any) -> Any:
    if isinstance(value, list):
        return [_of_known_types(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _of_known_types(each)
        for name, each in value.items()
        if each is None or name not in KNOWN or KNOWN[name](each)
    }

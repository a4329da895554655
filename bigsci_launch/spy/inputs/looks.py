"""Which files are looks at the same processes, one after the other, and how much time is between them.

The name of a file or of its folder may show it: `trace-n0-look-2.out`, `look-2/trace-n0.out`, `trace-n0.2.out`, or a
time such as `trace-n0-20261122-100500.out`. Without a time in all names, the times at which the files were written
count, if they differ. Otherwise only the order of the looks is known.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path

NOT_LETTER = r"(?<![A-Za-z0-9])"
LOOK = re.compile(NOT_LETTER + r"(?:looks?|samples?|snap(?:shot)?s?|round|try)[-_]?\d+(?![0-9])", re.IGNORECASE)
WORD = re.compile(NOT_LETTER + r"(?:first|second|third|before|after|later|again)(?![A-Za-z0-9])", re.IGNORECASE)
DATE_AND_TIME = re.compile(r"(?<!\d)(20\d\d)-?([01]\d)-?([0-3]\d)[T_-]?([0-2]\d)[:_-]?([0-5]\d)[:_-]?([0-5]\d)(?!\d)Z?")
UNIX_TIME = re.compile(r"(?<!\d)(1[5-9]\d{8})(?!\d)")
RANK = re.compile(r"rank[-_]?(\d+)", re.IGNORECASE)
KIND = re.compile(r"^(?:trace|dump|stacks?|py-?spy|node|host)(?=[-_]|$)", re.IGNORECASE)
LEAST_GAP_S = 1.0
"""Files written closer together were copied or unpacked: their modification times mean nothing."""


@dataclass(frozen=True, slots=True)
class LookTime:
    """When a file was read from a process: `said_s` by its name, `written_s` by its time of change, in seconds since
    1970; None if unknown. `path` is where it was found."""

    path: str = ""
    said_s: float | None = None
    written_s: float | None = None


NO_TIME = LookTime()


def moment_of(path: Path) -> LookTime:
    """Return when the file at `path` looked, by its own name, else by that of its folder, and when it was written."""
    said = [found for name in (path.name, path.parent.name) if (found := said_time(name)) is not None]
    return LookTime(str(path), said[0] if said else None, path.stat().st_mtime if path.exists() else None)


def said_time(name: str) -> float | None:
    """Return the time in a name, in seconds since 1970, or None. A date without a zone is read as UTC."""
    if words := DATE_AND_TIME.search(name):
        try:
            return datetime.strptime("".join(words.groups()), "%Y%m%d%H%M%S").replace(tzinfo=timezone.utc).timestamp()
        except ValueError:
            return None
    found = UNIX_TIME.search(name)
    return float(found[1]) if found else None


def says_look(name: str) -> bool:
    """Whether a folder holds one of several looks, according to its name."""
    return said_time(name) is not None or LOOK.search(name) is not None or WORD.search(name) is not None


def named_rank(path: Path) -> int | None:
    """Return the rank in the name of a file, `3` in `host7_rank-3.txt`, or None."""
    found = RANK.findall(path.name)
    return int(found[-1]) if found else None


def node_of(path: Path) -> str:
    """Return the node: r7i3n0 for `trace-r7i3n0.out`, the part after the first dash or underscore, else the stem.

    What says which look it is, or which rank, is no part of it.
    """
    name = path.name
    for pattern in (DATE_AND_TIME, UNIX_TIME, LOOK, WORD, RANK):
        name = pattern.sub("", name)
    stem = re.sub(r"[-_]{2,}", "-", name.partition(".")[0]).strip("-_")
    head, _, tail = stem.replace("_", "-").partition("-")
    if KIND.fullmatch(stem):
        return ""
    return tail if tail and head.isalpha() else stem


def natural(name: str) -> list[tuple[int, int | str]]:
    """Return a sorting key that puts n2 before n10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name)]


def order_looks(moments: Sequence[LookTime]) -> tuple[list[int], list[float] | None]:
    """Return the indices of `moments` in the order of time, and the seconds of each since the first.

    The seconds are None where only the order is known: that of the names, and within one file that of its text.
    """
    for times in ([each.said_s for each in moments], [each.written_s for each in moments]):
        known = [time for time in times if time is not None]
        order = sorted(range(len(known)), key=known.__getitem__)
        if len(known) == len(moments) and _differ(known[index] for index in order):
            return order, [known[index] - known[order[0]] for index in order]
    return sorted(range(len(moments)), key=lambda index: natural(moments[index].path)), None


def _differ(times: Iterable[float]) -> bool:
    return all(later - earlier >= LEAST_GAP_S for earlier, later in pairwise(times))

"""Parses and formats durations, sizes and counts. The program computes in seconds and bytes; text is for people."""

from __future__ import annotations

import math
import re

CLOCK_SLACK_S = 10.0
"""A moment that is farther ahead than this is by another clock."""
OTHER_CLOCK = "at an unknown time (its clock differs)"

_SLURM_TIME = re.compile(
    r"(?:(?P<days>\d+)-(?P<day_hours>\d{1,2})(?::(?P<day_minutes>\d{1,2}))?(?::(?P<day_seconds>\d{1,2}))?"
    r"|(?P<hours>\d+):(?P<hms_minutes>\d{1,2}):(?P<hms_seconds>\d{1,2})"
    r"|(?P<minutes>\d+)(?::(?P<ms_seconds>\d{1,2}))?)"
)


def parse_slurm_duration(text: str) -> int:
    """Return the seconds of a Slurm time limit.

    Accepts the forms of sbatch(1): `minutes`, `minutes:seconds`, `hours:minutes:seconds`, `days-hours`,
    `days-hours:minutes` and `days-hours:minutes:seconds`.

    Raises:
        ValueError: the text has another form.
    """
    match = _SLURM_TIME.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a Slurm duration; write D-HH:MM:SS, HH:MM:SS or minutes")
    part = {name: int(value or 0) for name, value in match.groupdict().items()}
    hours = part["days"] * 24 + part["day_hours"] + part["hours"]
    minutes = part["day_minutes"] + part["hms_minutes"] + part["minutes"]
    seconds = part["day_seconds"] + part["hms_seconds"] + part["ms_seconds"]
    return hours * 3600 + minutes * 60 + seconds


def format_slurm_duration(seconds: int) -> str:
    """Return `D-HH:MM:SS`, or `HH:MM:SS` if there are no days; `parse_slurm_duration` reads it back."""
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


def format_age(seconds: float) -> str:
    """Return a short age for people: `0.4 s`, `42 s`, `3 min 10 s`, `2 h 05 min`, `3 d 04 h`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def age_s(moment: float, now: float) -> float | None:
    """Return the seconds from `moment`, by the clock of another host, to `now`; None if it lies ahead."""
    age = now - moment
    return None if age < -CLOCK_SLACK_S else max(0.0, age)


def ago(moment: float, now: float, *, differs: bool = False) -> str:
    """Return how long ago something was, for people; that this is not known, if clocks differ."""
    age = None if differs else age_s(moment, now)
    return OTHER_CLOCK if age is None else f"{format_age(age)} ago"


def format_bytes(size_bytes: float) -> str:
    """Return a size in binary units with at most one decimal: `512 B`, `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def format_count(number: float) -> str:
    """Return a parameter count for people: `950`, `1.3M`, `176.2B`."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            return f"{number / limit:.1f}{unit}"
    return f"{number:.0f}"


def format_percent(fraction: float) -> str:
    """Return a share as a percentage: `31 %`, `0.00042 %`; never `0 %` for a share above zero."""
    if fraction == 0 or fraction == 1:
        return f"{fraction * 100:.0f} %"
    share = fraction * 100
    return f"{min(share, 99.9):.1f} %" if share > 99 else f"{share:.2g} %"


def finite(value: float | None) -> float | None:
    """Return a number that JSON has; None for others."""
    return value if value is not None and math.isfinite(value) else None

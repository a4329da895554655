"""Sentences about recoveries: how a generation came back from the end of the one before. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence

from bigsci_launch.runs.generations.failures import rank_failure_text
from bigsci_launch.runs.generations.records import (
    FIRST_STEP,
    JOINED,
    RESTORED,
    Generation,
    Generations,
    NodeLeftOut,
    Recovery,
)
from bigsci_launch.runs.generations.samples import RecordedStep, lost_samples, replayed_steps
from bigsci_launch.topology.naming import agree, name_ranks
from bigsci_launch.units import age_s, format_age

LONG_RECOVERY_S = 60.0
"""A recovery that lasts longer than this is worth a remark."""
SOURCES = {
    "memory": "from the memory of its ranks",
    "replicas": "from ranks that have the same state",
    "buddies": "from the copies of buddies",
    "checkpoint": "from a checkpoint",
    "start": "from the start",
}


def recovery_text(found: Recovery, *, has_phases: bool) -> str:
    """Return one sentence: what had failed, and how the generation came back from it."""
    return f"after {rank_failure_text(found.failed.cause, found.failed)}: {back_text(found, has_phases=has_phases)}"


def back_text(found: Recovery, *, has_phases: bool) -> str:
    """`back at step 812 after 2.1 s`."""
    after = f" after {format_age(found.total_s)}" if found.total_s is not None else "; recovery time unknown"
    if not has_phases:
        return f"all programs were started again{after}"
    if found.first_step is not None:
        return f"back at step {found.first_step}{after}"
    if found.needed_no_step:
        return f"finished: step {found.step} was the last one"
    if found.generation.is_disturbed:
        return "it failed before its first step"
    return "it has not finished a step yet"


def began_text(found: Recovery, *, has_phases: bool) -> str:
    """`generation 3 began after rank 5 on n2 died: back at step 812 after 2.1 s`."""
    return f"generation {found.generation.number} began {recovery_text(found, has_phases=has_phases)}"


def timing_text(found: Recovery, *, has_phases: bool) -> str:
    """Return the seconds of each phase; the unknown ones are listed. `has_phases`: ranks report theirs."""
    phases = [("noticed", found.noticed_s), ("left", found.left_s), ("slots ready", found.slots_s)]
    if has_phases:
        phases += [
            ("grouped", found.grouped_s),
            ("restored", found.restored_s),
            *([] if found.needed_no_step else [("first step", found.first_step_s)]),
        ]
    known = [f"{name} {seconds:.2f} s" for name, seconds in phases if seconds is not None]
    unknown = [name for name, seconds in phases if seconds is None]
    return ", ".join([*known, *([f"unknown: {', '.join(unknown)}"] if unknown else [])])


def source_text(found: Recovery, recorded: Sequence[RecordedStep]) -> str:
    """`continued after step 811 from the copies of buddies; 1 step replayed, 0 samples lost`."""
    if found.source is None:
        return "resume point unknown: the program does not report it"
    source = SOURCES.get(found.source, f"from {found.source!r}, which this version does not know")
    step = "" if found.step is None else f" after step {found.step}"
    why = f" ({found.why})" if found.why else ""
    count, lost_ones = replayed_steps(found, recorded), lost_samples(found, recorded)
    steps = "steps replayed: unknown" if count is None else f"{count} {'step' if count == 1 else 'steps'} replayed"
    lost = "samples lost: unknown" if lost_ones is None else f"{lost_ones} samples lost"
    if lost_ones is not None and lost_ones < 0:
        lost = f"{-lost_ones} samples consumed twice"
    return f"continued{step} {source}{why}; {steps}, {lost}"


def left_out_text(left_out: NodeLeftOut) -> str:
    """`n2 is left out until 2026-11-25 18:30: lost`."""
    until = "as long as the attempt lasts"
    if left_out.until is not None:
        until = f"until {time.strftime('%Y-%m-%d %H:%M', time.localtime(left_out.until))}"
    return f"{left_out.node} is left out {until}" + (f": {left_out.reason}" if left_out.reason else "")


def recovering_text(found: Generations, asked: float) -> str:
    """Return what a recovery in progress has come to, and for how long it has lasted."""
    newest, since = found.newest, found.recovering_since
    lasts_s = None if since is None else age_s(since, asked)
    lasts = "recovering" if lasts_s is None else f"recovering for {format_age(lasts_s)}"
    failed = newest if newest.is_disturbed else found.all[-2]
    long = f", longer than {LONG_RECOVERY_S:.0f} s" if (lasts_s or 0.0) > LONG_RECOVERY_S else ""
    return f"{lasts}{long} since {rank_failure_text(failed.cause, failed)}; {awaited_text(newest)}"


def awaited_text(newest: Generation) -> str:
    """Return what the next thing is that has to happen in a recovery."""
    if newest.is_disturbed and newest.ended is None:
        return f"the ranks are leaving generation {newest.number}"
    if newest.is_disturbed:
        killed = newest.ended.killed if newest.ended else ()
        said = f" ({name_ranks(killed)} {agree('was killed', killed)})" if killed else ""
        return f"all ranks have left{said}; waiting for slots for generation {newest.number + 1}"
    for name, words in (
        (JOINED, "its ranks are joining"),
        (RESTORED, "its ranks are restoring their state"),
        (FIRST_STEP, "its first step is running"),
    ):
        if name not in newest.phases:
            return f"generation {newest.number} has begun, and {words}"
    return f"generation {newest.number} makes steps"

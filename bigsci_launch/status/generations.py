"""What `bsl status` shows about the generations of an attempt with `survive`: text and JSON. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bigsci_launch.runs.generations.failures import rank_failure_text
from bigsci_launch.runs.generations.records import ENDED_ON_REQUEST, Generation, Generations, Recovery, recoveries
from bigsci_launch.runs.generations.recovery_text import (
    left_out_text,
    recovering_text,
    recovery_text,
    source_text,
    timing_text,
)
from bigsci_launch.runs.generations.samples import RecordedStep, lost_samples, replayed_steps
from bigsci_launch.topology.naming import count_ranks
from bigsci_launch.units import age_s, format_age

MOST_SHOWN = 5
"""The newest of so many generations; --json has all."""


def generation_facts(
    found: Generations | None, steps: Sequence[RecordedStep], asked: float, *, may_run: bool
) -> list[tuple[str, str]]:
    """Return lines about the generations of an attempt; nothing without `survive`."""
    if found is None:
        return []
    came_back = recoveries(found)
    facts = [("generation", _present(found, asked, may_run=may_run))]
    if len(came_back) > MOST_SHOWN:
        facts.append(("", f"the newest {MOST_SHOWN} of {len(came_back)} recoveries; --json has all"))
    for each in came_back[-MOST_SHOWN:]:
        facts += [
            (f"recovery {each.generation.number}", recovery_text(each, has_phases=found.have_phases)),
            ("", timing_text(each, has_phases=found.have_phases)),
            ("", source_text(each, steps)),
        ]
    facts += [("left out", left_out_text(each)) for generation in found.all for each in generation.left_out]
    if found.gave_up not in (None, ENDED_ON_REQUEST):
        facts.append(("gave up", found.gave_up))
    if found.unknown:
        facts.append(("unknown", f"records of generations that this version does not know: {', '.join(found.unknown)}"))
    return facts


def _present(found: Generations, asked: float, *, may_run: bool) -> str:
    newest = found.newest
    who = f"{newest.number}, {_size(newest)}"
    if found.is_over or not may_run:
        return f"{who}; the last one"
    if found.is_recovering:
        return f"{who}; {recovering_text(found, asked)}"
    lasts = None if newest.began is None else age_s(newest.began, asked)
    return f"{who}, undisturbed" + ("" if lasts is None else f" for {format_age(lasts)}")


def _size(generation: Generation) -> str:
    size = "an unknown number of ranks" if generation.world_size is None else count_ranks(generation.world_size)
    return f"{size} ({generation.topology})" if generation.topology else size


def generations_document(
    found: Generations | None, steps: Sequence[RecordedStep], asked: float
) -> dict[str, Any] | None:
    """Return the part of the JSON document of `bsl status` that is about generations; None without `survive`."""
    if found is None:
        return None
    came_back = {each.generation.number: each for each in recoveries(found)}
    return {
        "newest": found.newest.number,
        "is_recovering": found.is_recovering,
        "recovering_since": found.recovering_since,
        "text": recovering_text(found, asked) if found.is_recovering else None,
        "exit_code": found.exit_code,
        "gave_up": found.gave_up,
        "unknown": list(found.unknown),
        "all": [_document(each, came_back.get(each.number), found, steps) for each in found.all],
    }


def _document(
    generation: Generation, back: Recovery | None, found: Generations, steps: Sequence[RecordedStep]
) -> dict[str, Any]:
    cause = generation.cause
    return {
        "generation": generation.number,
        "began": generation.began,
        "world_size": generation.world_size,
        "topology": generation.topology.as_dict() if generation.topology else None,
        "members": [asdict(member) for member in generation.members],
        "num_spares": generation.num_spares,
        "failures": [{**asdict(each), "text": rank_failure_text(each, generation)} for each in generation.failures],
        "cause": rank_failure_text(cause, generation) if generation.is_disturbed else None,
        "ended": asdict(generation.ended) if generation.ended else None,
        "left_out": [asdict(each) for each in generation.left_out],
        "recovery": _recovery_document(back, found, steps) if back else None,
    }


def _recovery_document(back: Recovery, found: Generations, steps: Sequence[RecordedStep]) -> dict[str, Any]:
    return {
        "text": recovery_text(back, has_phases=found.have_phases),
        "seconds": {
            "noticed": back.noticed_s,
            "left": back.left_s,
            "slots": back.slots_s,
            "grouped": back.grouped_s,
            "restored": back.restored_s,
            "first_step": back.first_step_s,
            "total": back.total_s,
        },
        "source": back.source,
        "why": back.why,
        "step": back.step,
        "first_step": back.first_step,
        "steps_replayed": replayed_steps(back, steps),
        "samples_lost": lost_samples(back, steps),
    }

"""An answer about a slow job, in words and as a document."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import asdict
from typing import Any

from bigsci_launch.slow.straggler import Cost, Imbalance, SlowAnswer, SlowKind, StepPhase, Straggler
from bigsci_launch.topology import Topology
from bigsci_launch.topology.naming import agree, name_ranks, name_ranks_and_part
from bigsci_launch.units import format_percent

SCHEMA_VERSION = 1
LOOKS = "looks at random moments"
NONE_IS_SLOW = "no rank, stage or link makes it slow, as far as was seen"


def not_compared(ranks: Collection[int]) -> str:
    """Return that ranks have no equals."""
    alone = agree("does work that no other rank does", ranks)
    return f"{name_ranks(ranks)} {alone}, in pipelines of different depths: compared with none"


def slow_lines(answer: SlowAnswer, topology: Topology | None) -> Iterator[str]:
    """Yield the answer, what costs most first."""
    for straggler in answer.stragglers:
        yield from _straggler(straggler, topology, are_looks=answer.how == LOOKS)
    for imbalance in answer.imbalances:
        yield from _imbalance(imbalance, topology)
    if answer.undecided is not None:
        yield f"unknown: {answer.undecided}"
    elif not answer.stragglers:
        yield NONE_IS_SLOW
    yield _seen(answer)
    for each in answer.missing:
        yield f"not seen: {each}"


def straggler_sentence(each: Straggler, topology: Topology | None) -> str:
    """Return who it is, where, what that costs, and why, as rings show it."""
    why = "".join(f"; {cause}" for cause in each.causes)
    return f"{_who(each, topology, are_looks=False)}; costs {_cost(each.cost)}{why}"


def _who(each: Straggler, topology: Topology | None, *, are_looks: bool) -> str:
    on = f" on {', '.join(each.nodes)}" if each.nodes else ""
    return f"{each.kind}: {name_ranks_and_part(each.ranks, topology)}{on}{_where(each, are_looks)}"


def _straggler(each: Straggler, topology: Topology | None, *, are_looks: bool) -> Iterator[str]:
    yield _who(each, topology, are_looks=are_looks)
    yield f"  costs {_cost(each.cost)}"
    for cause in each.causes:
        yield f"  {cause}"


def _where(each: Straggler, are_looks: bool) -> str:
    """Return the phase and the site: a ring shows the call after the work, and a look shows the work."""
    phase = str(each.phase) if each.phase is not StepPhase.UNKNOWN else ""
    if not phase and each.kind is SlowKind.RANK:
        phase = "phase unknown"
    site = (each.site or "").rpartition("/")[2]
    if site and each.phase in (StepPhase.FORWARD, StepPhase.BACKWARD) and not are_looks:
        site = f"before {site}"
    words = ", ".join(word for word in (phase, site) if word)
    return f": {words}" if words else ""


def _imbalance(each: Imbalance, topology: Topology | None) -> Iterator[str]:
    yield f"by nature: {name_ranks_and_part(each.ranks, topology)}: {each.reason}"
    yield f"  costs {_cost(each.cost)}"


def _cost(cost: Cost) -> str:
    """Return `12 ms of a step (10 to 14), 8 %`, as far as it is known."""
    if cost.ms_per_step is None:
        return "unknown" if cost.share is None else f"{format_percent(cost.share)} of the time{_shares(cost)}"
    between = f" ({cost.low:.3g} to {cost.high:.3g})" if cost.low is not None and cost.high is not None else ""
    share = f", {format_percent(cost.share)}" if cost.share is not None else ""
    return f"{cost.ms_per_step:.3g} ms of a step{between}{share}"


def _shares(cost: Cost) -> str:
    if cost.share_low is None or cost.share_high is None:
        return ""
    return f" ({format_percent(cost.share_low)} to {format_percent(cost.share_high)})"


def _seen(answer: SlowAnswer) -> str:
    steps = {None: "steps not counted", 1: "1 step"}.get(answer.num_steps, f"{answer.num_steps} steps")
    mean = f" of {answer.step_ms:.3g} ms" if answer.step_ms is not None else ""
    return f"seen: {steps}{mean}, in {answer.seconds:.3g} s, by {answer.how}"


def slow_document(answer: SlowAnswer) -> dict[str, Any]:
    """Return the JSON document of `bsl slow`."""
    return {"schema_version": SCHEMA_VERSION, **asdict(answer)}

"""Ranks that may be victims although no stack shows a collective of theirs, where no recorder says what they began.

`Work.wait()` is C++ and shows no frame: whoever is in it sleeps on a futex. A call that waits for a device shows none
either: it spins without the interpreter's lock. Both look like a rank that stays away from its collective.
"""

from __future__ import annotations

from collections.abc import Sequence

from bigsci_launch.spy.evidence.ranks import Evidence, RankEvidence
from bigsci_launch.spy.judge.conclusion import Conclusion, Side
from bigsci_launch.spy.judge.motion import is_busy, spins_in_native_code
from bigsci_launch.spy.judge.rules.left_behind import NO_REASON
from bigsci_launch.spy.judge.rules.messages import sides_of
from bigsci_launch.spy.judge.rules.process import Stall
from bigsci_launch.spy.judge.waits import WaitGraph, may_wait_for_handle
from bigsci_launch.spy.taxonomy import HangClass, State
from bigsci_launch.topology.words import agree, count_ranks, counted, name_ranks

COMPUTES, IS_WOKEN = HangClass.PYTHON_NEVER_ENDS, HangClass.SIGNAL_STORM
"""The classes of ranks of which nothing is known but that they compute, or run again and again."""

UNKNOWN_STATE = "?"
"""Of a rank of which nothing but its recorder's dump was given: no stack of any rank is known then."""


def is_certain(stall: Stall, seen: RankEvidence) -> bool:
    """Whether `stall` tells that the rank holds up others, and is not what their victim shows too."""
    if not seen.threads and stall.hang_class in (NO_REASON, COMPUTES, IS_WOKEN):
        # It may wait for a message, which gloo does not record, or for a store, which runs again and again.
        return seen.recorder is not None and seen.last is not None and seen.last.state == UNKNOWN_STATE
    if seen.recorder is not None:
        return True
    if stall.hang_class is NO_REASON:
        return not may_wait_for_handle(seen)
    return stall.hang_class is not COMPUTES or not spins_in_native_code(seen)


def conclude_uncertain(evidence: Evidence, graph: WaitGraph, roots: Sequence[RankEvidence]) -> Conclusion:
    """The verdict where all that others wait for may be victims themselves: where everybody stands, and no suspect."""
    if not any(seen.threads for seen in roots):
        return _conclude_unread(evidence, graph, roots)
    standing: dict[tuple[bool, str], list[int]] = {}
    for seen in roots:
        site = seen.thread.site if seen.thread else None
        where = f"no collective that a stack shows{f', at {site}' if site else ''}"
        standing.setdefault((is_busy(seen), where), []).append(seen.rank)
    (spins, where), first = next(iter(standing.items()))
    ranks = [seen.rank for seen in roots]
    waiting = graph.leading_to(frozenset(ranks))
    who = evidence.name(first[0]) if len(first) == 1 else name_ranks(first)
    does = agree("spins" if spins else "sleeps", first)
    more = f" (and {count_ranks(ranks[len(first) :])} elsewhere)" if len(standing) > 1 else ""
    call = "a device" if spins else "an asynchronous collective"
    return Conclusion(
        state=State.HANG,
        claim=f"{who} {does} in {where}{more}, and {counted(waiting, 'waits')} in collectives: whoever waits for "
        f"{call} looks the same, so it is not certain who holds up whom",
        confidence=0.4,
        sides=(*sides_of(graph, tuple(graph.waits)), *(Side(tuple(there), at) for (_, at), there in standing.items())),
        evidence=tuple(
            f"{name_ranks(there)}: {at}, {'at work without the GIL in one place' if busy else 'asleep on a futex'}"
            for (busy, at), there in list(standing.items())[:3]
        ),
        missing=("whether they wait for a collective that they began earlier: native frames or a recorder would say",),
        next=tuple(f"py-spy dump --native --pid {seen.pid}  # on {seen.node}" for seen in roots[:1]),
    )


def _conclude_unread(evidence: Evidence, graph: WaitGraph, roots: Sequence[RankEvidence]) -> Conclusion:
    """The verdict where no stack of those was read for whom all others wait."""
    ranks = tuple(seen.rank for seen in roots)
    waiting = graph.leading_to(frozenset(ranks))
    who = evidence.name(ranks[0]) if len(ranks) == 1 else name_ranks(ranks)
    why = tuple(dict.fromkeys(seen.why_unreadable or "no stack" for seen in roots))
    return Conclusion(
        state=State.HANG,
        claim=f"{counted(waiting, 'waits')} for {who}, of which no stack could be read ({why[0]}): "
        "whether it waits too is not known",
        confidence=0.4,
        hang_class=HangClass.RANK_UNREADABLE,
        sides=(*sides_of(graph, tuple(graph.waits)), Side(ranks, "not read")),
        evidence=tuple(f"{name_ranks(ranks)}: {words}" for words in why[:3]),
        missing=("what would let py-spy read it: the right to trace, py-spy itself, a second try",),
    )

"""Ranks that may be victims although their stacks show no collective, and no recorder says what they started.

`Work.wait()` is C++ and shows no frame: a rank in it sleeps on a futex. A call that waits for a device shows no frame
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
"""The classes of ranks that are known only to compute, or to be woken again and again."""

UNKNOWN_STATE = "?"
"""State of a rank known only from its recorder's dump. Evidence made of such dumps holds no stacks at all."""


def is_certain(stall: Stall, seen: RankEvidence) -> bool:
    """Whether `stall` proves that the rank holds up others, and is not what a victim shows too."""
    if not seen.threads and stall.hang_class in (NO_REASON, COMPUTES, IS_WOKEN):
        # It may wait for a message, which gloo does not record, or for a store, which runs again and again.
        return seen.recorder is not None and seen.last is not None and seen.last.state == UNKNOWN_STATE
    if seen.recorder is not None:
        return True
    if stall.hang_class is NO_REASON:
        return not may_wait_for_handle(seen)
    return stall.hang_class is not COMPUTES or not spins_in_native_code(seen)


def conclude_uncertain(evidence: Evidence, graph: WaitGraph, roots: Sequence[RankEvidence]) -> Conclusion:
    """The verdict when all ranks that others wait for may be victims themselves: nobody is accused."""
    if not any(seen.threads for seen in roots):
        return _conclude_unread(evidence, graph, roots)
    standing: dict[tuple[bool, str], list[int]] = {}
    for seen in roots:
        site = seen.thread.site if seen.thread else None
        where = f"{site}, with no collective on the stack" if site else "no collective that a stack shows"
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
        claim=f"{who} {does} in {where}{more}, and {counted(waiting, 'waits')} in collectives: a rank that waits for "
        f"{call} looks the same, so it is not certain who holds up whom",
        confidence=0.4,
        sides=(*sides_of(graph, tuple(graph.waits)), *(Side(tuple(there), at) for (_, at), there in standing.items())),
        evidence=tuple(
            f"{name_ranks(there)}: {at}, {'computing in one place without the GIL' if busy else 'asleep on a futex'}"
            for (busy, at), there in list(standing.items())[:3]
        ),
        missing=("whether they wait for a collective started earlier: native frames or a recorder would show it",),
        next=tuple(f"py-spy dump --native --pid {seen.pid}  # on {seen.node}" for seen in roots[:1]),
    )


def _conclude_unread(evidence: Evidence, graph: WaitGraph, roots: Sequence[RankEvidence]) -> Conclusion:
    """The verdict when no stack could be read of the ranks that all others wait for."""
    ranks = tuple(seen.rank for seen in roots)
    waiting = graph.leading_to(frozenset(ranks))
    who = evidence.name(ranks[0]) if len(ranks) == 1 else name_ranks(ranks)
    whose, they = ("whose stack", "it waits") if len(ranks) == 1 else ("whose stacks", "they wait")
    why = tuple(dict.fromkeys(seen.why_unreadable or "no stack" for seen in roots))
    return Conclusion(
        state=State.HANG,
        claim=f"{counted(waiting, 'waits')} for {who}, {whose} could not be read ({why[0]}): "
        f"whether {they} too is not known",
        confidence=0.4,
        hang_class=HangClass.RANK_UNREADABLE,
        sides=(*sides_of(graph, tuple(graph.waits)), Side(ranks, "not read")),
        evidence=tuple(f"{name_ranks(ranks)}: {words}" for words in why[:3]),
        missing=("the stack: py-spy may lack the right to trace, may not be installed, or may need a second try",),
    )

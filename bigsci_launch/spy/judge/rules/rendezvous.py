"""Ranks that have not found each other yet: which are late for the rendezvous, and which look for it elsewhere; and a
key of the store that a known rank has not set."""

from __future__ import annotations

from collections.abc import Sequence

from bigsci_launch.spy.evidence.known_code import is_at_store, is_joining_call
from bigsci_launch.spy.evidence.ranks import Evidence, RankEvidence
from bigsci_launch.spy.judge.case import JobCase
from bigsci_launch.spy.judge.commands import on_node
from bigsci_launch.spy.judge.conclusion import Conclusion, GracePeriod, Pointer, Reason, Side, Strength, Suspect
from bigsci_launch.spy.judge.last_calls import find_missing_keys, whereabouts
from bigsci_launch.spy.taxonomy import HangClass, State
from bigsci_launch.topology.naming import agree, count_ranks, counted


def is_joining(seen: RankEvidence) -> bool:
    """Whether the rank is inside `init_process_group`, or what other frameworks call it."""
    frames = seen.thread.frames if seen.thread else ()
    return any(is_joining_call(frame.function, frame.file) for frame in frames)


def connects_to_store(seen: RankEvidence) -> bool:
    """Whether the rank is still connecting to the store."""
    frames = seen.thread.frames if seen.thread else ()
    return any(is_at_store(frame.function, frame.file) for frame in frames)


def _all_joining(case: JobCase) -> bool:
    """Whether every rank is inside `init_process_group`.

    A rank that others wait for and that never arrived there is found like any other rank that stays away.
    """
    evidence = case.evidence
    return len(case.graph.waits) >= evidence.world_size and all(is_joining(seen) for seen in evidence.ranks)


def store_not_reached(case: JobCase) -> Conclusion | None:
    """Every rank is inside `init_process_group`: some have reached the store, and others have not."""
    at_store = [seen for seen in case.evidence.ranks if connects_to_store(seen)]
    past = [seen for seen in case.evidence.ranks if not connects_to_store(seen)]
    if not at_store or not past or not _all_joining(case):
        return None
    # Rank 0 waits there for the others. If all of them have connected, rank 0 itself does not find the store.
    return _conclude_lost(case.evidence, [seen for seen in at_store if seen.rank != 0] or at_store, past)


def store_reached_by_nobody(case: JobCase) -> Conclusion | None:
    """Every rank is still connecting to the store."""
    at_store = [seen for seen in case.evidence.ranks if connects_to_store(seen)]
    if not at_store or len(at_store) < len(case.evidence.ranks) or not _all_joining(case):
        return None
    return _conclude_unreached(case.evidence, at_store)


def key_is_due(case: JobCase) -> Conclusion | None:
    """Ranks that others wait for wait for a key of the store, and rings show which rank sets keys of that form."""
    found = [each for each in find_missing_keys(case.evidence) if each.others]
    roots = {seen.rank for seen in case.roots}
    due = next((each for each in found if roots and roots <= set(each.ranks) | set(each.others)), None)
    if due is None:
        return None
    evidence, setter = case.evidence, due.others[0]
    waiting = case.graph.leading_to(frozenset(roots))
    # A rank in no communication may be at work, and set the key afterwards.
    is_waiting = setter in case.graph.waits
    wanted = f"for a key of the store whose form {evidence.short_name(setter)} sets"
    who = f"{evidence.names(due.ranks)} {agree('waits', due.ranks)}"
    return Conclusion(
        state=State.HANG,
        claim=f"{due.words}; {counted(waiting, 'waits')} in communications",
        strength=Strength.DERIVED,
        hang_class=HangClass.STORE_KEY_MISSING,
        sides=(Side(due.ranks, "waiting for a key of the store"), Side((setter,), whereabouts(evidence.ranks[setter]))),
        missing=("whether that rank left the key out, or the others should not have asked for it",),
        look_first=(
            Pointer(setter, f"{who} {wanted}", Reason.AWAITED),
            *(Pointer(rank, f"it waits {wanted}", Reason.AWAITED_MAYBE) for rank in due.ranks),
        ),
        grace=GracePeriod.ELSEWHERE if is_waiting else GracePeriod.COMPUTES,
    )


def _conclude_lost(evidence: Evidence, lost: Sequence[RankEvidence], past: Sequence[RankEvidence]) -> Conclusion:
    ranks = tuple(seen.rank for seen in lost)
    words = "does not reach the store of the rendezvous"
    where = "where it looks: MASTER_ADDR and MASTER_PORT of that rank, and its network interface"
    who = evidence.name(ranks[0]) if len(ranks) == 1 else evidence.names(ranks)
    calling = [line for seen in lost if (line := calling_in_vain(seen))]
    here, there = {seen.store for seen in lost if seen.store}, {seen.store for seen in past if seen.store}
    is_elsewhere = bool(here and there) and here.isdisjoint(there)
    if is_elsewhere:
        words += f": it looks at {', '.join(sorted(here))}, the others at {', '.join(sorted(there))}"
    reached = "" if is_elsewhere else f" (rank 0), which {counted(past, 'has')} reached"
    return Conclusion(
        state=State.HANG,
        claim=f"{who} {agree(words, ranks)}{reached}",
        strength=Strength.AGREED if calling or is_elsewhere else Strength.DERIVED,
        hang_class=HangClass.RENDEZVOUS_ELSEWHERE,
        suspects=tuple(Suspect(rank, words) for rank in ranks),
        sides=_sides(lost, past),
        evidence=tuple(calling[:2]),
        missing=() if calling or is_elsewhere else (where,),
        next=(on_node(lost[0].node, f"tr '\\0' '\\n' < /proc/{lost[0].pid}/environ | grep MASTER"),),
        grace=GracePeriod.NONE if is_elsewhere else GracePeriod.ELSEWHERE,
    )


def _conclude_unreached(evidence: Evidence, at_store: Sequence[RankEvidence]) -> Conclusion:
    calling = [line for seen in at_store if (line := calling_in_vain(seen))]
    who = count_ranks(at_store)
    return Conclusion(
        state=State.HANG,
        claim=f"none of the {who} has found the others: all are still connecting to the store",
        strength=Strength.GUESS,
        hang_class=HangClass.RENDEZVOUS_ELSEWHERE,
        sides=_sides(at_store, ()),
        evidence=tuple(calling[:2]),
        missing=(
            "whether the port of rank 0 can be reached from every node",
            "whether all ranks have been started",
        ),
        next=("nc -zv $MASTER_ADDR $MASTER_PORT  # on each node",),
    )


def calling_in_vain(seen: RankEvidence) -> str | None:
    """Return a description of an unanswered connection of the rank, or None."""
    call = next((socket for socket in seen.sockets if socket.state == "SYN_SENT"), None)
    return f"rank {seen.rank} connects to {call.remote} and gets no answer (SYN_SENT)" if call else None


def _sides(lost: Sequence[RankEvidence], past: Sequence[RankEvidence]) -> tuple[Side, ...]:
    sides = [Side(tuple(seen.rank for seen in lost), "init_process_group, connecting to the store")]
    if past:
        sides.append(Side(tuple(seen.rank for seen in past), "init_process_group, waiting for the others"))
    return tuple(sides)

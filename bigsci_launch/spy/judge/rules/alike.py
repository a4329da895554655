"""What is left where no rank stays away and none left a schedule: all are together, or all are elsewhere."""

from __future__ import annotations

from bigsci_launch.spy.evidence.known_code import bare_name
from bigsci_launch.spy.judge.case import JobCase
from bigsci_launch.spy.judge.commands import ASK_DEVICES, ASK_RECORDER, FIND_BUILD_LOCK
from bigsci_launch.spy.judge.conclusion import Conclusion, GracePeriod, Side, Strength, Suspect
from bigsci_launch.spy.judge.facts import deciding_thread_ran, is_busy, waits_for_work
from bigsci_launch.spy.judge.rules.away import ask_native, certain_stalls
from bigsci_launch.spy.judge.rules.messages import sides_of
from bigsci_launch.spy.judge.rules.process import Stall, explain_stall
from bigsci_launch.spy.judge.rules.work import busy_child, conclude_computing, find_works, judge_work
from bigsci_launch.spy.taxonomy import HangClass, State
from bigsci_launch.topology.naming import agree, counted

ODD_SHARE = 0.25
"""Largest share of the ranks that may be called odd when no rank is in a collective."""


def all_together(case: JobCase) -> Conclusion | None:
    """Every rank is in a communication, and none is known to be missing from any of them."""
    graph = case.graph
    if not graph.waits or len(graph.waits) < len(case.alive):
        return None
    sides = sides_of(graph, tuple(graph.waits))
    where = "; ".join(f"{case.evidence.names(side.ranks)} in {side.where}" for side in sides[:3])
    still = ("no rank moved between the samples",) if case.was_seen_twice else ()
    return Conclusion(
        state=State.HANG,
        claim=f"every rank is in its collective and none is missing, yet none makes progress: {where}",
        strength=Strength.GUESS,
        sides=sides,
        evidence=(*still, *_second_threads(case)),
        missing=(
            "unacknowledged bytes on the connections between the nodes",
            "the state of the devices",
            *(() if graph.is_certain else ("which ranks each collective goes over: groups may not match",)),
        ),
        next=("ss -tin  # on the nodes: look for unacked bytes and retransmits",),
    )


def _second_threads(case: JobCase) -> tuple[str, ...]:
    """Other threads that communicate: over one group, all ranks must begin the calls of two threads in one order."""
    found: dict[str, list[int]] = {}
    for seen in case.alive:
        for thread in seen.threads or ():
            if thread is not seen.thread and thread.operation:
                found.setdefault(f"{thread.operation} at {thread.site} in thread {thread.label}", []).append(seen.rank)
    return tuple(
        f"{case.evidence.names(ranks)} {agree('is', ranks)} also in {where}: over one group, threads have no order"
        for where, ranks in found.items()
    )


def all_compute(case: JobCase) -> Conclusion | None:
    """No rank communicates, and all that could be read compute."""
    read = [seen for seen in case.evidence.ranks if seen.threads and not seen.is_gone]
    if case.graph.waits or not read or not all(is_busy(seen) for seen in read):
        return None
    return conclude_computing(case, [seen.rank for seen in read])


def one_place(case: JobCase) -> Conclusion | None:
    """No rank communicates, and all that could be read are at one place."""
    if case.graph.waits or len(case.classes) != 1:
        return None
    found = case.classes[0]
    where = f"{found.frames[0]}"
    if (known := _known_wait_of_all(case)) is not None:
        return _conclude_known(case, known, (Side(found.ranks, where),))
    if _stands_still(case):
        return _conclude_still(case, (Side(found.ranks, where),))
    who = f"all {counted(found.ranks, 'is')}" if len(found.ranks) > 1 else "the rank that was read is"
    return _conclude_unknown(case, f"{who} in {where}", (Side(found.ranks, where),))


def in_places(case: JobCase) -> Conclusion | None:
    """No rank communicates, and they are at different places."""
    if case.graph.waits or len(case.classes) < 2:
        return None
    sides = tuple(Side(found.ranks, str(found.frames[0])) for found in case.classes)
    if _stands_still(case):
        return _conclude_still(case, sides)
    return _conclude_unknown(case, f"the ranks are in {len(case.classes)} different places", sides)


def _known_wait_of_all(case: JobCase) -> Stall | None:
    """What all ranks are in, if it is a known wait for a lock of a build: none of them is the one that builds."""
    stalls = [explain_stall(seen) for seen in case.alive if seen.threads]
    is_lock = all(stall.hang_class is HangClass.BUILD_LOCK_STALE for stall in stalls)
    return stalls[0] if len(stalls) > 1 and is_lock and len(stalls) == len(case.alive) else None


def _conclude_known(case: JobCase, stall: Stall, sides: tuple[Side, ...]) -> Conclusion:
    return Conclusion(
        state=State.HANG,
        claim=f"all {counted(sides[0].ranks, 'is')} where each {stall.words}",
        strength=Strength.AGREED,
        hang_class=stall.hang_class,
        sides=sides,
        evidence=("none of them builds what they wait for",),
        next=(FIND_BUILD_LOCK,),
        grace=stall.grace,
    )


def _conclude_unknown(case: JobCase, claim: str, sides: tuple[Side, ...]) -> Conclusion:
    """The verdict on ranks whose stacks show no collective: whether they are in one depends on what is below."""
    read = [seen for seen in case.alive if seen.threads]
    if all(case.communicates(seen) is False for seen in read):
        none = ", and none is in a collective" if len(read) > 1 else ""
        return Conclusion(State.UNKNOWN, f"{claim}{none}", Strength.NOTHING, sides=sides)
    calls = {bare_name(call.function) for seen in read if seen.thread and (call := seen.thread.native_call)}
    below = f" below {min(calls)}" if len(calls) == 1 else ""
    return Conclusion(
        State.UNKNOWN,
        f"{claim}, and no stack shows a collective: one that is asynchronous, or on a device, has no frame{below}",
        Strength.NOTHING,
        sides=sides,
        missing=("what they wait for: native frames, a recorder or the devices would show it",),
        next=(*ask_native(read), *(() if any(seen.recorder for seen in read) else (ASK_RECORDER,)), ASK_DEVICES),
    )


def _stands_still(case: JobCase) -> bool:
    """Whether no rank ran between the looks, and none of them only waits for requests or for a child that works."""
    alive = [seen for seen in case.alive if seen.samples]
    return bool(alive) and all(
        deciding_thread_ran(seen) is False and not waits_for_work(seen) and busy_child(seen) is None for seen in alive
    )


def _conclude_still(case: JobCase, sides: tuple[Side, ...]) -> Conclusion:
    where = "; ".join(f"{case.evidence.names(side.ranks)} in {side.where}" for side in sides[:3])
    # Where no call is known to communicate, they may be meant to sleep.
    is_known = any(seen.thread is not None and seen.thread.native_call is not None for seen in case.alive)
    return Conclusion(
        state=State.HANG,
        claim=f"no rank runs, and no stack shows a collective that they wait in: {where}",
        strength=Strength.GUESS,
        sides=sides,
        evidence=("no rank ran between the samples",),
        missing=("what they wait for: native frames or a recorder would show it",),
        next=ask_native(case.alive),
        grace=GracePeriod.ELSEWHERE if is_known else GracePeriod.ASLEEP,
    )


def odd_ranks(case: JobCase) -> tuple[int, ...]:
    """Ranks that are not at the place of the largest class, if they are few and no rank is in a communication."""
    if case.graph.waits or len(case.classes) < 2:
        return ()
    odd = tuple(sorted(rank for found in case.classes[1:] for rank in found.ranks))
    return odd if len(odd) <= ODD_SHARE * sum(len(found.ranks) for found in case.classes) else ()


def odd_at_work(case: JobCase) -> Conclusion | None:
    """No rank communicates, and the few that are elsewhere show progress."""
    strays = [case.by_rank[rank] for rank in odd_ranks(case)]
    return judge_work(case, strays, find_works(case, strays)) if strays else None


def odd_one_out(case: JobCase) -> Conclusion | None:
    """No rank communicates, and the few that are elsewhere are held up by something of their own."""
    odd = odd_ranks(case)
    stalls = certain_stalls(case, [case.by_rank[rank] for rank in odd])
    if not stalls:
        return None
    most = f"{counted(case.classes[0].ranks, 'is')} in {case.classes[0].frames[0]}"
    first = f"{case.evidence.name(stalls[0].rank)} {stalls[0].words}"
    claim = first if len(odd) == 1 else f"{case.evidence.names(odd)} are not where the rest are: {first}"
    return Conclusion(
        state=State.HANG,
        claim=f"{claim}; the other {most}",
        strength=Strength.GUESS,
        hang_class=stalls[0].hang_class,
        suspects=tuple(Suspect(stall.rank, stall.words) for stall in stalls),
        sides=tuple(Side(found.ranks, str(found.frames[0])) for found in case.classes),
        evidence=("the only evidence is that they differ: no stack shows a collective, and so who waits for whom",),
        grace=stalls[0].grace,
    )

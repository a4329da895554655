"""Ranks that others wait for and that wait in no communication themselves, as far as is known.

Only a rank that cannot be in a communication is accused. `Work.wait()` is C++ and shows no frame: a rank in it sleeps
on a futex. A call that waits for a device spins without the interpreter's lock, and shows none either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bigsci_launch.spy.evidence.known_code import is_backward_engine
from bigsci_launch.spy.evidence.ranks import Evidence, RankEvidence
from bigsci_launch.spy.judge.case import JobCase
from bigsci_launch.spy.judge.commands import ASK_NATIVE, on_node
from bigsci_launch.spy.judge.conclusion import Conclusion, GracePeriod, Side, Strength, Suspect, where_shared
from bigsci_launch.spy.judge.facts import UNKNOWN_STATE, deciding_thread_ran, is_busy, may_wait_for_store
from bigsci_launch.spy.judge.rules.messages import sides_of
from bigsci_launch.spy.judge.rules.process import Stall, explain_stall
from bigsci_launch.spy.judge.rules.rendezvous import is_joining
from bigsci_launch.spy.judge.rules.work import conclude_work, find_works, judge_work
from bigsci_launch.spy.judge.waits import WaitGraph
from bigsci_launch.spy.taxonomy import HangClass, State
from bigsci_launch.topology.naming import agree, count_ranks, counted

UNEVEN = (
    "how many batches each rank has: one with more than the others is in a backward pass without them "
    f"({HangClass.LEFT_EARLY})"
)


def certain_stalls(case: JobCase, ranks: Sequence[RankEvidence]) -> list[Stall]:
    """What holds up those of `ranks` that cannot be victims themselves, nor of a rank that holds a lock."""
    held = case.locked_out
    return [stall for seen in ranks if seen.rank not in held and is_certain(case, stall := explain_stall(seen), seen)]


def is_certain(case: JobCase, stall: Stall, seen: RankEvidence) -> bool:
    """Whether `stall` proves that the rank holds up others, and is not what a victim shows too."""
    if stall.is_sign:
        return True
    if not seen.threads:
        # It may wait for a message, which gloo does not record. A dump alone shows the newest collective at least.
        is_dump = seen.recorder is not None and seen.last is not None and seen.last.state == UNKNOWN_STATE
        return is_dump and seen.rank in case.graph.surely_awaited
    return case.communicates(seen) is False


def all_at_work(case: JobCase) -> Conclusion | None:
    """Every rank that others wait for shows progress: it moves bytes, a child computes, or it is meant to take long."""
    roots = case.roots
    return judge_work(case, roots, find_works(case, roots)) if roots else None


def some_at_work(case: JobCase) -> Conclusion | None:
    """Some ranks that others wait for show progress, and nothing certain is known of the rest."""
    works = find_works(case, case.roots)
    rest = [seen for seen in case.roots if seen.rank not in works]
    if not works or certain_stalls(case, rest):
        return None
    return conclude_work(case, list(works.values()))


def stays_away(case: JobCase) -> Conclusion | None:
    """Ranks that others wait for are certainly in no communication, and their own process shows what holds them."""
    works = find_works(case, case.roots)
    stalls = certain_stalls(case, [seen for seen in case.roots if seen.rank not in works])
    if not stalls:
        return None
    graph, evidence = case.graph, case.evidence
    if graph.waits and all(is_joining(case.by_rank[rank]) for rank in graph.waits):
        stalls = [_late_at_the_rendezvous(stall) for stall in stalls]
    waiting = graph.leading_to(frozenset(seen.rank for seen in case.roots))
    many = len(stalls) > len(waiting)
    strength = min((stall.strength for stall in stalls), key=lambda strength: strength.level)
    grace = max((stall.grace for stall in stalls), key=lambda grace: grace.late_s)
    return Conclusion(
        state=State.HANG,
        claim=_claim_away(evidence, graph, stalls, len(waiting)),
        strength=strength.raised(-1) if many else strength,
        hang_class=stalls[0].hang_class if len({stall.hang_class for stall in stalls}) == 1 else None,
        suspects=tuple(Suspect(stall.rank, stall.words) for stall in stalls),
        sides=sides_of(graph, tuple(graph.waits)),
        evidence=_evidence_away(case, stalls),
        missing=tuple(dict.fromkeys(stall.missing for stall in stalls if stall.missing)),
        next=tuple(dict.fromkeys(stall.next for stall in stalls if stall.next)),
        grace=grace,
    )


def _late_at_the_rendezvous(stall: Stall) -> Stall:
    """Return the stall of a rank for which others wait to join. A silent node stays what it is."""
    is_lost = stall.hang_class is HangClass.NODE_LOST
    return stall if is_lost else replace(stall, hang_class=HangClass.RENDEZVOUS_LATE)


def holds_a_lock(case: JobCase) -> Conclusion | None:
    """A rank holds a file lock that another rank waits for, and waits for that rank itself, or for nothing that is
    seen."""
    graph, evidence = case.graph, case.evidence
    roots = {seen.rank for seen in case.roots}
    working = find_works(case, case.roots)
    locks = {
        waiter: (lock, holder)
        for waiter, (lock, holder) in case.locked_out.items()
        if waiter in roots and holder not in working
        if holder in graph.leading_to(frozenset({waiter})) or holder in roots - case.locked_out.keys()
    }
    if len({holder for _, holder in locks.values()}) != 1:
        return None
    lock, holder = next(iter(locks.values()))
    here = graph.waits.get(holder)
    place = f"is itself in {here}" if here else f"is in {case.by_rank[holder].place}"
    words = f"holds the lock{f' on {lock.path}' if lock.path else ''} for which {evidence.names(locks)} "
    # Who polls names no lock: that it is this one is derived from there being no other.
    words += f"{agree('waits' if lock.waiters else 'asks again and again, apparently', locks)}, and {place}"
    waiting = graph.leading_to(frozenset(roots))
    return Conclusion(
        state=State.HANG,
        claim=f"{evidence.name(holder)} {words}; {counted(waiting, 'waits')} in communications",
        strength=Strength.AGREED if lock.waiters else Strength.DERIVED,
        hang_class=HangClass.FILE_LOCK_HELD,
        suspects=(Suspect(holder, words),),
        sides=sides_of(graph, tuple(graph.waits)),
        evidence=(str(lock),),
        next=(on_node(lock.node, f"ls -l /proc/{lock.holder}/fd", "who holds the lock"),),
        grace=GracePeriod.LOCAL,
    )


def _claim_away(evidence: Evidence, graph: WaitGraph, stalls: list[Stall], num_waiting: int) -> str:
    first = stalls[0]
    waiting = counted(num_waiting, "waits") if num_waiting else "the others may wait"
    if len(stalls) == 1:
        wait = graph.direct_waiter(first.rank)
        waits = f"{waiting} for it" + (
            f", the first of them ({evidence.short_name(wait.rank)}) in {wait}" if wait else ""
        )
        if wait and num_waiting == 1:
            waits = f"{evidence.short_name(wait.rank)} waits for it in {wait}"
        return f"{evidence.name(first.rank)} {first.words}; {waits}"
    who = evidence.names([stall.rank for stall in stalls])
    shared = where_shared(evidence, [stall.rank for stall in stalls])
    words = {stall.words for stall in stalls}
    said = (
        f"each {first.words}"
        if len(words) == 1
        else f"{evidence.short_name(first.rank)} {first.words}, the others are listed below"
    )
    return f"{who}{f' ({shared})' if shared else ''} stay away while {waiting} for them: {said}"


def _evidence_away(case: JobCase, stalls: list[Stall]) -> tuple[str, ...]:
    lines, evidence = [], case.evidence
    for stall in stalls[:4]:
        wait = case.graph.direct_waiter(stall.rank)
        if wait is not None:
            has_not = f"{evidence.short_name(stall.rank)} has not reached it"
            lines.append(f"{evidence.name(wait.rank)} waits in {wait}; {has_not}")
    if endless := case.graph.endless:
        circle = f"{case.evidence.names(endless)} also {agree('waits', endless)} in a circle"
        lines.append(f"{circle}, which this does not explain")
    if case.was_seen_twice and all(deciding_thread_ran(seen) is False for seen in case.alive if seen.samples):
        lines.append("no rank ran between the samples")
    return tuple(lines)


def may_be_victims(case: JobCase) -> Conclusion | None:
    """Every rank that others wait for may be in a communication that no frame shows."""
    roots = case.roots
    works = find_works(case, roots)
    if not roots or works or certain_stalls(case, roots) or not any(seen.threads for seen in roots):
        return None
    standing: dict[tuple[bool, str], list[int]] = {}
    for seen in roots:
        site = seen.thread.site if seen.thread else None
        where = f"{site}, with no collective on the stack" if site else "no collective that a stack shows"
        standing.setdefault((is_busy(seen) is True, where), []).append(seen.rank)
    (spins, where), first = next(iter(standing.items()))
    ranks = [seen.rank for seen in roots]
    waiting = case.graph.leading_to(frozenset(ranks))
    who = case.evidence.name(first[0]) if len(first) == 1 else case.evidence.names(first)
    does = agree("spins" if spins else "is", first)
    more = f" (and {count_ranks(ranks[len(first) :])} elsewhere)" if len(standing) > 1 else ""
    call = "a device" if spins else "an asynchronous collective, or in compiled code"
    alike = f"a rank that waits for {call} looks the same"
    if any(seen.thread is not None and seen.thread.waits_for_shared_lock for seen in roots):
        alike = "another rank may hold the lock or semaphore that processes share"
    of_store = all(map(may_wait_for_store, roots))
    if of_store:
        alike = "it may wait for a key of torch's store that another rank has to set"
    sides = sides_of(case.graph, tuple(case.graph.waits))
    return Conclusion(
        state=State.HANG,
        claim=f"{who} {does} in {where}{more}, and {counted(waiting, 'waits')} in collectives: {alike}, so it is not "
        "certain who holds up whom",
        strength=Strength.GUESS,
        hang_class=HangClass.STORE_KEY_MISSING if of_store else None,
        sides=(*sides, *(Side(tuple(there), at) for (_, at), there in standing.items())),
        evidence=tuple(
            f"{case.evidence.names(there)}: {at}" + (", computing in one place without the GIL" if busy else "")
            for (busy, at), there in list(standing.items())[:3]
        ),
        missing=(
            "whether they wait for a collective started earlier: native frames or a recorder show it",
            *(UNEVEN,) * _may_have_more_batches(case, roots),
        ),
        next=ask_native(roots),
        grace=GracePeriod.COMPUTES if spins else GracePeriod.ELSEWHERE,
    )


def _may_have_more_batches(case: JobCase, roots: Sequence[RankEvidence]) -> bool:
    """Whether a minority is in its backward pass, while those that wait are not."""
    waiting = [case.by_rank[rank] for rank in case.graph.waits]
    return len(roots) < len(waiting) and all(map(_is_in_backward, roots)) and not any(map(_is_in_backward, waiting))


def _is_in_backward(seen: RankEvidence) -> bool:
    return seen.thread is not None and any(is_backward_engine(each.function, each.file) for each in seen.thread.frames)


def ask_native(ranks: Sequence[RankEvidence]) -> tuple[str, ...]:
    """The command that shows what native code `ranks` are in, if it was not run yet."""
    was_read = all(seen.thread is not None and seen.thread.native for seen in ranks)
    return () if was_read else (ASK_NATIVE,)


def cannot_be_read(case: JobCase) -> Conclusion | None:
    """No stack could be read of any rank that others wait for."""
    roots = case.roots
    if not roots or any(seen.threads for seen in roots) or find_works(case, roots) or certain_stalls(case, roots):
        return None
    ranks = tuple(seen.rank for seen in roots)
    waiting = case.graph.leading_to(frozenset(ranks))
    who = case.evidence.name(ranks[0]) if len(ranks) == 1 else case.evidence.names(ranks)
    whose, they = ("whose stack", "it waits") if len(ranks) == 1 else ("whose stacks", "they wait")
    why = tuple(dict.fromkeys(seen.why_unreadable or "no stack" for seen in roots))
    return Conclusion(
        state=State.HANG,
        claim=f"{counted(waiting, 'waits')} for {who}, {whose} could not be read ({why[0]}): "
        f"unknown whether {they} too",
        strength=Strength.GUESS,
        hang_class=HangClass.RANK_UNREADABLE,
        sides=(*sides_of(case.graph, tuple(case.graph.waits)), Side(ranks, "not read")),
        evidence=tuple(f"{case.evidence.names(ranks)}: {words}" for words in why[:3]),
        missing=("the stack: py-spy may lack the right to trace, may not be installed, or may need a second try",),
        next=tuple(
            on_node(seen.node, f"grep State /proc/{seen.pid}/status", "D: it waits in the kernel, as for storage")
            for seen in roots[:2]
            if seen.pid and seen.node and seen.last is not None and seen.last.state == UNKNOWN_STATE
        ),
    )

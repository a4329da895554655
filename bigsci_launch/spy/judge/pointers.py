"""Where to look first: ranks in order, each with its reason. They are not accused; suspects are a stricter list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from bigsci_launch.spy.evidence.ranks import RankEvidence
from bigsci_launch.spy.judge.case import JobCase
from bigsci_launch.spy.judge.conclusion import Conclusion, Pointer, Reason
from bigsci_launch.spy.judge.facts import (
    deciding_wait,
    is_busy,
    is_only_counted,
    may_wait_for_store,
    outer_frames_moved,
)
from bigsci_launch.spy.judge.rules.messages import core_of, sides_of
from bigsci_launch.spy.judge.rules.process import OUTSIDE, explain_stall
from bigsci_launch.spy.judge.waits import ROOTED
from bigsci_launch.spy.taxonomy import State

MAX_POINTERS = 8
CERTAIN = (Reason.ACCUSED, Reason.DEPARTED, Reason.AWAITED)
"""Where one of these is known, it does not matter that the others are many."""


def look_first(case: JobCase, conclusion: Conclusion) -> tuple[Pointer, ...]:
    """Return the ranks at which an engineer would look first, the most telling first; empty where all is well.

    Those that the conclusion itself points to come before all others, so that none contradicts it.
    """
    if conclusion.state in (State.PROGRESSING, State.FINISHED):
        return ()
    found: dict[int, Pointer] = {}
    for pointer in _pointers(case, conclusion):
        found.setdefault(pointer.rank, pointer)
    if found and not any(pointer.reason in CERTAIN for pointer in found.values()):
        for pointer in _of_the_many(case):
            found.setdefault(pointer.rank, pointer)
    found = found or {pointer.rank: pointer for pointer in (*_equal_stacks(case), *_all_alike(case, conclusion))}
    # Rates were counted on stacks of processes; a dump of recorded calls belongs to none.
    has_stacks = any(seen.threads and seen.pid is not None for seen in case.alive)
    return tuple(replace(each, was_measured=has_stacks) for each in found.values())[:MAX_POINTERS]


def _pointers(case: JobCase, conclusion: Conclusion) -> Iterator[Pointer]:
    for suspect in conclusion.suspects:
        yield Pointer(suspect.rank, suspect.why, Reason.ACCUSED)
    yield from conclusion.look_first
    yield from _departed(case)
    yield from _awaited(case, certain=True)
    yield from _first_rank_for_key(case)
    if _most_roots_together(case) <= len(case.graph.waits):
        yield from _awaited(case, certain=False)
    yield from _missing_in_smaller_groups(case)
    yield from _waiting_for_absent_roots(case)
    yield from _alone_in_circle(case)
    yield from _smallest_sides(case)
    yield from _odd_stacks(case)
    yield from _awaited(case, certain=False)
    yield from _unread(case)


def _departed(case: JobCase) -> Iterator[Pointer]:
    """Ranks whose recorder shows that they left their own schedule, then those that did what they never did before,
    also where most did so, then those that left that of their peers. Ranks that only wait for a circle have no part
    in it, whatever is new to them."""
    if not case.graph.endless and case.mismatch is None:
        return
    found = case.departed.departures
    circle = set(core_of(case.graph.certain_part())) or found.compared
    for rank in found.from_past:
        yield Pointer(rank, "its recorded collectives differ from its own past", Reason.DEPARTED)
    for rank in sorted(found.surprised & circle) if found.surprised < found.compared else ():
        yield Pointer(rank, "its recorded collectives never followed each other like this before", Reason.DEPARTED)
    for rank in sorted(found.unlike_once & circle) if found.unlike_once < found.compared else ():
        yield Pointer(rank, "its recorded collectives differ from the only time before", Reason.DEPARTED_PEERS)
    for rank in found.from_peers:
        yield Pointer(rank, "its recorded collectives differ from its peers'", Reason.DEPARTED_PEERS)


def _awaited(case: JobCase, *, certain: bool) -> Iterator[Pointer]:
    """Ranks that others wait for and that are in no communication that is seen: those that certainly are in none first,
    then those that stand alone."""
    classes = {rank: len(found.ranks) for found in case.classes for rank in found.ranks}
    together = Counter(_place(seen) for seen in case.alive)
    roots = sorted(
        case.roots,
        key=lambda seen: (
            case.communicates(seen) is not False,
            not explain_stall(seen).is_sign,
            outer_frames_moved(seen) is True,
            together[_place(seen)] if seen.threads else 0,
            classes.get(seen.rank, 0),
            is_busy(seen) is not True,
            seen.rank,
        ),
    )
    for seen in roots:
        stall = explain_stall(seen)
        is_out = case.communicates(seen) is False or stall.is_sign
        if is_out is not certain:
            continue
        reason = Reason.AWAITED if is_out else Reason.AWAITED_MAYBE
        is_unknown = seen.why_unreadable and not stall.is_sign
        words = f"could not be read: {seen.why_unreadable}" if is_unknown else stall.words
        words = words if is_out else words.replace(OUTSIDE, ", with no collective on its stack")
        yield Pointer(seen.rank, f"others wait for it: it {words}", reason)


def _first_rank_for_key(case: JobCase) -> Iterator[Pointer]:
    """Rank 0, if all that others wait for may wait for a key of the store: another rank sets it, and most often the
    first one does."""
    readers = [seen.rank for seen in case.roots]
    if 0 in case.graph.waits and readers and all(map(may_wait_for_store, case.roots)):
        who = case.evidence.names(readers)
        words = f"{who} may wait for a key of torch's store, which the first rank sets in most programs"
        yield Pointer(0, words, Reason.AWAITED_MAYBE)


def _most_roots_together(case: JobCase) -> int:
    """How many of the ranks that others wait for have one stack: fewer than those that wait are no side."""
    roots = {seen.rank for seen in case.roots}
    alike = max((len(roots.intersection(found.ranks)) for found in case.classes), default=0)
    return alike or len(roots)


def _place(seen: RankEvidence) -> object:
    """The function in which a rank is; itself, where that is not known."""
    frames = seen.thread.frames if seen.thread else ()
    return (frames[0].function, frames[0].file) if frames else seen.rank


def _missing_in_smaller_groups(case: JobCase) -> Iterator[Pointer]:
    """Ranks that are in another call of a larger group, while one waits for them alone in a smaller one: it is more
    often left out by one than begun by one."""
    graph = case.graph
    for rank, wait in graph.waits.items():
        others = graph.blockers[rank]
        theirs = graph.waits.get(next(iter(others))) if len(others) == 1 else None
        if theirs is None or not wait.members or not theirs.members or theirs.site == wait.site:
            continue
        if len(wait.members) < len(theirs.members) and rank in graph.blockers[theirs.rank]:
            who = case.evidence.short_name(rank)
            yield Pointer(theirs.rank, f"{who} waits for it alone, in {wait}", Reason.AWAITED_MAYBE)


def _waiting_for_absent_roots(case: JobCase) -> Iterator[Pointer]:
    """Ranks in a collective whose root, as they name it, is not in it, while others in it name another root."""
    calls = [wait for wait in case.graph.waits.values() if wait.root is not None and wait.operation in ROOTED]
    if len({wait.root for wait in calls}) < 2:
        return
    inside = {wait.rank for wait in calls}
    for wait in sorted(calls, key=lambda wait: wait.root in inside):
        why = f"ranks name different roots of one {wait.operation}: it names rank {wait.root}"
        yield Pointer(wait.rank, why, Reason.DISAGREES)


def _of_the_many(case: JobCase) -> Iterator[Pointer]:
    """One of the largest side, which is to blame if the odd one is right."""
    sides = sides_of(case.graph, tuple(case.graph.waits))
    if sides:
        yield Pointer(sides[-1].ranks[0], f"one of the others: it is in {sides[-1].where}", Reason.OTHER_SIDE)


def _alone_in_circle(case: JobCase) -> Iterator[Pointer]:
    for rank in case.graph.breaking_ranks() if case.graph.endless else ():
        why = f"every circle of waits goes through it: it is in {case.graph.waits[rank]}"
        yield Pointer(rank, why, Reason.IN_EACH_CIRCLE)


def _smallest_sides(case: JobCase) -> Iterator[Pointer]:
    """The ranks of the smaller sides, which are the odd ones out; where all are equally large, one rank of each."""
    sides = sides_of(case.graph, tuple(case.graph.waits))
    # Ranks that were looked for nowhere are on no side.
    num_seen = sum(not seen.was_out_of_reach for seen in case.alive)
    outside = num_seen - len(case.graph.waits)
    sizes = [len(side.ranks) for side in sides]
    for side in sides:
        if is_minority(len(side.ranks), max(outside, *sizes), num_seen):
            for rank in side.ranks:
                yield Pointer(rank, f"the odd one out: it is in {side.where}", Reason.ODD_ONE_OUT)
    if not outside and len(sides) > 1 and len(set(sizes)) == 1:
        for side in sides:
            words = f"one of {len(sides)} sides of the same size: it is in {side.where}"
            yield Pointer(side.ranks[0], words, Reason.EQUAL_SIDE)


def _odd_stacks(case: JobCase) -> Iterator[Pointer]:
    """The ranks that are not where most are, the smallest class first."""
    sizes = [len(found.ranks) for found in case.classes]
    for found in sorted(case.classes[1:], key=lambda found: len(found.ranks)):
        if is_minority(len(found.ranks), sizes[0], sum(sizes)):
            for rank in found.ranks:
                yield Pointer(rank, f"the odd one out: it is in {found.frames[0]}", Reason.ODD_STACK)


def _equal_stacks(case: JobCase) -> Iterator[Pointer]:
    """One rank of each class, where all are equally large; those of rank 0 come last."""
    sizes = {len(found.ranks) for found in case.classes}
    for found in (*case.classes[1:], *case.classes[:1]) if len(sizes) == 1 < len(case.classes) else ():
        words = f"one of {len(case.classes)} groups of the same size: it is in {found.frames[0]}"
        yield Pointer(found.ranks[0], words, Reason.EQUAL_SIDE)


def _all_alike(case: JobCase, conclusion: Conclusion) -> Iterator[Pointer]:
    """The first rank, where all are at one place and wait there for what is not in the job."""
    if len(case.classes) == 1 and conclusion.hang_class is not None:
        found = case.classes[0]
        yield Pointer(found.ranks[0], f"as all others: it is in {found.frames[0]}", Reason.EQUAL_SIDE)


def is_minority(size: int, largest: int, total: int) -> bool:
    """Whether ranks are odd: fewer than those of the largest side, and fewer than half of all. Of equal sides, none
    is."""
    return size < largest and 2 * size < total


def _unread(case: JobCase) -> Iterator[Pointer]:
    """Ranks whose stacks could not be read: first those without a process, then those whose kernel waits elsewhere than
    most."""
    kernels = Counter(deciding_wait(seen) for seen in case.alive)
    for seen in sorted(case.evidence.ranks, key=lambda seen: (seen.pid is not None, kernels[deciding_wait(seen)])):
        if seen.why_unreadable and not seen.was_out_of_reach and not is_only_counted(seen):
            yield Pointer(seen.rank, f"it could not be read: {seen.why_unreadable}", Reason.NOT_READ)

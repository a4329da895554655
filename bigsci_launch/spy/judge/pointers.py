"""Where to look first: ranks in order, each with its reason. They are not accused; suspects are a stricter list."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bigsci_launch.spy.judge.case import JobCase
from bigsci_launch.spy.judge.conclusion import Conclusion, Pointer, Reason
from bigsci_launch.spy.judge.facts import is_busy, is_only_counted, outer_frames_moved
from bigsci_launch.spy.judge.rules.messages import sides_of
from bigsci_launch.spy.judge.rules.process import OUTSIDE, explain_stall
from bigsci_launch.spy.taxonomy import State

MAX_POINTERS = 8


def look_first(case: JobCase, conclusion: Conclusion) -> tuple[Pointer, ...]:
    """Return the ranks at which an engineer would look first, the most telling first; empty where all is well.

    Those that the conclusion itself points to come before all others, so that none contradicts it.
    """
    if conclusion.state in (State.PROGRESSING, State.FINISHED):
        return ()
    found: dict[int, Pointer] = {}
    for pointer in _pointers(case, conclusion):
        found.setdefault(pointer.rank, pointer)
    found = found or {pointer.rank: pointer for pointer in _equal_stacks(case)}
    # Rates were counted on stacks of processes; a dump of recorded calls belongs to none.
    has_stacks = any(seen.threads and seen.pid is not None for seen in case.alive)
    return tuple(replace(each, was_measured=has_stacks) for each in found.values())[:MAX_POINTERS]


def _pointers(case: JobCase, conclusion: Conclusion) -> Iterator[Pointer]:
    for suspect in conclusion.suspects:
        yield Pointer(suspect.rank, suspect.why, Reason.ACCUSED)
    yield from conclusion.look_first
    yield from _departed(case)
    yield from _awaited(case, certain=True)
    if len(case.roots) <= len(case.graph.waits):
        yield from _awaited(case, certain=False)
    yield from _alone_in_circle(case)
    yield from _smallest_sides(case)
    yield from _odd_stacks(case)
    yield from _awaited(case, certain=False)
    yield from _unread(case)


def _departed(case: JobCase) -> Iterator[Pointer]:
    """Ranks whose recorder shows that they left their own schedule, or that of their peers."""
    if case.graph.endless or case.mismatch is not None:
        for rank in case.departed.departures.ranks:
            yield Pointer(
                rank, "its recorded collectives differ from its own past, or from its peers'", Reason.DEPARTED
            )


def _awaited(case: JobCase, *, certain: bool) -> Iterator[Pointer]:
    """Ranks that others wait for and that are in no communication that is seen: those that certainly are in none first,
    then those that stand alone."""
    classes = {rank: len(found.ranks) for found in case.classes for rank in found.ranks}
    roots = sorted(
        case.roots,
        key=lambda seen: (
            case.communicates(seen) is not False,
            not explain_stall(seen).is_sign,
            outer_frames_moved(seen) is True,
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


def _alone_in_circle(case: JobCase) -> Iterator[Pointer]:
    for rank in case.graph.breaking_ranks() if case.graph.endless else ():
        why = f"every circle of waits goes through it: it is in {case.graph.waits[rank]}"
        yield Pointer(rank, why, Reason.IN_EACH_CIRCLE)


def _smallest_sides(case: JobCase) -> Iterator[Pointer]:
    """The ranks of the smaller sides, which are the odd ones out; where all are equally large, one rank of each."""
    sides = sides_of(case.graph, tuple(case.graph.waits))
    outside = len(case.alive) - len(case.graph.waits)
    sizes = [len(side.ranks) for side in sides]
    for side in sides:
        if is_minority(len(side.ranks), max(outside, *sizes), len(case.alive)):
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


def is_minority(size: int, largest: int, total: int) -> bool:
    """Whether ranks are odd: fewer than those of the largest side, and fewer than half of all. Of equal sides, none
    is."""
    return size < largest and 2 * size < total


def _unread(case: JobCase) -> Iterator[Pointer]:
    for seen in case.evidence.ranks:
        if seen.why_unreadable and not seen.was_out_of_reach and not is_only_counted(seen):
            yield Pointer(seen.rank, f"it could not be read: {seen.why_unreadable}", Reason.NOT_READ)

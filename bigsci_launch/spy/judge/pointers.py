"""Where to look first: ranks in order, each with its reason. They are not accused; suspects are a stricter list."""

from __future__ import annotations

from collections.abc import Iterator

from bigsci_launch.spy.judge.case import JobCase
from bigsci_launch.spy.judge.conclusion import Conclusion, Pointer, Reason
from bigsci_launch.spy.judge.facts import is_busy, outer_frames_moved
from bigsci_launch.spy.judge.rules.messages import sides_of
from bigsci_launch.spy.judge.rules.process import explain_stall
from bigsci_launch.spy.taxonomy import State

MAX_POINTERS = 8


def look_first(case: JobCase, conclusion: Conclusion) -> tuple[Pointer, ...]:
    """Return the ranks at which an engineer would look first, the most telling first; empty where all is well."""
    if conclusion.state in (State.PROGRESSING, State.FINISHED):
        return ()
    found: dict[int, Pointer] = {}
    for pointer in _pointers(case, conclusion):
        found.setdefault(pointer.rank, pointer)
    return tuple(found.values())[:MAX_POINTERS]


def _pointers(case: JobCase, conclusion: Conclusion) -> Iterator[Pointer]:
    for suspect in conclusion.suspects:
        yield Pointer(suspect.rank, suspect.why, Reason.ACCUSED)
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
        yield Pointer(seen.rank, f"others wait for it: it {stall.words}", reason)


def _alone_in_circle(case: JobCase) -> Iterator[Pointer]:
    for rank in case.graph.breaking_ranks() if case.graph.endless else ():
        why = f"every circle of waits goes through it: it is in {case.graph.waits[rank]}"
        yield Pointer(rank, why, Reason.IN_EACH_CIRCLE)


def _smallest_sides(case: JobCase) -> Iterator[Pointer]:
    """The ranks of the smallest side, where the sides differ in size: the odd one out."""
    sides = sides_of(case.graph, tuple(case.graph.waits))
    outside = len(case.alive) - len(case.graph.waits)
    for side in sides if outside else sides[:-1]:
        if 2 * len(side.ranks) <= len(case.alive):
            for rank in side.ranks:
                yield Pointer(rank, f"the odd one out: it is in {side.where}", Reason.ODD_ONE_OUT)


def _odd_stacks(case: JobCase) -> Iterator[Pointer]:
    """The ranks that are not where most are, the smallest class first."""
    if len(case.classes) > 1:
        for found in sorted(case.classes[1:], key=lambda found: len(found.ranks)):
            for rank in found.ranks:
                yield Pointer(rank, f"the odd one out: it is in {found.frames[0]}", Reason.ODD_STACK)


def _unread(case: JobCase) -> Iterator[Pointer]:
    for seen in case.evidence.ranks:
        if seen.why_unreadable and not seen.was_out_of_reach:
            yield Pointer(seen.rank, f"it could not be read: {seen.why_unreadable}", Reason.NOT_READ)

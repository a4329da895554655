"""Hangs where the evidence fits either side: they report where each side is, and accuse no rank.

The sides alone often show what happened: whole pipeline stages that count differently, two ends of a message that
never meet, two roots of one broadcast.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from bigsci_launch.spy.evidence.groups import group_text
from bigsci_launch.spy.evidence.known_code import bare_name, is_norm
from bigsci_launch.spy.evidence.ranks import Evidence, RankEvidence
from bigsci_launch.spy.judge.conclusion import (
    Conclusion,
    GracePeriod,
    Pointer,
    Reason,
    Side,
    Strength,
    Suspect,
    name_and_verb,
    name_with_part,
)
from bigsci_launch.spy.judge.last_calls import RootSplit
from bigsci_launch.spy.judge.schedule.departure import Departures
from bigsci_launch.spy.judge.waits import ASSUMED, ROOTED, SETUP_OPERATIONS, Wait, WaitGraph
from bigsci_launch.spy.taxonomy import HangClass, State
from bigsci_launch.topology import Topology, compress_ranks
from bigsci_launch.topology.naming import agree
from bigsci_launch.topology.parts import part_of

MAX_NAMED_ALONE = 4
ALL_HAVE_COME = "all members have reached this collective"
UNACKNOWLEDGED = "unacknowledged bytes on the connections between the nodes"


def sides_of(graph: WaitGraph, ranks: Sequence[int]) -> tuple[Side, ...]:
    """Group `ranks` by operation, scope and place in the code, the smallest group first."""
    found: dict[tuple[str, str | None, str, int | None, str], list[Wait]] = {}
    for rank in ranks:
        wait = graph.waits[rank]
        # A few ranks that wait for each other are listed one by one; a whole stage that receives is one side.
        partner = wait.partner if len(ranks) <= MAX_NAMED_ALONE else None
        found.setdefault((wait.operation, wait.scope, str(wait.site or ""), partner, wait.path), []).append(wait)
    words = _tell_apart([(where_of(waits), waits[0].path) for waits in found.values()])
    sides = (
        Side(tuple(sorted(wait.rank for wait in waits)), where)
        for waits, where in zip(found.values(), words, strict=True)
    )
    return tuple(sorted(sides, key=lambda side: (len(side.ranks), side.ranks)))


def _tell_apart(places: Sequence[tuple[str, str]]) -> list[str]:
    """The words of each place (words, path). Where several are equal, the innermost call that differs is added."""
    told = []
    for words, path in places:
        calls = path.split(" < ")
        others = [other.split(" < ") for same, other in places if same == words and other != path]
        depth = next((depth for depth, call in enumerate(calls) if any(call not in one[depth:] for one in others)), -1)
        function, _, file = calls[depth].partition(" ")
        told.append(f"{words}, from {bare_name(function)} ({file.rpartition('/')[2]})" if others and file else words)
    return told


def where_of(waits: Sequence[Wait]) -> str:
    """`all_reduce number 41 of the tensor-parallel group (ranks 4-5) at backward (tensor.py:68)`."""
    first = waits[0]
    is_one_group = all(wait.members == first.members for wait in waits)
    of_group = f" of {group_text(first.scope, None)}{ASSUMED if first.is_assumed else ''}" if first.scope else ""
    numbers = {wait.call.sequence if wait.call else None for wait in waits}
    number = f" number {first.call.sequence}" if first.call and len(numbers) == 1 else ""
    what = str(first) if is_one_group else f"{first.operation}{number}{of_group}"
    if first.outer and first.outer != first.operation and first.outer not in SETUP_OPERATIONS:
        what = f"{first.outer} ({what})"
    return f"{what} at {first.site}" if first.site else what


def name_sides(evidence: Evidence, sides: Sequence[Side]) -> str:
    """The first two sides in words, with the part of the grid that each of them is."""
    what = ", ".join(f"{name_with_part(evidence, side.ranks)} in {side.where}" for side in sides[:2])
    return what + (f", and in {len(sides) - 2} more places" if len(sides) > 2 else "")


def conclude_sides(evidence: Evidence, graph: WaitGraph, core: tuple[int, ...]) -> Conclusion:
    """The verdict when the ranks of `core` wait for each other, and the evidence fits each side."""
    sides = sides_of(graph, core)
    wait = "wait for each other, and the evidence does not show which side left the schedule"
    if len(core) == 1:
        wait = "waits for a message, and the evidence does not show from which rank"
    return Conclusion(
        state=State.HANG,
        claim=f"{evidence.names(core)} {wait}: {name_sides(evidence, sides)}",
        strength=Strength.GUESS,
        hang_class=class_of(graph, core),
        sides=sides,
        evidence=(f"{len(graph.waits)} of {evidence.world_size} ranks wait for them", *_chain(graph, core[0])),
        missing=_missing(graph, core),
    )


def class_of(graph: WaitGraph, core: Iterable[int]) -> HangClass:
    """The class of a circle, by what its ranks do: messages that do not meet, else a split of phases."""
    waits = [graph.waits[rank] for rank in core]
    if not all(wait.is_point_to_point for wait in waits):
        return HangClass.PHASES_SPLIT
    has_both_ends = len({"send" in wait.operation for wait in waits}) > 1
    return HangClass.MESSAGE_TAG_DIFFERS if has_both_ends else HangClass.MESSAGES_NEVER_MEET


def _missing(graph: WaitGraph, core: Collection[int]) -> tuple[str, ...]:
    waits = [graph.waits[rank] for rank in core]
    if any(wait.is_point_to_point and wait.partner is None for wait in waits):
        return ("the receiver and the tag of each message: the stacks do not show them",)
    if all(wait.is_point_to_point for wait in waits):
        return ("which end is wrong: each waits for the other",)
    return ("which of the sides departed from its schedule",)


def conclude_norm(evidence: Evidence, graph: WaitGraph, sides: Sequence[Side]) -> Conclusion | None:
    """The verdict when stages disagree about how many all-reduces the gradient norm has.

    Seen in BLOOM's prequel and in DeepSpeed#1522.
    """
    by_rank = {seen.rank: seen for seen in evidence.ranks}
    inside = next((side for side in sides if all(_is_in_norm(by_rank[rank]) for rank in side.ranks)), None)
    others = tuple(sorted({rank for side in sides if side is not inside for rank in side.ranks}))
    if inside is None or not others or any(_is_in_norm(by_rank[rank]) for rank in others):
        return None
    wait = graph.waits[inside.ranks[0]]
    waits_for_stages = all(set() < graph.blockers[rank] <= set(others) for rank in inside.ranks)
    if not _are_whole_stages(others, evidence.topology) or not waits_for_stages:
        return None
    there = next(side for side in sides if side is not inside)
    made = _counts(wait, [by_rank[rank] for rank in others if rank in (wait.members or ())])
    made_there = f"made only {compress_ranks(made)} there, " if made else ""
    return Conclusion(
        state=State.HANG,
        claim=f"{name_and_verb(evidence, inside.ranks, 'is in')} {inside.where}, in the gradient norm; "
        f"{name_and_verb(evidence, others, 'has')} {made_there}left the norm and {agree('is', others)} in "
        f"{there.where}: the stages disagree about the number of all-reduces in the norm, one for each parameter group "
        "of the optimizer",
        strength=Strength.DERIVED,
        hang_class=HangClass.PHASES_SPLIT,
        sides=tuple(sides),
        evidence=(
            "each side is whole pipeline stages, and the first waits for the second in the norm of one replica",
            *_chain(graph, inside.ranks[0]),
        ),
        missing=("which stage has fewer parameter groups",),
        next=("bsl plan check RUN.yaml  # names a stage whose optimizer has fewer parameter groups",),
    )


def _are_whole_stages(ranks: Collection[int], topology: Topology | None) -> bool:
    part = part_of(ranks, topology) if topology and topology.is_grid else None
    return part is not None and set(part) == {"pp"}


def _is_in_norm(seen: RankEvidence) -> bool:
    frames = seen.thread.frames if seen.thread else ()
    return any(is_norm(frame.function, frame.file) for frame in frames)


def _counts(wait: Wait, ranks: Sequence[RankEvidence]) -> tuple[int, ...]:
    """How many collectives `ranks` have made in the group of `wait`, according to their recorders."""
    group = wait.call.token.group if wait.call else None
    return tuple({seen.recorder.last_sequence.get(group, 0) for seen in ranks if seen.recorder}) if group else ()


def conclude_news(evidence: Evidence, graph: WaitGraph, departures: Departures) -> Conclusion | None:
    """The verdict when some ranks are in a collective that was never in the schedule, and the others go on.

    Some ranks may have missed a new phase, or some may have entered one by mistake: the evidence is the same.
    """
    new = [graph.waits[rank] for rank in graph.waits if rank in departures.surprised or _is_object(graph.waits[rank])]
    hang_class = _class_of_news(new)
    others = tuple(sorted(graph.waits.keys() - {wait.rank for wait in new}))
    if hang_class is None or not others:
        return None
    waited_for = frozenset().union(*(graph.blockers[wait.rank] for wait in new)) & set(others)
    absent = tuple(sorted(waited_for)) or others
    ranks = tuple(sorted(wait.rank for wait in new))
    return Conclusion(
        state=State.HANG,
        claim=f"{name_and_verb(evidence, ranks, 'is in')} {where_of(new)}, which "
        f"{name_and_verb(evidence, absent, 'has')} not reached; the evidence does not show whether it was left out or "
        "should not have been started",
        strength=Strength.GUESS,
        hang_class=hang_class,
        sides=sides_of(graph, tuple(graph.waits)),
        evidence=(
            f"{evidence.names(ranks)} had never done this before at that point, {evidence.names(absent)} "
            f"{agree('continues', absent)} as before",
        )
        if departures.surprised
        else (),
        missing=("whether the schedule has this collective here: it was never seen before",),
    )


def _class_of_news(new: Sequence[Wait]) -> HangClass | None:
    """The class if all are object collectives, or all the first use of a group; else None."""
    if not new:
        return None
    if all(_is_object(wait) for wait in new):
        return HangClass.OBJECT_COLLECTIVE_SKIPPED
    are_first = all(wait.call is not None and wait.call.sequence == 1 for wait in new)
    return HangClass.FIRST_USE_SKIPPED if are_first else None


def _is_object(wait: Wait) -> bool:
    return wait.outer is not None and "object" in wait.outer


def conclude_places(evidence: Evidence, graph: WaitGraph) -> Conclusion:
    """The verdict when all ranks wait, and the stacks do not show which ranks each communication goes over."""
    sides = sides_of(graph, tuple(graph.waits))
    how_many = f"{len(graph.waits)} of {evidence.world_size} ranks"
    were_seen_twice = all(len(seen.samples) > 1 for seen in evidence.ranks)
    still = "no rank moved between the samples, and " if were_seen_twice else ""
    return Conclusion(
        state=State.HANG,
        claim=f"{how_many} wait in collectives, and none makes progress: {name_sides(evidence, sides)}",
        strength=Strength.NOTHING,
        sides=sides,
        evidence=(f"{still}none is outside a collective",),
        missing=("the members of each collective: without them, it is unknown who waits for whom",),
    )


def find_roots(graph: WaitGraph) -> dict[int, tuple[int, ...]] | None:
    """Ranks by the root that they give, for the first collective whose root they disagree about; else None.

    A root returns when it has sent to those that have come: with a rank missing, the others may be in successive
    collectives of a loop, each with its own root. Only the recorder's number tells these apart.
    """
    found: dict[object, dict[int, list[Wait]]] = {}
    for wait in graph.waits.values():
        if wait.root is not None and wait.operation in ROOTED:
            number = (wait.call.token.group, wait.call.sequence) if wait.call else wait.place
            found.setdefault((number, wait.members), {}).setdefault(wait.root, []).append(wait)
    split = next(
        (
            roots
            for roots in found.values()
            if len(roots) > 1 and _is_complete(graph, roots) and _may_be_one_group(roots)
        ),
        None,
    )
    return {root: tuple(sorted(wait.rank for wait in waits)) for root, waits in split.items()} if split else None


def _is_complete(graph: WaitGraph, roots: Mapping[int, Sequence[Wait]]) -> bool:
    """Whether no member is missing from these waits, or their number shows that they are one collective.

    If the group is not known, a collective that most ranks are in is taken for one of all.
    """
    waits = [wait for found in roots.values() for wait in found]
    ranks, members = {wait.rank for wait in waits}, waits[0].members
    if waits[0].call is not None or ranks == set(members or graph.ranks):
        return True
    return members is None and 2 * len(ranks) <= len(graph.ranks)


def _may_be_one_group(roots: Mapping[int, Sequence[Wait]]) -> bool:
    """Whether these waits, by root, may be in one group. If the groups are unknown, each root must have its own index.

    With several groups, each has its own root, and most programs take it from the same index in each.
    """
    if all(wait.members is not None for waits in roots.values() for wait in waits):
        return True
    indices = [{wait.root_index for wait in waits} for _, waits in sorted(roots.items())]
    if any(len(found) > 1 or None in found for found in indices):
        return False
    in_order = [found.pop() or 0 for found in indices]
    return all(one < other for one, other in pairwise(in_order))


def is_in_split(wait: Wait, split: RootSplit) -> bool:
    group, call = split.group.partition(":")[0], wait.call
    return call is not None and (call.token.group, call.sequence) == (group, split.number)


def conclude_root_split(evidence: Evidence, wait: Wait, split: RootSplit) -> Conclusion:
    """The verdict when rings show that ranks disagree about the root of `wait`, and perhaps which always named one."""
    found = conclude_roots(evidence, wait, split.by_root)
    why = {rank: f"named root {root} in {wait}" for root, ranks in split.by_root.items() for rank in ranks}
    here = evidence.names(split.departed)
    past = f"before, {here} always named the root that the others name now, and so did the others"
    return replace(
        found,
        strength=Strength.AGREED if split.departed else found.strength,
        suspects=tuple(Suspect(rank, f"{why[rank]}, and another one before") for rank in split.departed),
        evidence=("the rings keep the root of each call", *((past,) if split.departed else ())),
        missing=() if split.departed else ("which root is right: the ranks named no other one before",),
        grace=GracePeriod.NONE,
    )


def conclude_roots(evidence: Evidence, wait: Wait, roots: Mapping[int, tuple[int, ...]]) -> Conclusion:
    """The verdict when ranks disagree about the root of `wait`. First to look at are those whose root is not in it, or
    names another one."""
    agree_with_root = [root for root, ranks in roots.items() if root in ranks]
    by_size = sorted(roots.items(), key=lambda item: (len(item[1]), item[1]))
    what = "; ".join(f"for {name_with_part(evidence, ranks)} it is rank {root}" for root, ranks in by_size)
    is_known = wait.members is not None
    doubt = "" if is_known else "; if that is one collective, it can never finish"
    return Conclusion(
        state=State.HANG,
        claim=f"the ranks disagree about the root of {wait}: {what}{doubt}",
        strength=Strength.DERIVED if is_known else Strength.GUESS,
        hang_class=HangClass.ROOT_DIFFERS,
        sides=tuple(Side(ranks, f"{wait} with root {root}") for root, ranks in by_size),
        evidence=("each rank's stack shows the root as an argument of the call",),
        missing=(
            *(() if is_known else (f"which ranks this {wait.operation} spans",)),
            "which root is right: the recorder does not store it",
        ),
        look_first=tuple(
            Pointer(rank, f"it names rank {root} as the root of {wait}", Reason.DISAGREES)
            for root, ranks in sorted(by_size, key=lambda item: item[0] in agree_with_root)
            for rank in ranks
        ),
    )


def conclude_unfinished(evidence: Evidence, graph: WaitGraph) -> Conclusion | None:
    """The verdict when every member has reached a collective, some never leave it, and all others wait for these."""
    still = [wait for rank, wait in graph.waits.items() if wait.call is not None and not graph.blockers[rank]]
    numbers = {(wait.call.token.group, wait.call.sequence, wait.members) for wait in still if wait.call}
    if len(numbers) != 1 or not still[0].members:
        return None
    inside = tuple(sorted(wait.rank for wait in still))
    finished = tuple(sorted(set(still[0].members) - set(inside)))
    if set(graph.waits) - set(inside) - graph.leading_to(frozenset(inside)):
        return None
    is_rooted = still[0].operation in ROOTED and bool(finished)
    done = f", which {name_and_verb(evidence, finished, 'has')} finished" if finished else ""
    cause = "they may disagree about its root, or a connection fails" if is_rooted else "a connection or a device fails"
    return Conclusion(
        state=State.HANG,
        claim=f"{name_and_verb(evidence, inside, 'does')} not return from {where_of(still)}{done}: {cause}",
        strength=Strength.GUESS,
        hang_class=HangClass.ROOT_DIFFERS if is_rooted else HangClass.LINK_DOWN,
        sides=sides_of(graph, tuple(graph.waits)),
        evidence=(ALL_HAVE_COME, f"{len(graph.waits)} ranks wait for it, directly or not"),
        missing=(
            *(("the root that each rank named: its stack does not show it",) if is_rooted else ()),
            UNACKNOWLEDGED,
        ),
        look_first=point_to_unfinished(still),
    )


def point_to_unfinished(waits: Iterable[Wait]) -> tuple[Pointer, ...]:
    """Where to look if these do not end."""
    return tuple(
        Pointer(wait.rank, f"it does not return from {where_of([wait])}", Reason.UNFINISHED)
        for wait in sorted(waits, key=lambda wait: wait.rank)
    )


def core_of(graph: WaitGraph) -> tuple[int, ...]:
    """The ranks that make the circle: each whose removal alone breaks it, else all that are in one."""
    breaking = graph.breaking_ranks()
    return breaking if len(breaking) > 1 else graph.endless


def _chain(graph: WaitGraph, start: int) -> tuple[str, ...]:
    """The shortest circle through `start`, in words, if it is short."""
    came_from: dict[int, int] = {}
    left = [start]
    for rank in left:
        for blocker in sorted(graph.blockers.get(rank, ())):
            if blocker == start:
                return (_chain_text(start, rank, came_from),)
            if blocker not in came_from:
                came_from[blocker] = rank
                left.append(blocker)
    return ()


def _chain_text(start: int, last: int, came_from: Mapping[int, int]) -> str:
    path = [start, last] if last != start else [start]
    while path[-1] in came_from:
        path.append(came_from[path[-1]])
    first, *others = reversed(path)
    return f"a circle: rank {first} waits for rank " + ", which waits for rank ".join(map(str, others))

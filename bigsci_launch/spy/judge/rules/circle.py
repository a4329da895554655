"""Every rank is in a collective, and they wait for each other: which of them left the common schedule?

First what the recorders say (different operations under the same number; a departure from the rank's own past or from
its peers), then the only rank that every circle of waits goes through, then both sides and no accusation.
"""

from __future__ import annotations

from collections.abc import Sequence

from bigsci_launch.spy.evidence.groups import group_text, is_scope
from bigsci_launch.spy.evidence.ranks import Evidence
from bigsci_launch.spy.judge.case import JobCase
from bigsci_launch.spy.judge.conclusion import Conclusion, GracePeriod, Side, Strength, Suspect, name_with_part
from bigsci_launch.spy.judge.last_calls import find_root_splits
from bigsci_launch.spy.judge.rules.messages import (
    conclude_news,
    conclude_norm,
    conclude_places,
    conclude_root_split,
    conclude_roots,
    conclude_sides,
    conclude_unfinished,
    core_of,
    find_roots,
    is_in_split,
    sides_of,
)
from bigsci_launch.spy.judge.schedule.departure import Collective, Departure, Departures, peer_groups
from bigsci_launch.spy.judge.schedule.mismatch import Mismatch
from bigsci_launch.spy.judge.waits import ROOTED, SETUP_OPERATIONS, Wait, WaitGraph, recorded_members
from bigsci_launch.spy.taxonomy import HangClass, State

MIN_GROUP_TO_STAND_ALONE = 3
MIN_OTHERS_IN_WORLD = 3
WORLD_ONLY = "each two ranks have one connection for each group that a rank has: all groups of gloo are the world"


def _is_circle(case: JobCase) -> bool:
    """Whether ranks wait in a circle, or disagree about a collective or its root."""
    return bool(case.graph.endless) or case.mismatch is not None or find_roots(case.graph) is not None


def departed(case: JobCase) -> Conclusion | None:
    """Ranks wait in a circle, and recorders show who left the schedule that it and its peers have followed."""
    if not _is_circle(case) or not case.departed.ranks:
        return None
    return _conclude_departed(case, case.departed.departures, case.departed.ranks)


def operations_differ(case: JobCase) -> Conclusion | None:
    """Members of a group issued different collectives under one number."""
    return _conclude_mismatch(case) if case.mismatch is not None else None


def roots_differ(case: JobCase) -> Conclusion | None:
    """Ranks are in one rooted collective and name different roots."""
    for split in find_root_splits(case.evidence):
        wait = next((wait for wait in case.graph.waits.values() if is_in_split(wait, split)), None)
        if wait is not None:
            return conclude_root_split(case.evidence, wait, split)
    roots = find_roots(case.graph)
    if roots is None:
        return None
    smallest = min(roots.values(), key=lambda ranks: (len(ranks), ranks))
    return conclude_roots(case.evidence, case.graph.waits[smallest[0]], roots)


def unfinished(case: JobCase) -> Conclusion | None:
    """All members have reached a collective, some do not get out of it, and all others wait for these."""
    return conclude_unfinished(case.evidence, case.graph.certain_part()) if case.graph.endless else None


def stands_alone(case: JobCase) -> Conclusion | None:
    """Every circle of waits goes through one rank that is alone in its collective."""
    graph = case.graph
    if not graph.endless or not graph.is_certain or case.departed.departures.compared:
        return None
    alone = _stands_alone(case.evidence, graph)
    return _conclude_alone(case.evidence, graph, alone) if alone is not None else None


def _core(case: JobCase) -> tuple[int, ...]:
    certain = case.graph.certain_part()
    return (core_of(certain) or certain.open_ends()) if case.graph.endless else ()


def norms_differ(case: JobCase) -> Conclusion | None:
    """Whole pipeline stages are in the gradient norm, and wait for stages that have left it."""
    core = _core(case)
    return conclude_norm(case.evidence, case.graph, sides_of(case.graph, core)) if core else None


def new_collective(case: JobCase) -> Conclusion | None:
    """Some ranks are in a collective that was never in the schedule, and the others are not."""
    return conclude_news(case.evidence, case.graph, case.departed.departures) if _core(case) else None


def each_other(case: JobCase) -> Conclusion | None:
    """Ranks of known groups wait for each other."""
    core = _core(case)
    return conclude_sides(case.evidence, case.graph.certain_part(), core) if core else None


def different_places(case: JobCase) -> Conclusion | None:
    """Ranks wait in a circle, if the groups are what their places in the code suggest."""
    return conclude_places(case.evidence, case.graph) if case.graph.endless else None


def _conclude_departed(case: JobCase, departures: Departures, departed: tuple[int, ...]) -> Conclusion:
    evidence, graph = case.evidence, case.graph
    first = departures.of(departed[0])
    agree = all(rank in departures.from_past and rank in departures.from_peers for rank in departed)
    surprise = Strength.AGREED if first.rank in departures.from_past else Strength.DERIVED
    words = {rank: _departed_text(departures.of(rank), evidence, graph) for rank in departed}
    wait = graph.direct_waiter(first.rank)
    others = len(graph.waits.keys() - set(departed))
    claim = f"{evidence.name(first.rank)} {words[first.rank]}"
    if len(departed) > 1:
        rest = ", ".join(evidence.name(rank) for rank in departed[1:])
        claim += f"; so did {rest}"
    whom = "it" if len(departed) == 1 else evidence.short_name(first.rank)
    claim += f"; {evidence.name(wait.rank)} waits for {whom}, and {others}" if wait is not None else f"; {others}"
    claim += f" of {evidence.world_size} ranks wait in total"
    return Conclusion(
        state=State.HANG,
        claim=claim,
        strength=Strength.DIRECT if agree else surprise,
        hang_class=_class_of(first, departures, departed, case.mismatch),
        suspects=tuple(Suspect(rank, words[rank]) for rank in departed),
        sides=sides_of(graph, tuple(graph.waits)),
        evidence=_departed_evidence(evidence, graph, departures, departed),
        grace=GracePeriod.NONE,
    )


def _class_of(
    first: Departure, departures: Departures, departed: Sequence[int], mismatch: Mismatch | None
) -> HangClass:
    if first.did.operation in SETUP_OPERATIONS:
        return HangClass.GROUP_MADE_ALONE
    if mismatch is not None:
        return HangClass.OPERATION_DIFFERS
    if len(departed) > 1:
        return HangClass.GROUP_ORDER_DIFFERS
    if first.rank not in departures.from_past:
        return HangClass.PROGRAM_DIFFERS  # it never did as its peers do: another program, flag or version
    if first.form == "skip":
        return HangClass.RARE_GROUP_SKIPPED if first.expected.group == "tied" else HangClass.COLLECTIVE_SKIPPED
    return HangClass.LEFT_EARLY


def _departed_text(departure: Departure, evidence: Evidence, graph: WaitGraph) -> str:
    """`left out all_reduce number 41 of the tensor-parallel group (ranks 4-5) and is in ...`."""
    wait = graph.direct_waiter(departure.rank)
    here = graph.waits.get(departure.rank)
    expected = _expected_text(departure, evidence)
    if departure.form == "skip":
        if wait is not None and wait.call and wait.operation == departure.expected.operation:
            expected = str(wait)
        return f"left out {expected}" + (f" and is in {here}" if here else "")
    did = _did_text(departure, evidence, graph)
    if departure.form == "extra":
        return f"issued an extra {did} before {expected}"
    return f"issued {did} where {expected} was due"


def _collective_text(collective: Collective, group: str | None, rank: int, evidence: Evidence) -> str:
    """`all_reduce of the tensor-parallel group (ranks 4-5)`; `group` is the name that torch gave it on `rank`."""
    seen = next(seen for seen in evidence.ranks if seen.rank == rank)
    members = recorded_members(seen, group, evidence) if group is not None else None
    scope = collective.group if is_scope(collective.group) else None
    return f"{collective.operation} of {group_text(scope, members)}"


def _expected_text(departure: Departure, evidence: Evidence) -> str:
    return _collective_text(departure.expected, departure.expected_group, departure.rank, evidence)


def _did_text(departure: Departure, evidence: Evidence, graph: WaitGraph) -> str:
    here = graph.waits.get(departure.rank)
    if here is not None and here.call is not None and here.call.token.group == departure.did_group:
        return f"{departure.did.operation} of {group_text(here.scope, here.members)}"
    return _collective_text(departure.did, departure.did_group, departure.rank, evidence)


def _departed_evidence(
    evidence: Evidence, graph: WaitGraph, departures: Departures, departed: tuple[int, ...]
) -> tuple[str, ...]:
    lines = []
    for rank in departed[:3]:
        if rank in departures.from_past:
            departure = departures.from_past[rank]
            due, did = _expected_text(departure, evidence), _did_text(departure, evidence, graph)
            lines.append(f"in earlier steps {evidence.short_name(rank)} issued {due} here; now it issued {did}")
        if rank in departures.from_peers:
            lines.append(
                f"no other rank with the same part in the schedule did the same as {evidence.short_name(rank)}"
            )
        wait = graph.direct_waiter(rank)
        if wait is not None and wait.call is not None:
            seen = next(seen for seen in evidence.ranks if seen.rank == rank)
            count = seen.recorder.last_sequence.get(wait.call.token.group, 0) if seen.recorder else 0
            waits, late = evidence.short_name(wait.rank), evidence.short_name(rank)
            lines.append(f"{waits} is in {wait}; {late} has issued only {count} there")
    return tuple(lines)


def _conclude_mismatch(case: JobCase) -> Conclusion:
    """The verdict when members of a group disagree, and no schedule shows who is right.

    A minority is accused only if the past confirms what the others did and not what it did, or if no rank has a past:
    a majority can be wrong, and the past may support the few.
    """
    evidence, mismatch, departures = case.evidence, case.mismatch, case.departed.departures
    assert mismatch is not None
    by_size = sorted(mismatch.opinions.items(), key=lambda item: (len(item[1]), item[1]))
    few, many = by_size[0][1], [rank for _, ranks in by_size[1:] for rank in ranks]
    has_past = not mismatch.confirmed.isdisjoint(many) and mismatch.confirmed.isdisjoint(few)
    has_none = departures.is_whole and not departures.surprised and not mismatch.confirmed
    is_odd = len(few) < len(many) and departures.surprised.isdisjoint(many) and (has_past or has_none)
    odd = few if is_odd and len(by_size) == 2 else ()
    what = "; ".join(f"{name_with_part(evidence, ranks)} issued {operation}" for operation, ranks in by_size)
    new = [ranks for _, ranks in by_size if set(ranks) <= departures.surprised]
    news = tuple(f"{evidence.names(ranks)} had never issued this at that point before, the others had" for ranks in new)
    return Conclusion(
        state=State.HANG,
        claim=f"the ranks disagree about one collective: {what}",
        strength=Strength.DERIVED if odd else Strength.GUESS,
        hang_class=HangClass.OPERATION_DIFFERS,
        suspects=tuple(Suspect(rank, f"issued {by_size[0][0]} where most issued {by_size[1][0]}") for rank in odd),
        sides=tuple(Side(ranks, operation) for operation, ranks in by_size),
        evidence=("the recorders hold different operations for the same group and number", *news),
        missing=("whether all ranks were meant to change here",) if news else ("more steps, to know the schedule",),
        grace=GracePeriod.NONE,
    )


def _stands_alone(evidence: Evidence, graph: WaitGraph) -> int | None:
    """The only rank that every circle of waits goes through, if it is alone in its communication.

    The group must have three or more ranks: of two ranks that miss each other, either may be the one that left. And
    others must have the same part: what a whole stage does is that stage's program.
    """
    breaking = graph.breaking_ranks()
    if len(breaking) != 1:
        return None
    rank = breaking[0]
    wait = graph.waits[rank]
    if evidence.topology is not None and [rank] in map(list, peer_groups(graph.ranks, evidence)):
        return None
    others = [graph.waits[other] for other in graph.waits if other != rank]
    if graph.of_world_only is True and not is_odd_in_world(wait, others, len(graph.ranks)):
        return None
    is_alone = not any(other.place == wait.place and other.members == wait.members for other in others)
    return rank if is_alone and len(graph.blockers[rank]) + 1 >= MIN_GROUP_TO_STAND_ALONE else None


def is_odd_in_world(wait: Wait, others: Sequence[Wait], world_size: int) -> bool:
    """Whether a rank cannot be the only one that is right, where connections show that all groups are the world.

    All others, three or more, are in one other collective. A rank may leave a collective that has a root before all
    have come, so that the one that is left may be right: it must be in another one, and the others must agree on the
    root of theirs.
    """
    if wait.operation in ROOTED or len(others) + 1 < world_size or len(others) < MIN_OTHERS_IN_WORLD:
        return False
    roots = {other.root for other in others}
    is_one_root = others[0].operation not in ROOTED or (len(roots) == 1 and None not in roots)
    return len({other.place for other in others}) == 1 and is_one_root


def _conclude_alone(evidence: Evidence, graph: WaitGraph, rank: int) -> Conclusion:
    wait = graph.waits[rank]
    where = f"{wait} at {wait.site}" if wait.site else str(wait)
    words = f"is alone in {where}, while the other {len(graph.waits) - 1} are elsewhere and wait for it"
    return Conclusion(
        state=State.HANG,
        claim=f"{evidence.name(rank)} {words}",
        strength=Strength.DERIVED,
        hang_class=HangClass.LEFT_EARLY,
        suspects=(Suspect(rank, words),),
        sides=sides_of(graph, tuple(graph.waits)),
        evidence=(
            "every circle of waits goes through this rank, and through no other",
            *((WORLD_ONLY,) if graph.of_world_only is True else ()),
        ),
        missing=("whether this rank left the schedule or all others did: the stacks show only that it differs",),
    )

"""Every rank is in a collective, and they wait for each other: which of them left the common schedule?

First what the recorders say (different operations under the same number; a departure from the rank's own past or from
its peers), then the only rank that every circle of waits goes through, then both sides and no accusation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bigsci_launch.spy.evidence.groups import group_words, is_scope
from bigsci_launch.spy.evidence.ranks import Evidence, RankEvidence
from bigsci_launch.spy.judge.conclusion import Conclusion, Side, Suspect, name_with_part
from bigsci_launch.spy.judge.rules.messages import (
    conclude_places,
    conclude_roots,
    conclude_sides,
    conclude_unfinished,
    core_of,
    find_roots,
    sides_of,
)
from bigsci_launch.spy.judge.schedule.departure import (
    Collective,
    Departure,
    Departures,
    find_departures,
    is_as_before,
    peer_groups,
)
from bigsci_launch.spy.judge.schedule.rounds import find_missed
from bigsci_launch.spy.judge.waits import SETUP_OPERATIONS, WaitGraph, recorded_members
from bigsci_launch.spy.taxonomy import HangClass, State
from bigsci_launch.topology.words import name_ranks

MIN_GROUP_TO_STAND_ALONE = 3


def judge_circle(evidence: Evidence, graph: WaitGraph) -> Conclusion | None:
    """The verdict when ranks wait in a circle, or disagree about a collective; else None."""
    mismatch = find_mismatch(evidence, graph)
    roots = find_roots(graph)
    if not graph.endless and mismatch is None and roots is None:
        return None
    departures = find_departures(evidence)
    departed = _trusted(departures, evidence)
    if not departed and mismatch is None and (missed := find_missed(evidence, graph)):
        departures = replace(departures, from_past=missed, from_peers={})
        departed = _trusted(departures, evidence)
    if departed:
        return _conclude_departed(evidence, graph, departures, departed, mismatch)
    if mismatch is not None:
        return _conclude_mismatch(evidence, mismatch, departures)
    if roots is not None:
        return conclude_roots(evidence, graph, roots)
    return _conclude_unaccused(evidence, graph, departures)


def _conclude_unaccused(evidence: Evidence, graph: WaitGraph, departures: Departures) -> Conclusion:
    """The verdict when no recorder says who left."""
    certain = graph.certain_part()
    unfinished = conclude_unfinished(evidence, certain)
    if unfinished is not None:
        return unfinished
    alone = _stands_alone(evidence, graph) if graph.is_certain and not departures.compared else None
    if alone is not None:
        return _conclude_alone(evidence, graph, alone)
    core = core_of(certain) or certain.open_ends()
    if core:
        return conclude_sides(evidence, certain, departures, core)
    return conclude_places(evidence, graph)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Ranks by what they think a collective is; `confirmed` are those whose own past says the same."""

    opinions: Mapping[str, tuple[int, ...]]
    confirmed: frozenset[int]


def find_mismatch(evidence: Evidence, graph: WaitGraph) -> Mismatch | None:
    """The first (group, number) that members disagree about, or None."""
    by_rank = {seen.rank: seen for seen in evidence.ranks}
    # One wait represents all ranks that are in the same collective.
    calls = ((wait.call, wait.members) for wait in graph.waits.values() if wait.call)
    waits = dict.fromkeys((call.token.group, call.sequence, members) for call, members in calls)
    for group, sequence, members in waits:
        found: dict[str, list[tuple[int, int]]] = {}
        for member in members or ():
            recorder = by_rank[member].recorder if member in by_rank else None
            call = recorder.find(group, sequence) if recorder else None
            if call is not None:
                found.setdefault(" ".join(call.token.shape), []).append((member, call.position))
        if len(found) > 1:
            return _mismatch_of(found, by_rank)
    return None


def _mismatch_of(found: Mapping[str, list[tuple[int, int]]], by_rank: Mapping[int, RankEvidence]) -> Mismatch:
    confirmed = {
        rank
        for calls in found.values()
        for rank, position in calls
        if (recorder := by_rank[rank].recorder) and is_as_before(recorder.stream, position)
    }
    opinions = {what: tuple(sorted(rank for rank, _ in calls)) for what, calls in found.items()}
    return Mismatch(opinions, frozenset(confirmed))


def _trusted(departures: Departures, evidence: Evidence) -> tuple[int, ...]:
    """The ranks that departed, unless the two views contradict each other or most ranks departed.

    A difference from the peers is enough on its own only if no rank has a past: then the majority is right.
    """
    past, peers = set(departures.from_past), set(departures.from_peers)
    found = past & peers if past and peers else past
    if not past and not departures.surprised and departures.is_whole:
        found = peers
    return tuple(sorted(found)) if len(found) * 2 <= evidence.world_size else ()


def _conclude_departed(
    evidence: Evidence,
    graph: WaitGraph,
    departures: Departures,
    departed: tuple[int, ...],
    mismatch: Mismatch | None,
) -> Conclusion:
    first = departures.of(departed[0])
    agree = all(rank in departures.from_past and rank in departures.from_peers for rank in departed)
    words = {rank: _departed_words(departures.of(rank), evidence, graph) for rank in departed}
    wait = graph.direct_waiter(first.rank)
    others = len(graph.waits.keys() - set(departed))
    claim = f"{evidence.name(first.rank)} {words[first.rank]}"
    if len(departed) > 1:
        rest = ", ".join(evidence.name(rank) for rank in departed[1:])
        claim += f"; so did {rest}"
    whom = "it" if len(departed) == 1 else f"rank {first.rank}"
    claim += f"; {evidence.name(wait.rank)} waits for {whom}, and {others}" if wait is not None else f"; {others}"
    claim += f" of {evidence.world_size} ranks wait in total"
    return Conclusion(
        state=State.HANG,
        claim=claim,
        confidence=0.95 if agree else 0.8 if first.rank in departures.from_past else 0.75,
        hang_class=_class_of(first, departures, departed, mismatch),
        suspects=tuple(Suspect(rank, words[rank]) for rank in departed),
        sides=sides_of(graph, tuple(graph.waits)),
        evidence=_departed_evidence(evidence, graph, departures, departed),
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


def _departed_words(departure: Departure, evidence: Evidence, graph: WaitGraph) -> str:
    """`left out all_reduce number 41 of the tensor-parallel group (ranks 4-5) and is in ...`."""
    wait = graph.direct_waiter(departure.rank)
    here = graph.waits.get(departure.rank)
    expected = _expected_words(departure, evidence)
    if departure.form == "skip":
        if wait is not None and wait.call and wait.operation == departure.expected.operation:
            expected = str(wait)
        return f"left out {expected}" + (f" and is in {here}" if here else "")
    did = _did_words(departure, evidence, graph)
    if departure.form == "extra":
        return f"issued an extra {did} before {expected}"
    return f"issued {did} where {expected} was due"


def _collective_words(collective: Collective, group: str | None, rank: int, evidence: Evidence) -> str:
    """`all_reduce of the tensor-parallel group (ranks 4-5)`; `group` is the name that torch gave it on `rank`."""
    seen = next(seen for seen in evidence.ranks if seen.rank == rank)
    members = recorded_members(seen, group, evidence) if group is not None else None
    scope = collective.group if is_scope(collective.group) else None
    return f"{collective.operation} of {group_words(scope, members)}"


def _expected_words(departure: Departure, evidence: Evidence) -> str:
    return _collective_words(departure.expected, departure.expected_group, departure.rank, evidence)


def _did_words(departure: Departure, evidence: Evidence, graph: WaitGraph) -> str:
    here = graph.waits.get(departure.rank)
    if here is not None and here.call is not None and here.call.token.group == departure.did_group:
        return f"{departure.did.operation} of {group_words(here.scope, here.members)}"
    return _collective_words(departure.did, departure.did_group, departure.rank, evidence)


def _departed_evidence(
    evidence: Evidence, graph: WaitGraph, departures: Departures, departed: tuple[int, ...]
) -> tuple[str, ...]:
    lines = []
    for rank in departed[:3]:
        if rank in departures.from_past:
            departure = departures.from_past[rank]
            due, did = _expected_words(departure, evidence), _did_words(departure, evidence, graph)
            lines.append(f"in earlier steps rank {rank} issued {due} here; now it issued {did}")
        if rank in departures.from_peers:
            lines.append(f"no other rank with the same part in the schedule did the same as rank {rank}")
        wait = graph.direct_waiter(rank)
        if wait is not None and wait.call is not None:
            seen = next(seen for seen in evidence.ranks if seen.rank == rank)
            count = seen.recorder.last_sequence.get(wait.call.token.group, 0) if seen.recorder else 0
            lines.append(f"rank {wait.rank} is in {wait}; rank {rank} has issued only {count} there")
    return tuple(lines)


def _conclude_mismatch(evidence: Evidence, mismatch: Mismatch, departures: Departures) -> Conclusion:
    """The verdict when members of a group disagree, and no schedule says who is right.

    A minority is accused only if the past confirms what the others did and not what it did, or if nobody has a past:
    a majority can be wrong, and the past may support the few.
    """
    by_size = sorted(mismatch.opinions.items(), key=lambda item: (len(item[1]), item[1]))
    few, many = by_size[0][1], [rank for _, ranks in by_size[1:] for rank in ranks]
    has_past = not mismatch.confirmed.isdisjoint(many) and mismatch.confirmed.isdisjoint(few)
    has_none = departures.is_whole and not departures.surprised and not mismatch.confirmed
    is_odd = len(few) < len(many) and departures.surprised.isdisjoint(many) and (has_past or has_none)
    odd = few if is_odd and len(by_size) == 2 else ()
    what = "; ".join(f"{name_with_part(evidence, ranks)} issued {operation}" for operation, ranks in by_size)
    new = [ranks for _, ranks in by_size if set(ranks) <= departures.surprised]
    news = tuple(f"{name_ranks(ranks)} had never issued this at that point before, the others had" for ranks in new)
    return Conclusion(
        state=State.HANG,
        claim=f"the ranks disagree about one collective: {what}",
        confidence=0.6 if odd else 0.4,
        hang_class=HangClass.OPERATION_DIFFERS,
        suspects=tuple(Suspect(rank, f"issued {by_size[0][0]} where most issued {by_size[1][0]}") for rank in odd),
        sides=tuple(Side(ranks, operation) for operation, ranks in by_size),
        evidence=("the recorders hold different operations for the same group and number", *news),
        missing=("whether all ranks were meant to change here",) if news else ("more steps, to know the schedule",),
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
    others = (graph.waits[other] for other in graph.waits if other != rank)
    is_alone = not any(other.place == wait.place and other.members == wait.members for other in others)
    return rank if is_alone and len(graph.blockers[rank]) + 1 >= MIN_GROUP_TO_STAND_ALONE else None


def _conclude_alone(evidence: Evidence, graph: WaitGraph, rank: int) -> Conclusion:
    wait = graph.waits[rank]
    where = f"{wait} at {wait.site}" if wait.site else str(wait)
    words = f"is alone in {where}, while the other {len(graph.waits) - 1} are elsewhere and wait for it"
    return Conclusion(
        state=State.HANG,
        claim=f"{evidence.name(rank)} {words}",
        confidence=0.55,
        hang_class=HangClass.LEFT_EARLY,
        suspects=(Suspect(rank, words),),
        sides=sides_of(graph, tuple(graph.waits)),
        evidence=("every circle of waits goes through this rank, and through no other",),
        missing=("whether this rank left the schedule or all others did: the stacks show only that it differs",),
    )

"""Every rank is in a collective, and they wait for each other: which of them left the common schedule?

First what the recorders say (another operation under the same number; a departure from the rank's own past or from its
peers), then the only place through which every circle of waits goes, then both sides and no accusation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bigsci_launch.spy.conclusion import Conclusion, Side, State, Suspect, name_ranks
from bigsci_launch.spy.departure import Departure, Departures, Kind, find_departures
from bigsci_launch.spy.evidence import Evidence
from bigsci_launch.spy.groups import group_words
from bigsci_launch.spy.waits import Wait, WaitGraph, recorded_members

MIN_GROUP_TO_STAND_ALONE = 3


def judge_circle(evidence: Evidence, graph: WaitGraph) -> Conclusion | None:
    """The verdict where ranks wait in a circle, or disagree about a collective; None where neither is so."""
    mismatch = find_mismatch(evidence, graph)
    if not graph.endless and mismatch is None:
        return None
    departures = find_departures(evidence)
    departed = _trusted(departures, evidence)
    if departed:
        return _conclude_departed(evidence, graph, departures, departed, mismatch)
    if mismatch is not None:
        return _conclude_mismatch(evidence, graph, mismatch)
    if not graph.is_certain:
        return _conclude_places(evidence, graph)
    alone = _stands_alone(graph)
    if alone is not None and not departures.compared:
        return _conclude_alone(evidence, graph, alone)
    return _conclude_sides(evidence, graph)


def sides_of(graph: WaitGraph, ranks: Sequence[int]) -> tuple[Side, ...]:
    """`ranks` by operation, kind of group and place in the code, the fewest first."""
    found: dict[tuple[str, str | None, str], list[Wait]] = {}
    for rank in ranks:
        wait = graph.waits[rank]
        found.setdefault((wait.operation, wait.kind, str(wait.site or "")), []).append(wait)
    sides = (Side(tuple(sorted(wait.rank for wait in waits)), _where(waits)) for waits in found.values())
    return tuple(sorted(sides, key=lambda side: (len(side.ranks), side.ranks)))


def _where(waits: Sequence[Wait]) -> str:
    """`all_reduce number 41 of the tensor-parallel group (ranks 4-5) at backward (tensor.py:68)`."""
    first = waits[0]
    is_one_group = all(wait.members == first.members for wait in waits)
    of_kind = f" of {group_words(first.kind, None)}" if first.kind else ""
    what = str(first) if is_one_group else f"{first.operation}{of_kind}"
    return f"{what} at {first.site}" if first.site else what


def find_mismatch(evidence: Evidence, graph: WaitGraph) -> dict[str, tuple[int, ...]] | None:
    """Ranks by what they think a collective is, for the first (group, number) that members disagree about."""
    by_rank = {seen.rank: seen for seen in evidence.ranks}
    # One of those who wait for the same others with the same number stands for all of them.
    waits = ((wait, wait.call) for _, ranks in graph.meetings if (wait := graph.waits[ranks[0]]).call)
    for wait, waited in waits:
        found: dict[str, list[int]] = {}
        for member in wait.members or ():
            recorder = by_rank[member].recorder if member in by_rank else None
            call = recorder.find(waited.token.group, waited.sequence) if recorder and waited else None
            if call is not None:
                found.setdefault(" ".join(call.token.shape), []).append(member)
        if len(found) > 1:
            return {what: tuple(sorted(ranks)) for what, ranks in found.items()}
    return None


def _trusted(departures: Departures, evidence: Evidence) -> tuple[int, ...]:
    """The ranks that departed, unless the two views contradict each other or most ranks departed."""
    past, peers = set(departures.from_past), set(departures.from_peers)
    found = past & peers if past and peers else past or peers
    return tuple(sorted(found)) if len(found) * 2 <= evidence.world_size else ()


def _conclude_departed(
    evidence: Evidence,
    graph: WaitGraph,
    departures: Departures,
    departed: tuple[int, ...],
    mismatch: dict[str, tuple[int, ...]] | None,
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
    claim += f"; {evidence.name(wait.rank)} waits there, {others}" if wait is not None else f"; {others}"
    claim += f" of {evidence.world_size} ranks wait in all"
    return Conclusion(
        state=State.HANG,
        claim=claim,
        confidence=0.95 if agree else 0.8 if first.rank in departures.from_past else 0.75,
        kind=_kind_of(first, departed, mismatch),
        suspects=tuple(Suspect(rank, words[rank]) for rank in departed),
        sides=sides_of(graph, tuple(graph.waits)),
        evidence=_departed_evidence(evidence, graph, departures, departed),
    )


def _kind_of(first: Departure, departed: Sequence[int], mismatch: dict[str, tuple[int, ...]] | None) -> str:
    if mismatch is not None:
        return "H03"
    if len(departed) > 1:
        return "H07"
    return "H01" if first.form == "skip" else "H02"


def _departed_words(departure: Departure, evidence: Evidence, graph: WaitGraph) -> str:
    """`left out all_reduce number 41 of the tensor-parallel group (ranks 4-5) and went on to ...`."""
    wait = graph.direct_waiter(departure.rank)
    here = graph.waits.get(departure.rank)
    expected = _expected_words(departure, evidence)
    if departure.form == "skip":
        if wait is not None and wait.call and wait.operation == departure.expected[1]:
            expected = str(wait)
        return f"left out {expected}" + (f" and stands in {here}" if here else "")
    did = _did_words(departure, evidence, graph)
    if departure.form == "extra":
        return f"issued {did} once more than its schedule has it, before {expected}"
    return f"issued {did} where {expected} was due"


def _kind_words(kind: Kind, group: str | None, rank: int, evidence: Evidence) -> str:
    """`all_reduce of the tensor-parallel group (ranks 4-5)`; `group` is the name that `rank` knows it by."""
    seen = next(seen for seen in evidence.ranks if seen.rank == rank)
    members = recorded_members(seen, group, evidence) if group is not None else None
    name = kind[0] if kind[0] in ("world", "tp", "dp", "pp", "model", "tied") else None
    return f"{kind[1]} of {group_words(name, members)}"


def _expected_words(departure: Departure, evidence: Evidence) -> str:
    return _kind_words(departure.expected, departure.expected_group, departure.rank, evidence)


def _did_words(departure: Departure, evidence: Evidence, graph: WaitGraph) -> str:
    here = graph.waits.get(departure.rank)
    if here is not None and here.call is not None and here.call.token.group == departure.did_group:
        return f"{departure.did[1]} of {group_words(here.kind, here.members)}"
    return _kind_words(departure.did, departure.did_group, departure.rank, evidence)


def _departed_evidence(
    evidence: Evidence, graph: WaitGraph, departures: Departures, departed: tuple[int, ...]
) -> tuple[str, ...]:
    lines = []
    for rank in departed[:3]:
        if rank in departures.from_past:
            departure = departures.from_past[rank]
            due, did = _expected_words(departure, evidence), _did_words(departure, evidence, graph)
            lines.append(f"rank {rank} did the same in the steps before: {due} was due, it issued {did}")
        if rank in departures.from_peers:
            lines.append(f"no other rank with the same part in the schedule did as rank {rank}")
        wait = graph.direct_waiter(rank)
        if wait is not None and wait.call is not None:
            seen = next(seen for seen in evidence.ranks if seen.rank == rank)
            count = seen.recorder.last_sequence.get(wait.call.token.group, 0) if seen.recorder else 0
            lines.append(f"rank {wait.rank} is in {wait}; rank {rank} has issued {count} there")
    return tuple(lines)


def _conclude_mismatch(evidence: Evidence, graph: WaitGraph, mismatch: dict[str, tuple[int, ...]]) -> Conclusion:
    """Members of a group disagree, and no schedule says who is right: a minority is odd, a tie is nobody's fault."""
    by_size = sorted(mismatch.items(), key=lambda item: (len(item[1]), item[1]))
    what = "; ".join(f"{name_ranks(ranks)} issued {operation}" for operation, ranks in by_size)
    odd = by_size[0][1] if len(by_size) == 2 and len(by_size[0][1]) < len(by_size[1][1]) else ()
    return Conclusion(
        state=State.HANG,
        claim=f"one collective, two opinions: {what}",
        confidence=0.6 if odd else 0.4,
        kind="H03",
        suspects=tuple(Suspect(rank, f"issued {by_size[0][0]} where most issued {by_size[1][0]}") for rank in odd),
        sides=tuple(Side(ranks, operation) for operation, ranks in by_size),
        evidence=("the recorders hold different operations under the same group and number",),
        missing=("enough steps in the recorder to know the schedule",),
    )


def _stands_alone(graph: WaitGraph) -> int | None:
    """The only rank through which every circle of waits goes, if it is alone in its communication.

    Only in a group of three or more: of two ranks that miss each other, either may be the one that left.
    """
    breaking = graph.breaking_ranks()
    if len(breaking) != 1:
        return None
    rank = breaking[0]
    wait = graph.waits[rank]
    others = (graph.waits[other] for other in graph.waits if other != rank)
    is_alone = not any(other.place == wait.place and other.members == wait.members for other in others)
    return rank if is_alone and len(graph.blockers[rank]) + 1 >= MIN_GROUP_TO_STAND_ALONE else None


def _conclude_alone(evidence: Evidence, graph: WaitGraph, rank: int) -> Conclusion:
    wait = graph.waits[rank]
    where = f"{wait} at {wait.site}" if wait.site else str(wait)
    words = f"is alone in {where}, while the {len(graph.waits) - 1} others are elsewhere and wait for it"
    return Conclusion(
        state=State.HANG,
        claim=f"{evidence.name(rank)} {words}",
        confidence=0.55,
        kind="H02",
        suspects=(Suspect(rank, words),),
        sides=sides_of(graph, tuple(graph.waits)),
        evidence=("every circle of waits goes through this rank and through no other",),
        missing=("whether it left the schedule or all others did: by the stacks alone it is the one against the rest",),
    )


def _conclude_places(evidence: Evidence, graph: WaitGraph) -> Conclusion:
    """All ranks wait, and the stacks do not show over which ranks each of the collectives goes."""
    sides = sides_of(graph, tuple(graph.waits))
    how_many = f"{len(graph.waits)} of {evidence.world_size} ranks"
    return Conclusion(
        state=State.HANG,
        claim=f"{how_many} wait in collectives, and none gets on: {_name_sides(sides)}",
        confidence=0.3,
        sides=sides,
        evidence=("no rank moved between the samples, and none is outside of a collective",),
        missing=("over which ranks each collective goes: so who waits for whom is not known",),
    )


def _name_sides(sides: Sequence[Side]) -> str:
    what = ", ".join(f"{name_ranks(side.ranks)} in {side.where}" for side in sides[:2])
    return what + (f", and in {len(sides) - 2} more places" if len(sides) > 2 else "")


def _conclude_sides(evidence: Evidence, graph: WaitGraph) -> Conclusion:
    """The ranks wait in a circle, and the evidence looks the same from each side."""
    core = _core(graph)
    sides = sides_of(graph, core)
    is_point_to_point = all(graph.waits[rank].is_point_to_point for rank in core)
    return Conclusion(
        state=State.HANG,
        claim=f"{name_ranks(core)} wait for each other, and the evidence does not say who left: {_name_sides(sides)}",
        confidence=0.4,
        kind="H08" if is_point_to_point else "H10",
        sides=sides,
        evidence=(f"{len(graph.waits)} of {evidence.world_size} ranks wait for these", *_chain(graph, core[0])),
        missing=("which of the sides departs from its schedule",),
    )


def _chain(graph: WaitGraph, start: int) -> tuple[str, ...]:
    """The shortest circle through `start`, in words, if it is short."""
    came_from: dict[int, int] = {}
    left = [start]
    for rank in left:
        for blocker in sorted(graph.blockers.get(rank, ())):
            if blocker == start:
                return (_chain_words(start, rank, came_from),)
            if blocker not in came_from:
                came_from[blocker] = rank
                left.append(blocker)
    return ()


def _chain_words(start: int, last: int, came_from: Mapping[int, int]) -> str:
    path = [start, last] if last != start else [start]
    while path[-1] in came_from:
        path.append(came_from[path[-1]])
    return "a circle: rank " + ", which waits for rank ".join(map(str, reversed(path)))


def _core(graph: WaitGraph) -> tuple[int, ...]:
    """The ranks without which no circle would be: those whose removal alone breaks it, else all that are in one."""
    breaking = graph.breaking_ranks()
    return breaking if len(breaking) > 1 else graph.endless

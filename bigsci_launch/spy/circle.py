"""Every rank is in a collective, and they wait for each other: which of them left the common schedule?

First what the recorders say (another operation under the same number; a departure from the rank's own past or from its
peers), then the only place through which every circle of waits goes, then both sides and no accusation.
"""

from __future__ import annotations

from collections.abc import Sequence

from bigsci_launch.spy.conclusion import Conclusion, Side, State, Suspect
from bigsci_launch.spy.departure import Departure, Departures, Kind, find_departures
from bigsci_launch.spy.evidence import Evidence
from bigsci_launch.spy.groups import group_words
from bigsci_launch.spy.waits import Wait, WaitGraph, recorded_members
from bigsci_launch.topology import compress_ranks

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
    alone = _stands_alone(graph)
    if alone is not None and not departures.compared:
        return _conclude_alone(evidence, graph, alone)
    return _conclude_sides(evidence, graph)


def sides_of(graph: WaitGraph, ranks: Sequence[int]) -> tuple[Side, ...]:
    """`ranks` by the communication that they stand in, the fewest first."""
    found: dict[str, list[int]] = {}
    for rank in ranks:
        wait = graph.waits[rank]
        found.setdefault(f"{wait} at {wait.site}" if wait.site else str(wait), []).append(rank)
    sides = (Side(tuple(sorted(members)), where) for where, members in found.items())
    return tuple(sorted(sides, key=lambda side: (len(side.ranks), side.ranks)))


def find_mismatch(evidence: Evidence, graph: WaitGraph) -> dict[str, tuple[int, ...]] | None:
    """Ranks by what they think a collective is, for the first (group, number) that members disagree about."""
    by_rank = {seen.rank: seen for seen in evidence.ranks}
    for wait in graph.waits.values():
        found: dict[str, list[int]] = {}
        for member in (wait.members or ()) if wait.call else ():
            recorder = by_rank[member].recorder if member in by_rank else None
            call = recorder.find(wait.call.token.group, wait.call.sequence) if recorder and wait.call else None
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
    if wait is not None:
        claim += f"; {evidence.name(wait.rank)} waits there, {others} of {evidence.world_size} ranks wait in all"
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
    expected = _kind_words(departure.expected, departure.rank, evidence)
    if departure.form == "skip":
        if wait is not None and wait.call and wait.operation == departure.expected[1]:
            expected = str(wait)
        return f"left out {expected}" + (f" and stands in {here}" if here else "")
    did = _kind_words(departure.did, departure.rank, evidence)
    if departure.form == "extra":
        return f"issued {did} once more than its schedule has it, before {expected}"
    return f"issued {did} where {expected} was due"


def _kind_words(kind: Kind, rank: int, evidence: Evidence) -> str:
    """`all_reduce of the tensor-parallel group (ranks 4-5)`, from the recorder of `rank`."""
    seen = next(seen for seen in evidence.ranks if seen.rank == rank)
    groups = {token.group for token in seen.recorder.tokens if token.shape == kind[1:]} if seen.recorder else set()
    members = {recorded_members(seen, group, evidence) for group in groups}
    fitting = [ranks for ranks in members if ranks and (kind[0] == "world") == (len(ranks) == evidence.world_size)]
    ranks = fitting[0] if len(fitting) == 1 else None
    name = kind[0] if kind[0] in ("world", "tp", "dp", "pp", "model", "tied") else None
    return f"{kind[1]} of {group_words(name, ranks)}"


def _departed_evidence(
    evidence: Evidence, graph: WaitGraph, departures: Departures, departed: tuple[int, ...]
) -> tuple[str, ...]:
    lines = []
    for rank in departed[:3]:
        if rank in departures.from_past:
            departure = departures.from_past[rank]
            expected = _kind_words(departure.expected, rank, evidence)
            did = _kind_words(departure.did, rank, evidence)
            lines.append(f"rank {rank} did the same in the steps before: {expected} was due, it issued {did}")
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
    what = "; ".join(f"ranks {compress_ranks(ranks)} issued {operation}" for operation, ranks in by_size)
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
    for rank in graph.endless:
        wait = graph.waits[rank]
        is_alone = not any(
            other.place == wait.place and other.members == wait.members for other in _others(graph, rank)
        )
        missed = len(graph.blockers[rank])
        if is_alone and missed + 1 >= MIN_GROUP_TO_STAND_ALONE and graph.is_acyclic_without(rank):
            rivals = [other for other in graph.endless if other != rank and graph.is_acyclic_without(other)]
            return rank if not rivals else None
    return None


def _others(graph: WaitGraph, rank: int) -> list[Wait]:
    return [wait for other, wait in graph.waits.items() if other != rank]


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


def _conclude_sides(evidence: Evidence, graph: WaitGraph) -> Conclusion:
    """The ranks wait in a circle, and the evidence looks the same from each side."""
    core = _core(graph)
    sides = sides_of(graph, core)
    pair = sides[:2]
    what = ", ".join(f"ranks {compress_ranks(side.ranks)} in {side.where}" for side in pair)
    more = f" and {len(sides) - 2} more places" if len(sides) > 2 else ""
    is_point_to_point = all(graph.waits[rank].is_point_to_point for rank in core)
    return Conclusion(
        state=State.HANG,
        claim=f"ranks {compress_ranks(core)} wait for each other, and the evidence does not say who left: {what}{more}",
        confidence=0.4,
        kind="H08" if is_point_to_point else "H10",
        sides=sides,
        evidence=(f"{len(graph.waits)} of {evidence.world_size} ranks wait, all of them for these in the end",),
        missing=("which of the sides departs from its schedule",),
    )


def _core(graph: WaitGraph) -> tuple[int, ...]:
    """The ranks without which no circle would be: those whose removal alone breaks it, else all that are in one."""
    breaking = [rank for rank in graph.endless if graph.is_acyclic_without(rank)]
    return tuple(breaking) if len(breaking) > 1 else tuple(graph.endless)

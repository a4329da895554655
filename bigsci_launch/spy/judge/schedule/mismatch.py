"""Members of a group that disagree about one of its collectives, and the ranks whose departure can be trusted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from bigsci_launch.spy.evidence.ranks import Evidence, RankEvidence
from bigsci_launch.spy.judge.schedule.departure import Departures, find_departures, is_as_before
from bigsci_launch.spy.judge.schedule.rounds import find_missed
from bigsci_launch.spy.judge.schedule.sizes import ended_unevenly
from bigsci_launch.spy.judge.waits import WaitGraph


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Ranks by what they think a collective is; `confirmed` are those whose own past agrees."""

    opinions: Mapping[str, tuple[int, ...]]
    confirmed: frozenset[int]


def find_mismatch(evidence: Evidence, graph: WaitGraph) -> Mismatch | None:
    """The first (group, number) that members disagree about, or None."""
    by_rank = {seen.rank: seen for seen in evidence.ranks}
    # One wait represents all ranks that are in the same collective.
    calls = ((wait.call, wait.members) for wait in graph.waits.values() if wait.call)
    waits = dict.fromkeys((call.token.group, call.sequence, members) for call, members in calls)
    for group, sequence, members in waits:
        found: dict[tuple[str, str, str], list[tuple[int, int]]] = {}
        for member in members or ():
            recorder = by_rank[member].recorder if member in by_rank else None
            call = recorder.find(group, sequence) if recorder else None
            if call is not None:
                found.setdefault(call.token.shape, []).append((member, call.position))
        if len(found) > 1 and not _may_differ(set(found), evidence, (group, sequence)):
            return _mismatch_of({" ".join(filter(None, shape)): calls for shape, calls in found.items()}, by_rank)
    return None


def _may_differ(shapes: set[tuple[str, str, str]], evidence: Evidence, but: tuple[str, int]) -> bool:
    """Whether these differ in sizes alone, which the operation allows, as other collectives in the same dumps show."""
    kinds = {(operation, types) for operation, _, types in shapes}
    recorders = (seen.recorder for seen in evidence.ranks if seen.recorder)
    return len(kinds) == 1 and ended_unevenly(recorders, next(iter(kinds))[0], but)


def _mismatch_of(found: Mapping[str, list[tuple[int, int]]], by_rank: Mapping[int, RankEvidence]) -> Mismatch:
    confirmed = {
        rank
        for calls in found.values()
        for rank, position in calls
        if (recorder := by_rank[rank].recorder) and is_as_before(recorder.stream, position)
    }
    opinions = {what: tuple(sorted(rank for rank, _ in calls)) for what, calls in found.items()}
    return Mismatch(opinions, frozenset(confirmed))


@dataclass(frozen=True, slots=True)
class Departed:
    """What the recorders show of a hang: all departures, and the ranks that are believed to be at fault."""

    departures: Departures
    ranks: tuple[int, ...]


def find_departed(evidence: Evidence, graph: WaitGraph, mismatch: Mismatch | None) -> Departed:
    """Return who left the common schedule, as far as the recorders show it."""
    departures = find_departures(evidence)
    departed = _trusted(departures, evidence)
    if not departed and mismatch is None and (missed := find_missed(evidence, graph)):
        departures = replace(departures, from_past=missed, from_peers={})
        departed = _trusted(departures, evidence)
    return Departed(departures, departed)


def _trusted(departures: Departures, evidence: Evidence) -> tuple[int, ...]:
    """The ranks that departed, unless the two views contradict each other or most ranks departed.

    A difference from the peers is never enough on its own: the majority may be wrong.
    """
    past, peers = set(departures.from_past), set(departures.from_peers)
    found = past & peers if past and peers else past
    return tuple(sorted(found)) if len(found) * 2 <= evidence.world_size else ()

"""Every rank is in a collective, and they wait for each other: which of them left the common schedule?

First what the recorders say (different operations under the same number; a departure from the rank's own past), then
both sides and no accusation: a rank that is alone may be the only one that did right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
from bigsci_launch.spy.judge.schedule.departure import Collective, Departure, Departures
from bigsci_launch.spy.judge.schedule.mismatch import Mismatch
from bigsci_launch.spy.judge.waits import SETUP_OPERATIONS, WaitGraph, recorded_members
from bigsci_launch.spy.taxonomy import HangClass, State


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


def _core(case: JobCase) -> tuple[int, ...]:
    certain = case.graph.certain_part()
    return (core_of(certain) or certain.open_ends()) if case.graph.endless else ()


def norms_differ(case: JobCase) -> Conclusion | None:
    """Whole pipeline stages are in the gradient norm, and wait for stages that have left it."""
    core = _core(case)
    return conclude_norm(case.evidence, case.graph, sides_of(case.graph, core)) if core else None


def new_collective(case: JobCase) -> Conclusion | None:
    """Some ranks are in a collective that was never in the schedule, and the others are not."""
    found = conclude_news(case.evidence, case.graph, case.departed.departures) if _core(case) else None
    return replace(found, grace=_grace(case)) if found else None


def each_other(case: JobCase) -> Conclusion | None:
    """Ranks of known groups wait for each other."""
    core = _core(case)
    if not core:
        return None
    found, departures = conclude_sides(case.evidence, case.graph.certain_part(), core), case.departed.departures
    # Where no rank has a past to depart from, one that differs has differed from the start.
    differ = bool(departures.from_peers) and not departures.surprised
    return replace(found, grace=_grace(case), hang_class=HangClass.PROGRAM_DIFFERS if differ else found.hang_class)


def different_places(case: JobCase) -> Conclusion | None:
    """Ranks wait in a circle, if the groups are what their places in the code suggest."""
    return replace(conclude_places(case.evidence, case.graph), grace=_grace(case)) if case.graph.endless else None


def _grace(case: JobCase) -> GracePeriod:
    """How long ranks must have waited for each other: less if all are on one node, where no network lies between."""
    nodes = {seen.node for seen in case.evidence.ranks}
    return GracePeriod.LOCAL if len(nodes) == 1 and all(nodes) else GracePeriod.ELSEWHERE


def _conclude_departed(case: JobCase, departures: Departures, departed: tuple[int, ...]) -> Conclusion:
    evidence, graph = case.evidence, case.graph
    first = departures.of(departed[0])
    agree = departures.from_peers.keys() >= set(departed)
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
        strength=Strength.DIRECT if agree else Strength.AGREED,
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

    A minority is accused only if the past confirms what the others did and not what it did: a majority can be wrong.
    """
    evidence, mismatch, departures = case.evidence, case.mismatch, case.departed.departures
    assert mismatch is not None
    by_size = sorted(mismatch.opinions.items(), key=lambda item: (len(item[1]), item[1]))
    few, many = by_size[0][1], [rank for _, ranks in by_size[1:] for rank in ranks]
    has_past = not mismatch.confirmed.isdisjoint(many) and mismatch.confirmed.isdisjoint(few)
    is_odd = len(few) < len(many) and departures.surprised.isdisjoint(many) and has_past
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

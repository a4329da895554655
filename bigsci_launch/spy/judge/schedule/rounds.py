"""Finds a skipped collective from sequence numbers alone, for recorders too short to hold earlier steps.

Numbers are never overwritten. Suppose a rank issued seven collectives of one group between any two of another, as far
back as the numbers go. If it issued six this time, while a member waits there for the seventh, it has left one out.
"""

from __future__ import annotations

from collections.abc import Sequence

from bigsci_launch.spy.evidence.calls.flight_recorder import Recorder, Token
from bigsci_launch.spy.evidence.groups import scope_of
from bigsci_launch.spy.evidence.ranks import Evidence, RankEvidence
from bigsci_launch.spy.judge.schedule.departure import Collective, Departure
from bigsci_launch.spy.judge.waits import Wait, WaitGraph, recorded_members

MIN_ROUNDS = 3
"""Earlier rounds that it takes to know how many collectives a round has."""


def find_missed(evidence: Evidence, graph: WaitGraph) -> dict[int, Departure]:
    """Return the ranks that others wait for in a collective that, by their numbers, they left out."""
    by_rank = {seen.rank: seen for seen in evidence.ranks}
    found: dict[int, Departure] = {}
    for blockers, ranks in graph.meetings:
        wait = graph.waits[ranks[0]]
        for rank in sorted(blockers):
            recorder = by_rank[rank].recorder
            if wait.call is not None and recorder is not None and rank in graph.waits and _left_out(recorder, wait):
                found[rank] = _departure(by_rank[rank], recorder, wait, evidence)
    return found


def _left_out(recorder: Recorder, wait: Wait) -> bool:
    """Whether the collective of `wait` is all that is missing in the rank's newest round.

    A round goes from one collective to the next of the group that the rank is in now.
    """
    assert wait.call is not None
    group, number = wait.call.token.group, wait.call.sequence
    groups = [recorder.tokens[index].group for index in recorder.stream]
    is_usual = any(recorder.tokens[index] == wait.call.token for index in recorder.stream)
    if not is_usual or groups[-1] == group or recorder.last_sequence.get(group, 0) != number - 1:
        return False
    ends = [at for at, each in enumerate(groups) if each == groups[-1]][:-1]
    rounds = recorder.last_sequence[groups[-1]] - 1
    if not ends or rounds < MIN_ROUNDS:
        return False
    lacking = {
        each: lack
        for each in recorder.last_sequence
        if each != groups[-1] and (lack := _lack(recorder, groups, each, ends, rounds))
    }
    return lacking == {group: 1}


def _lack(recorder: Recorder, groups: Sequence[str], group: str, ends: Sequence[int], rounds: int) -> int | None:
    """How many collectives of `group` the newest round lacks; None if the earlier rounds differ.

    `ends` are the positions at which earlier rounds ended, the last of them the end of round number `rounds`.
    """
    newest = recorder.last_sequence[group]
    counts = [newest - groups[at:].count(group) for at in ends]
    per_round, rest = divmod(counts[-1], rounds)
    first = rounds - len(ends) + 1
    if rest or any(count != per_round * (first + nth) for nth, count in enumerate(counts)):
        return None
    return per_round - (newest - counts[-1])


def _departure(seen: RankEvidence, recorder: Recorder, wait: Wait, evidence: Evidence) -> Departure:
    assert wait.call is not None
    did = recorder.tokens[recorder.stream[-1]]
    return Departure(
        rank=seen.rank,
        position=len(recorder.stream) - 1,
        expected=_collective(wait.call.token, seen, evidence),
        did=_collective(did, seen, evidence),
        form="skip",
        expected_group=wait.call.token.group,
        did_group=did.group,
    )


def _collective(token: Token, seen: RankEvidence, evidence: Evidence) -> Collective:
    members = recorded_members(seen, token.group, evidence) or ()
    group = scope_of(members, evidence.world_size, evidence.topology) or f"{len(members)} ranks"
    return Collective(group, *token.shape)

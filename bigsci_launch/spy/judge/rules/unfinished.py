"""Ranks that do not get out of a collective of NCCL that other members of its group have finished.

All members of a collective without a root have begun it when one of them has finished it. So no rank is missing, and
none left a schedule: what remains is the device of the rank, or its connection. Calls return before their collectives
end, so ranks have begun others behind it, and wait for that, however the numbers and sizes of these look.
"""

from __future__ import annotations

from dataclasses import dataclass

from bigsci_launch.spy.evidence.calls.flight_recorder import Call
from bigsci_launch.spy.evidence.ranks import Evidence, RankEvidence
from bigsci_launch.spy.judge.case import JobCase
from bigsci_launch.spy.judge.conclusion import Conclusion, Strength, name_and_verb
from bigsci_launch.spy.judge.rules.messages import (
    ALL_HAVE_COME,
    UNACKNOWLEDGED,
    point_to_unfinished,
    sides_of,
    where_of,
)
from bigsci_launch.spy.judge.waits import ROOTED, Wait, wait_from_call
from bigsci_launch.spy.taxonomy import State
from bigsci_launch.topology.naming import counted

MAX_NAMED = 2
DEVICES = "dmesg -T | grep -i xid; nvidia-smi -q -d ECC,PAGE_RETIREMENT  # on the node of that rank: its GPU"


@dataclass(frozen=True, slots=True)
class HeldCollective:
    """A collective in which `inside` still are, while `finished` have left it."""

    inside: tuple[Wait, ...]
    finished: tuple[int, ...]


def finished_by_others(case: JobCase) -> Conclusion | None:
    """Ranks do not return from a collective of NCCL that other members of its group have finished."""
    evidence, graph = case.evidence, case.graph
    held = find_held(case)
    if not held or not all(_is_in_message(case.by_rank[rank]) for rank in graph.roots):
        return None
    ranks = frozenset(wait.rank for each in held for wait in each.inside)
    behind = _ranks_behind(case, ranks)
    apart = len(graph.waits.keys() - ranks - behind)
    rest = (f"{counted(apart, 'waits')} in collectives without any of them",) if apart else ()
    texts = [_held_text(evidence, each) for each in held[:MAX_NAMED]]
    more = f"; {len(held) - MAX_NAMED} more collectives are like that" if len(held) > MAX_NAMED else ""
    waits = [wait for each in held for wait in each.inside]
    return Conclusion(
        state=State.HANG,
        claim=f"{'; '.join(texts)}{more}: a connection or a device fails",
        strength=Strength.GUESS,
        sides=sides_of(graph, tuple(graph.waits)),
        evidence=(ALL_HAVE_COME, f"{counted(behind, 'waits')} behind it, directly or not", *rest),
        missing=("the state of the devices", UNACKNOWLEDGED),
        next=(DEVICES,),
        look_first=point_to_unfinished(waits),
    )


def _held_text(evidence: Evidence, held: HeldCollective) -> str:
    inside = tuple(wait.rank for wait in held.inside)
    done = name_and_verb(evidence, held.finished, "has")
    return f"{name_and_verb(evidence, inside, 'does')} not return from {where_of(held.inside)}, which {done} finished"


def find_held(case: JobCase) -> list[HeldCollective]:
    """Return the collectives of NCCL that some members of a listed group have finished, while others have begun nothing
    before them that has not ended.

    Those with a root are left out: a member may end them before others have come.
    """
    found: dict[tuple[str, int, tuple[int, ...]], list[Wait]] = {}
    for seen in case.alive:
        wait = _oldest_wait(seen, case.evidence)
        if wait is not None and wait.call is not None and wait.members and not wait.is_assumed:
            found.setdefault((wait.call.token.group, wait.call.sequence, wait.members), []).append(wait)
    held = []
    for (_, _, members), inside in found.items():
        call = inside[0].call
        assert call is not None
        finished = tuple(rank for rank in members if rank in case.by_rank and has_finished(case.by_rank[rank], call))
        if finished:
            held.append(HeldCollective(tuple(inside), finished))
    return held


def _oldest_wait(seen: RankEvidence, evidence: Evidence) -> Wait | None:
    """Return the oldest collective without a root that the rank has begun on NCCL and not ended."""
    recorder = seen.recorder
    if recorder is None or not is_of_nccl(seen) or not recorder.open_positions:
        return None
    call = recorder.call(recorder.open_positions[0])
    is_rooted = call.token.operation.strip("_").removesuffix("_oop") in ROOTED
    return None if is_rooted else wait_from_call(seen, None, call, evidence)


def is_of_nccl(seen: RankEvidence) -> bool:
    """Whether its recorder is that of NCCL, which alone lists messages between two ranks."""
    return seen.recorder is not None and seen.recorder.open_messages is not None


def has_finished(seen: RankEvidence, call: Call) -> bool:
    """Whether the recorder of a rank holds this collective as one that has ended."""
    if seen.recorder is None:
        return False
    own = seen.recorder.find(call.token.group, call.sequence)
    return (
        own is not None
        and own.token.operation == call.token.operation
        and own.position not in seen.recorder.open_positions
    )


def _ranks_behind(case: JobCase, held: frozenset[int]) -> frozenset[int]:
    """Return the other ranks that wait for one that is held, or together with one, directly or not. Those with a
    message under way may wait for it."""
    left: dict[tuple[frozenset[int], tuple[int, ...]], list[int]] = {}
    reached = set(held)
    for rank, wait in case.graph.waits.items():
        if _is_in_message(case.by_rank[rank]):
            reached.add(rank)
        else:
            left.setdefault((case.graph.blockers[rank], wait.members or ()), []).append(rank)
    while True:
        found = [key for key in left if not (reached.isdisjoint(key[0]) and reached.isdisjoint(key[1]))]
        if not found:
            return frozenset(reached - held)
        for key in found:
            reached.update(left.pop(key))


def _is_in_message(seen: RankEvidence) -> bool:
    """Whether its recorder lists a message that has not ended: it is no rank that stays away."""
    return bool(seen.recorder and seen.recorder.open_messages) and not seen.threads

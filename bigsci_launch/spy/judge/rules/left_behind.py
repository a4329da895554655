"""Hangs that leave a few ranks behind in a collective while most are before it or beyond it, outside any collective.

On GPUs a call returns before its collective has ended, so the stacks of the majority show a later line, in no call of
the communication library. Neither side is to blame for that: both are shown. On CPUs a call returns when its collective
has ended: there, a rank that is alone in a collective of the world is accused if all others wait in code that
communicates without a frame of its own, and if their connections show that they can only wait for the world.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from bigsci_launch.spy.evidence.known_code import LOCK_WAITS, bare_name, uses_process_groups
from bigsci_launch.spy.evidence.ranks import Evidence, RankEvidence
from bigsci_launch.spy.evidence.stacks import Frame
from bigsci_launch.spy.judge.case import JobCase
from bigsci_launch.spy.judge.conclusion import Conclusion, Side, Strength, Suspect
from bigsci_launch.spy.judge.facts import deciding_wait, frames_moved, is_busy, sleeps_on_futex
from bigsci_launch.spy.judge.rules.circle import MIN_OTHERS_IN_WORLD, WORLD_ONLY
from bigsci_launch.spy.judge.rules.messages import sides_of
from bigsci_launch.spy.judge.rules.process import explain_stall
from bigsci_launch.spy.judge.waits import ROOTED, WaitGraph
from bigsci_launch.spy.taxonomy import HangClass, State
from bigsci_launch.topology.naming import agree, count_ranks, counted


def left_behind(case: JobCase) -> Conclusion | None:
    """Most ranks are at one place outside any known collective, for no reason of their own, and a few are in one."""
    evidence, graph, by_rank = case.evidence, case.graph, case.by_rank
    outside = [seen for seen in evidence.ranks if seen.rank not in graph.waits and seen.threads and not seen.is_gone]
    if not graph.waits or len(outside) * 2 <= evidence.world_size or not set(graph.roots) <= {x.rank for x in outside}:
        return None
    if len({_site(seen) for seen in outside}) > 1 or not all(may_wait_for_device(seen, graph) for seen in outside):
        return None
    sides = sides_of(graph, tuple(graph.waits))
    away = [seen.rank for seen in outside]
    first = by_rank[sides[0].ranks[0]]
    are_complete = not any(graph.blockers[rank] for rank in graph.waits)
    still = "; ".join(
        f"{where_text(evidence, side.ranks)} {agree('is', side.ranks)} still in {side.where}" for side in sides[:3]
    )
    if _is_one_against_all(case, outside):
        return _conclude_one(case, sides[0], outside)
    gone_on = f"{where_text(evidence, away)} {_progress(first, outside[0])}"
    return Conclusion(
        state=State.HANG,
        claim=f"{still}; {gone_on}, and neither side makes progress",
        strength=Strength.GUESS,
        hang_class=HangClass.PHASES_SPLIT,
        sides=(*sides, Side(tuple(away), f"no collective, at {_site(outside[0])}")),
        evidence=_evidence(graph, are_complete),
        missing=("what the devices do: a call may return on the host before its collective has ended",),
        next=("CUDA_LAUNCH_BLOCKING=1  # in the next attempt: no call returns before its collective has ended",),
    )


def _is_one_against_all(case: JobCase, outside: Sequence[RankEvidence]) -> bool:
    """Whether one rank is in a collective of the world, while all others wait for one in native code, certainly."""
    waits = list(case.graph.waits.values())
    if case.graph.of_world_only is not True or len(waits) != 1 or waits[0].operation in ROOTED:
        return False
    is_whole = len(outside) == case.evidence.world_size - 1 >= MIN_OTHERS_IN_WORLD
    return is_whole and waits[0].scope == "world" and all(map(_waits_in_native_code, outside))


def _waits_in_native_code(seen: RankEvidence) -> bool:
    """Whether it certainly sleeps below a call that may communicate over torch's process groups, and only over them."""
    call = seen.thread.native_call if seen.thread else None
    return call is not None and uses_process_groups(call.function, call.file) and sleeps_on_futex(seen) is True


def _conclude_one(case: JobCase, side: Side, outside: Sequence[RankEvidence]) -> Conclusion:
    evidence, rank = case.evidence, side.ranks[0]
    there = outside[0].thread.native_call if outside[0].thread else None
    call = f"{bare_name(there.function)} ({there.place})" if there else "native code"
    words = f"is alone in {side.where}, while the other {len(outside)} wait at {_site(outside[0])}"
    return Conclusion(
        state=State.HANG,
        claim=f"{evidence.name(rank)} {words}",
        strength=Strength.DERIVED,
        hang_class=HangClass.LEFT_EARLY,
        suspects=(Suspect(rank, words),),
        sides=(
            side,
            Side(tuple(seen.rank for seen in outside), f"{call}, which may communicate, at {_site(outside[0])}"),
        ),
        evidence=(f"the others sleep in {call}, which communicates without a frame of its own", WORLD_ONLY),
        missing=("whether this rank left the schedule or all others did: the stacks show only that it differs",),
    )


def _evidence(graph: WaitGraph, are_complete: bool) -> tuple[str, ...]:
    if not are_complete:
        return (f"{counted(graph.waits, 'waits')} for members of their groups that are on the larger side",)
    return (
        f"all members of the groups that these {len(graph.waits)} wait in have arrived: no rank is missing there",
        "all others are at one place, and their stacks show no collective",
    )


def _site(seen: RankEvidence) -> Frame | None:
    return seen.thread.site if seen.thread else None


def may_wait_for_device(seen: RankEvidence, graph: WaitGraph) -> bool:
    """Whether a process that does not move may wait for a collective on its device: it spins, or sleeps on a futex.

    A process that spins may just as well compute, so spinning counts only if no rank waits for it.
    """
    if frames_moved(seen) or (seen.thread is not None and seen.thread.waits_for_shared_lock):
        return False
    if is_busy(seen):
        return seen.rank not in graph.roots
    wait = deciding_wait(seen)
    return (wait is None or wait.startswith(LOCK_WAITS)) and not explain_stall(seen).is_sign


def _progress(inside: RankEvidence, outside: RankEvidence) -> str:
    """`have left train_step and are in train (training.py:915)`, if one function shows which comes first."""
    place = _site(outside)
    frames: Sequence[Frame] = inside.thread.frames if inside.thread else ()
    for callee, frame in pairwise(frames):
        if place and (frame.function, frame.file) == (place.function, place.file) and frame.line < place.line:
            return f"have left {bare_name(callee.function)} and are in {place}"
    return f"are in {place}"


def where_text(evidence: Evidence, ranks: Collection[int]) -> str:
    """`80 ranks (tp5-6; 2 of 8 on each of 40 nodes)`: how many, and which part of the layout that is."""
    parts = [part for part in (evidence.part(ranks), _nodes(evidence, ranks)) if part]
    return f"{count_ranks(ranks)} ({'; '.join(parts)})" if parts else count_ranks(ranks)


def _nodes(evidence: Evidence, ranks: Collection[int]) -> str:
    """`2 of 8 on each of 40 nodes`, where it is the same on each."""
    wanted = frozenset(ranks)
    counts: dict[str, tuple[int, int]] = {}
    for seen in evidence.ranks:
        inside, in_all = counts.get(seen.node, (0, 0))
        counts[seen.node] = (inside + (seen.rank in wanted), in_all + 1)
    held = {count for count in counts.values() if count[0]}
    num_nodes = sum(1 for count in counts.values() if count[0])
    if len(held) != 1 or num_nodes < 2:
        return ""
    inside, in_all = next(iter(held))
    share = f"{inside} of {in_all}" if inside < in_all else f"all {in_all}"
    return f"{share} on each of {num_nodes} nodes"

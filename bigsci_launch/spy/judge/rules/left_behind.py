"""Hangs that leave a few ranks behind in a collective while most are before it or beyond it, outside any collective.

On GPUs a call returns before its collective has ended, so the stacks of the majority show a later line, in no call of
the communication library. On CPUs the majority may be in code that communicates without a frame of its own. Neither
side is to blame for that: both are shown.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from bigsci_launch.spy.evidence.known_code import LOCK_WAITS, bare_name
from bigsci_launch.spy.evidence.ranks import Evidence, RankEvidence
from bigsci_launch.spy.evidence.stacks import Frame
from bigsci_launch.spy.judge.case import JobCase
from bigsci_launch.spy.judge.commands import ASK_RECORDER
from bigsci_launch.spy.judge.conclusion import Conclusion, Side, Strength
from bigsci_launch.spy.judge.facts import deciding_wait, frames_moved, is_busy
from bigsci_launch.spy.judge.rules.messages import sides_of
from bigsci_launch.spy.judge.rules.process import explain_stall
from bigsci_launch.spy.judge.waits import WaitGraph
from bigsci_launch.spy.taxonomy import HangClass, State
from bigsci_launch.topology.naming import agree, count_ranks, counted

BLOCKING = "CUDA_LAUNCH_BLOCKING=1  # in the next attempt, on GPUs: no call returns before its collective has ended"


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
    gone_on = f"{where_text(evidence, away)} {_progress(first, outside[0])}"
    return Conclusion(
        state=State.HANG,
        claim=f"{still}; {gone_on}, and neither side makes progress",
        strength=Strength.GUESS,
        hang_class=HangClass.PHASES_SPLIT,
        sides=(*sides, Side(tuple(away), f"no collective, at {_site(outside[0])}")),
        evidence=_evidence(graph, are_complete),
        missing=("what the devices do: a call may return on the host before its collective has ended",),
        next=(*(() if any(seen.recorder for seen in evidence.ranks) else (ASK_RECORDER,)), BLOCKING),
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

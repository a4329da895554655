"""Ranks of which nothing but recorded collectives was read, and none of these is open; and those of other machines.

Recorders do not list messages between two ranks on gloo: such a rank may wait for one as well as compute or hang. It is
not accused of staying away while the recorders show who left the schedule, or while several ranks look like it.
"""

from __future__ import annotations

from dataclasses import replace

from bigsci_launch.spy.evidence.ranks import ELSEWHERE, NO_FILE, Evidence, RankEvidence
from bigsci_launch.spy.judge.conclusion import Conclusion
from bigsci_launch.spy.judge.rules.async_wait import UNKNOWN_STATE, is_certain
from bigsci_launch.spy.judge.rules.circle import judge_circle
from bigsci_launch.spy.judge.rules.messages import sides_of
from bigsci_launch.spy.judge.rules.process import explain_stall
from bigsci_launch.spy.judge.waits import WaitGraph
from bigsci_launch.spy.taxonomy import State
from bigsci_launch.topology.words import agree, counted, name_ranks

NOT_LISTED = "their stacks: they may wait for messages of each other, which recorders do not list"
WHERE_TO_LOOK = {
    ELSEWHERE: "their stacks: look below their launchers too (--pid), or at the whole job (--jobid)",
    NO_FILE: "their files: that one is missing accuses nobody",
}


def judge_unseen(evidence: Evidence, graph: WaitGraph) -> Conclusion | None:
    """The verdict where all ranks that others wait for are of this kind; None where other gates decide."""
    by_rank = {seen.rank: seen for seen in evidence.ranks}
    roots = graph.roots
    if not roots or not all(_is_unseen(by_rank[rank]) for rank in roots):
        return None
    unseen = frozenset(roots)
    seen_ranks = tuple(rank for rank in graph.ranks if rank not in unseen)
    conclusion = judge_circle(evidence, replace(graph, ranks=seen_ranks))
    if conclusion is not None and conclusion.suspects:
        return conclusion
    reason = next((by_rank[rank].unreached for rank in roots if by_rank[rank].was_out_of_reach), None)
    if len(roots) == 1 and reason is None:
        return None
    they = "it stands" if len(roots) == 1 else "they stand"
    waiting = counted(graph.waits, "waits")
    claim = f"{name_ranks(roots)} {agree('has', roots)} not come to the collectives that {waiting} in"
    return Conclusion(
        # Where nobody has looked, ranks may be at work.
        state=State.UNKNOWN if reason == ELSEWHERE else State.HANG,
        claim=f"{claim}, and nothing that was read shows where {they}",
        confidence=0.3,
        sides=sides_of(graph, tuple(graph.waits)),
        evidence=() if reason else ("no recorded collective of theirs is open",),
        missing=(WHERE_TO_LOOK[reason] if reason else NOT_LISTED,),
    )


def _is_unseen(seen: RankEvidence) -> bool:
    if seen.was_out_of_reach:
        return True
    if seen.recorder is None or seen.threads or seen.last is None:
        return False
    return seen.last.state == UNKNOWN_STATE or not is_certain(explain_stall(seen), seen)

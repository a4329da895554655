"""Ranks known only from their flight recorder (no stack, no open collective), or on machines that nobody looked at.

On gloo, recorders do not list messages between two ranks: such a rank may wait for one, compute or hang. It is not
accused of staying away if the recorders show who left the schedule, or if several ranks look like it.
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

NOT_LISTED = "their stacks: they may wait for messages from each other, which recorders do not list"
WHERE_TO_LOOK = {
    ELSEWHERE: "their stacks: point --pid at their launchers too, or look at the whole job (--jobid)",
    NO_FILE: "their files: a missing file accuses nobody",
}


def judge_unseen(evidence: Evidence, graph: WaitGraph) -> Conclusion | None:
    """The verdict when all ranks that others wait for are of this kind; None if other gates decide."""
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
    they = "it is" if len(roots) == 1 else "they are"
    waiting = counted(graph.waits, "waits")
    claim = f"{name_ranks(roots)} {agree('has', roots)} not reached the collectives that {waiting} in"
    return Conclusion(
        # Ranks that nobody looked at may be at work.
        state=State.UNKNOWN if reason == ELSEWHERE else State.HANG,
        claim=f"{claim}, and nothing that was read shows where {they}",
        confidence=0.3,
        sides=sides_of(graph, tuple(graph.waits)),
        evidence=() if reason else ("none of their recorded collectives is still open",),
        missing=(WHERE_TO_LOOK[reason] if reason else NOT_LISTED,),
    )


def _is_unseen(seen: RankEvidence) -> bool:
    if seen.was_out_of_reach:
        return True
    if seen.recorder is None or seen.threads or seen.last is None:
        return False
    return seen.last.state == UNKNOWN_STATE or not is_certain(explain_stall(seen), seen)

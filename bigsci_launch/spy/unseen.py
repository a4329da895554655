"""Ranks of which nothing but recorded collectives was read, and none of these is open; and those of other machines.

Recorders do not list messages between two ranks on gloo: such a rank may wait for one as well as compute or hang. It is
not accused of staying away while the recorders show who left the schedule, or while several ranks look like it.
"""

from __future__ import annotations

from dataclasses import replace

from bigsci_launch.spy.circle import judge_circle
from bigsci_launch.spy.conclusion import Conclusion, State, name_ranks
from bigsci_launch.spy.evidence import ELSEWHERE, Evidence, RankEvidence
from bigsci_launch.spy.sides import sides_of
from bigsci_launch.spy.waits import WaitGraph

NOT_LISTED = "their stacks: they may wait for messages of each other, which recorders do not list"
NOT_HERE = "their stacks: they run on other machines; look below the launchers there too, or with --jobid on Slurm"


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
    are_elsewhere = any(by_rank[rank].unreached == ELSEWHERE for rank in roots)
    if len(roots) == 1 and not are_elsewhere:
        return None
    verb = "has" if len(roots) == 1 else "have"
    claim = f"{name_ranks(roots)} {verb} not come to the collectives that {len(graph.waits)} ranks wait in"
    return Conclusion(
        state=State.HANG,
        claim=f"{claim}, and nothing that was read shows where they stand",
        confidence=0.3,
        sides=sides_of(graph, tuple(graph.waits)),
        evidence=() if are_elsewhere else ("no recorded collective of theirs is open",),
        missing=(NOT_HERE if are_elsewhere else NOT_LISTED,),
    )


def _is_unseen(seen: RankEvidence) -> bool:
    if seen.unreached == ELSEWHERE:
        return True
    return seen.recorder is not None and not seen.threads and seen.last is not None and seen.last.state == "?"

"""What the cluster decided about a job, and whether it ended for that: it may have failed, or hung, before. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bigsci_launch.endings.ending import Culprit, JobEnding, ending_of, named_by
from bigsci_launch.endings.exits import first_exit
from bigsci_launch.endings.statements import Statement

DECISIONS = ("preempted", "node_failure", "requeued", "time_limit", "unkillable", "cancelled")
"""In the order in which they count: a preempted node is lost too, and a lost one requeues."""
MAY_FOLLOW = ("time_limit", "cancelled")
"""Ends of a job that often hung, or had failed, long before: then that is the reason."""
NEAR = 10
APART_S = 1.0
"""Clocks and prints are not better: two failures closer than this have no order."""
LEAD_S = 60.0
LAUNCHER_TOLD = "elastic: told to end"


def decided_by_cluster(told: Iterable[Statement]) -> Statement | None:
    found = [each for each in told if each.word.speaker == "witness" and each.kind in DECISIONS]
    return min(found, key=lambda each: (DECISIONS.index(each.kind), "node" not in each.named), default=None)


def by_cluster(slurm: Statement, told: Sequence[Statement], more: Sequence[Statement]) -> JobEnding:
    others = [each for each in told if each.kind == slurm.kind and each is not slurm]
    naming = [each for each in (slurm, *others) if each.named_ranks or each.tasks or "node" in each.named]
    if slurm.kind in ("node_failure", "unkillable"):
        culprit, why = named_by(slurm, others) or _node_before(slurm, told), ""
    else:
        culprit = named_by(naming[0]) if naming else Culprit()
        why = "no rank failed first: the job was ended from outside"
    return ending_of(slurm, [slurm, *others, *more], culprit, why)


def _node_before(lost: Statement, told: Iterable[Statement]) -> Culprit:
    """Return the node of the process that was seen to end in the lines just above: it ended with its node."""
    near = [each for each in told if each.file == lost.file and 0 < lost.line - each.line <= NEAR and each.node]
    return Culprit(node=near[-1].node) if near and near[-1].word.speaker == "witness" else Culprit()


def came_before(found: JobEnding, slurm: Statement) -> bool:
    """Whether a failure explains an end that Slurm reports, because it came first and was not survived."""
    first = found.evidence[0]
    if slurm.kind not in MAY_FOLLOW or found.kind in ("network", "aborted", "unknown"):
        return False
    if first.file == slurm.file and first.line < slurm.line:
        return first.moment is None or slurm.moment is None or first.moment <= slurm.moment
    return first.moment is not None and slurm.moment is not None and first.moment < slurm.moment - LEAD_S


def told_to_end(found: JobEnding | None, statements: Sequence[Statement]) -> JobEnding | None:
    """Return that a launcher was told to end, if the others only lost their connections to it, and no process was seen
    to end before."""
    if found is None or found.kind != "network" or found.culprit or first_exit(statements) is not None:
        return None
    ended = next((each for each in statements if each.word.name == LAUNCHER_TOLD), None)
    if ended is None or any(_is_earlier(each, ended) for each in found.evidence):
        return None
    return ending_of(ended, [ended, *found.evidence], Culprit(node=ended.node))


def _is_earlier(each: Statement, other: Statement) -> bool:
    if each.moment is not None and other.moment is not None:
        return each.moment < other.moment - APART_S
    return each.file == other.file and each.line < other.line

"""Why a job ended, from all that was said about it. Pure, and without a guess: what was not said is unknown.

A victim is never named as the culprit, nor the first that a launcher saw end if it says itself that it is a victim.
A rank that was killed after it complained was killed because it complained.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from bigsci_launch.endings.cluster import LAUNCHER_TOLD, by_cluster, came_before, decided_by_cluster, told_to_end
from bigsci_launch.endings.ending import MOST_EVIDENCE, Culprit, JobEnding, ending_of, named_by
from bigsci_launch.endings.exits import TORCHRUN, exits_of, first_exit, signal_of
from bigsci_launch.endings.own import failures_in, own_failure_of, strength_of, was_survived
from bigsci_launch.endings.statements import Statement, listed_by
from bigsci_launch.endings.victims import VICTIMS, victims_of
from bigsci_launch.topology.naming import name_ranks

RESTARTED = 10
"""Lines between a failure and the report that the program has finished: then it was started again."""
LAST_LINES = 50
"""Below a report that the program has finished: else an epoch or a stage had."""
FEW = 5
TOLD_TO_END = ("slurm: step cancelled", LAUNCHER_TOLD, "python: interrupted")
"""Echoes of an end from outside: the reason where nothing else was said."""


def conclude(statements: Sequence[Statement], ranks: Collection[int] = ()) -> JobEnding:
    """Return why the job ended. `ranks` are those whose output was read."""
    if (finished := _finish_of(statements)) is not None:
        return ending_of(finished, [finished], Culprit())
    told = [each for each in statements if each.word.speaker != "echo"]
    named = {rank for each in statements if each.word.name.startswith(TORCHRUN) for rank in each.named_ranks}
    ranks = {*ranks, *named}
    own = own_failure_of(told)
    slurm = decided_by_cluster([each for each in told if each.word.is_sure or own is None])
    found = own or _named_by_witness(told) or victims_of(told, ranks) or _ended(told, statements)
    found = told_to_end(found, statements) or found
    if slurm is not None and not (found and came_before(found, slurm)):
        return by_cluster(slurm, told, found.evidence if found else ())
    return replace(found, culprit=_placed(found.culprit, told)) if found else _nothing(statements)


def _finish_of(statements: Sequence[Statement]) -> Statement | None:
    """Return what reports that the program has finished, if that was printed long after each failure: it was started
    again after them."""
    last = next((each for each in reversed(statements) if each.kind == "finished" and each.word.is_sure), None)
    others = [each for each in statements if each.kind != "finished" and each.word.speaker != "register"]
    if last is None or not others:
        return None
    return last if all(each.file == last.file and each.line + RESTARTED < last.line for each in others) else None


def _placed(culprit: Culprit, told: Sequence[Statement]) -> Culprit:
    """Return the culprit with its node, if a launcher gives the node of that rank in another line."""
    if culprit.node is not None or len(culprit.ranks) != 1:
        return culprit
    has_launchers = any(each.word.name.startswith(TORCHRUN) for each in told)  # then tasks are launchers
    nodes: set[str | None] = set()
    for each in told:
        ranks = each.named_ranks or (() if has_launchers else each.tasks)
        nodes |= {each.named.get("node")} if each.word.speaker == "witness" and culprit.ranks[0] in ranks else set()
        listed = listed_by(each.named) if each.word.speaker == "register" else ()
        nodes |= {member.node for member in listed if member.rank == culprit.ranks[0]}
    nodes.discard(None)
    return replace(culprit, node=nodes.pop()) if len(nodes) == 1 else culprit


def reason_of(statements: Sequence[Statement]) -> Statement | None:
    """Return what explains the end of one process, of all that it said: its own failure, what it witnessed of another
    one, or the one that it lost; None if it said nothing of the kind."""
    own = failures_in(statements)
    seen = [each for each in (first_exit(statements), *statements) if each and each.word.speaker == "witness"]
    lost = [each for each in statements if each.word.speaker == "victim" and each.kind in VICTIMS]
    lost = [each for each in lost if not was_survived(each)]
    lost.sort(key=lambda each: VICTIMS.index(each.kind))
    return min(own, key=strength_of) if own else next(iter([*seen, *lost]), None)


def _named_by_witness(told: Iterable[Statement]) -> JobEnding | None:
    """Return the rank that a witness of a hang names: one that did not reach a barrier, or stopped its heartbeats."""
    found = [each for each in told if each.word.speaker == "witness" and (each.kind == "hang" or each.named_ranks)]
    found = [each for each in found if each.code is None and signal_of(each) is None]
    if not found:
        return None
    ranks = tuple(sorted({rank for each in found for rank in each.named_ranks}))
    ending = ending_of(found[0], found, Culprit(ranks=ranks, node=found[0].named.get("node")))
    if len(ranks) > 1:
        why = f"{name_ranks(ranks)} are named, and nothing says which was first"
        return replace(ending, culprit=Culprit(), why_not_known=why)
    return ending


def _ended(told: Sequence[Statement], statements: Sequence[Statement]) -> JobEnding | None:
    """Return the first process that a launcher saw end, where nothing else was said."""
    witness = first_exit(told)
    cancelled = [each for each in statements if each.word.name in TOLD_TO_END]
    if witness is None:
        return ending_of(cancelled[0], [cancelled[0]], Culprit()) if cancelled else None
    before = [each for each in cancelled if each.file == witness.file and each.line < witness.line]
    if before and signal_of(witness) in ("SIGKILL", "SIGTERM"):
        return ending_of(before[0], [before[0], witness], Culprit(), "all were ended with the step")
    alike = [each for each in exits_of(told) if each is not witness and each.code == witness.code]
    culprit = Culprit() if len(witness.tasks) > 1 and alike else named_by(witness, ())
    others = [each for each in told if each is not witness and each.word.speaker != "register"]
    return ending_of(
        witness, [witness, *others], culprit, "several tasks ended alike, and nothing says which was first"
    )


def _is_last_word(finished: Statement) -> bool:
    """Whether it is at the end of what was printed: epochs and stages finish too."""
    return finished.word.speaker != "echo" or finished.printed_after <= (LAST_LINES if finished.word.is_sure else FEW)


def _nothing(statements: Sequence[Statement]) -> JobEnding:
    finished = [each for each in statements if each.kind == "finished" and _is_last_word(each)]
    if finished:
        return ending_of(finished[0], finished, Culprit())
    if waiting := [each for each in statements if each.kind == "launch_failed"]:
        return ending_of(waiting[-1], waiting[::-1], named_by(waiting[-1]) if len(waiting) == 1 else Culprit())
    said = "nothing that was read says why it ended"
    return JobEnding(
        "unknown",
        said,
        evidence=tuple(each for each in statements if each.word.speaker != "register")[-MOST_EVIDENCE:],
        why_not_known=said,
    )

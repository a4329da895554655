"""Ranks known only from their flight recorder (no stack, no open collective), or on machines that were not looked at.

On gloo, recorders do not list messages between two ranks: such a rank may wait for one, compute or hang. It is not
accused of staying away if the recorders show who left the schedule, or if several ranks look like it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from bigsci_launch.spy.evidence.ranks import ELSEWHERE, NO_FILE, RankEvidence
from bigsci_launch.spy.judge.case import JobCase
from bigsci_launch.spy.judge.conclusion import Conclusion, Pointer, Reason, Side, Strength
from bigsci_launch.spy.judge.facts import UNKNOWN_STATE
from bigsci_launch.spy.judge.rules.away import is_certain
from bigsci_launch.spy.judge.rules.circle import departed
from bigsci_launch.spy.judge.rules.messages import sides_of
from bigsci_launch.spy.judge.rules.process import explain_stall
from bigsci_launch.spy.taxonomy import State
from bigsci_launch.topology.naming import agree, counted

NOT_LISTED = "their stacks: they may wait for messages from each other, which recorders do not list"
LISTED = "their stacks: they have begun nothing that has not ended, neither a collective nor a message"
IN_MESSAGES = "their stacks: recorders list messages between two ranks that have not ended"
WHERE_TO_LOOK = {
    ELSEWHERE: "their stacks: point --pid at their launchers too, or look at the whole job (--jobid)",
    NO_FILE: "their files: a missing file is not held against a rank",
}


def not_read_but_recorded(case: JobCase) -> Conclusion | None:
    """Every rank that others wait for was not read, and the recorders of the others show who left the schedule."""
    roots = _unseen_roots(case)
    if not roots:
        return None
    seen_ranks = tuple(rank for rank in case.graph.ranks if rank not in frozenset(roots))
    conclusion = departed(JobCase(case.evidence, replace(case.graph, ranks=seen_ranks)))
    return conclusion if conclusion is not None and conclusion.suspects else None


def not_read(case: JobCase) -> Conclusion | None:
    """Every rank that others wait for was not read, or was looked for nowhere."""
    roots, by_rank = _unseen_roots(case), case.by_rank
    reason = next((by_rank[rank].unreached for rank in roots if by_rank[rank].was_out_of_reach), None)
    if not roots or (len(roots) == 1 and reason is None):
        return None
    waiting = counted(case.graph.waits, "waits")
    sides = sides_of(case.graph, tuple(case.graph.waits))
    return Conclusion(
        # Ranks that were not looked at may be at work.
        state=State.UNKNOWN if reason == ELSEWHERE else State.HANG,
        claim=_claim(case, roots, waiting, were_looked_for=reason is None),
        strength=Strength.NOTHING,
        sides=sides,
        evidence=tuple(_where(case, sides)) if reason else ("none of their recorded collectives is still open",),
        missing=(WHERE_TO_LOOK[reason] if reason else _what_is_missing([by_rank[rank] for rank in roots]),),
        look_first=() if reason else tuple(_pointers(case, roots, waiting)),
    )


def _claim(case: JobCase, roots: Sequence[int], waiting: str, *, were_looked_for: bool) -> str:
    """Say what is known of the ranks that others wait for: nothing, if they were looked for nowhere."""
    names, is_one = case.evidence.names(roots), len(roots) == 1
    if were_looked_for:
        claim = f"{names} {agree('has', roots)} not reached the collectives that {waiting} in"
        return f"{claim}, and the evidence does not show where {'it is' if is_one else 'they are'}"
    reached = f"{names} {agree('has', roots)} reached the collectives that {waiting} in"
    return f"unknown whether {reached}: {'it was' if is_one else 'they were'} not read"


def _where(case: JobCase, sides: Sequence[Side]) -> Iterator[str]:
    for side in sides:
        yield f"{case.evidence.names(side.ranks)} {agree('waits', side.ranks)} in {side.where}"


def _what_is_missing(roots: Sequence[RankEvidence]) -> str:
    """What their stacks would show. NCCL's recorders list messages between two ranks, too."""
    opened = [seen.recorder.open_messages for seen in roots if seen.recorder]
    if not opened or None in opened:
        return NOT_LISTED
    return IN_MESSAGES if any(opened) else LISTED


def _pointers(case: JobCase, roots: Sequence[int], waiting: str) -> Iterator[Pointer]:
    for rank in roots:
        yield Pointer(rank, f"it has not reached the collectives that {waiting} in", Reason.AWAITED_MAYBE)


def _unseen_roots(case: JobCase) -> tuple[int, ...]:
    """The ranks that others wait for, if all of them are of this kind."""
    roots = case.graph.roots
    return roots if all(_is_unseen(case, case.by_rank[rank]) for rank in roots) else ()


def _is_unseen(case: JobCase, seen: RankEvidence) -> bool:
    if seen.was_out_of_reach:
        return True
    if seen.recorder is None or seen.threads or seen.last is None:
        return False
    return seen.last.state == UNKNOWN_STATE or not is_certain(case, explain_stall(seen), seen)

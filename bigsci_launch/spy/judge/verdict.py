"""From evidence to one verdict: every rule is weighed, one conclusion stands, and time decides whether it is a hang.

The victim is never blamed. A rank is a suspect only when others wait for it, it cannot be in a communication itself,
and its own process or its own collectives say why. Where the evidence fits either side, both sides are shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from bigsci_launch.spy.evidence.numbering import RANKS_NOT_NAMED
from bigsci_launch.spy.evidence.ranks import Evidence
from bigsci_launch.spy.judge.case import JobCase
from bigsci_launch.spy.judge.commands import ASK_RECORDER, on_node, typed
from bigsci_launch.spy.judge.conclusion import Conclusion, GracePeriod, Strength
from bigsci_launch.spy.judge.corroboration import corroborate, refine_class
from bigsci_launch.spy.judge.facts import deciding_thread_ran, elapsed_s, is_motion_known, may_be_at_work
from bigsci_launch.spy.judge.pointers import look_first
from bigsci_launch.spy.judge.rule import Weighed, resolve, weigh
from bigsci_launch.spy.judge.rules.failures import crash_loop
from bigsci_launch.spy.judge.rules.process import explain_stall, held_s
from bigsci_launch.spy.judge.table import RULES
from bigsci_launch.spy.taxonomy import State

MAX_SETTLE_S = 600
"""The longest that `--settle` takes."""
LEAST_EQUAL_STACKS = 3
"""Looks in which a rank must be at one place, where only its stack shows whether it stood still."""
ONE_LOOK = "a second look at the ranks: one look cannot show whether they are stuck"


@dataclass(frozen=True, slots=True)
class Judgment:
    """The verdict, and how every rule was weighed on the way to it."""

    conclusion: Conclusion
    weighed: tuple[Weighed, ...]


def judge(evidence: Evidence) -> Conclusion:
    """Return the verdict on `evidence`. Pure: the same evidence gives the same verdict."""
    return deliberate(evidence).conclusion


def deliberate(evidence: Evidence) -> Judgment:
    """Return the verdict on `evidence`, with every rule as it was weighed."""
    case = JobCase.of(evidence)
    weighed = weigh(case, RULES)
    # What a launcher repeats is no state of a moment: it comes before everything that a moment shows.
    found = (
        crash_loop(case)
        or resolve(weighed, evidence)
        or Conclusion(State.UNKNOWN, "the evidence does not show what the ranks wait for", Strength.NOTHING)
    )
    conclusion = corroborate(refine_class(found, evidence), evidence)
    conclusion = replace(conclusion, look_first=look_first(case, conclusion))
    return Judgment(_complete(temper(case, conclusion), case), weighed)


def temper(case: JobCase, conclusion: Conclusion) -> Conclusion:
    """Return what may be concluded of a hang so far. After one look, only what would be true if the job hangs; while it
    has not stood still for long enough, that it waits. Neither accuses a rank."""
    if conclusion.state is not State.HANG:
        return conclusion
    if not case.was_seen_twice:
        claim = f"if this job hangs: {conclusion.claim}"
        missing = (ONE_LOOK, *conclusion.missing)
        return replace(
            conclusion,
            state=State.UNKNOWN,
            claim=claim,
            strength=Strength.GUESS,
            suspects=(),
            missing=missing,
            if_hang=conclusion,
        )
    if _has_stood_still(case, conclusion):
        return conclusion
    wanted_s, known_s = _stillness(case, conclusion)
    return replace(
        conclusion,
        state=State.WAITING,
        claim=f"{conclusion.claim}; this may still end by itself",
        strength=min(conclusion.strength, Strength.DERIVED, key=lambda strength: strength.level),
        suspects=(),
        missing=(f"whether it lasts: {_stillness_text(case, conclusion)}", *conclusion.missing),
        next=(_look_longer(case, conclusion), *conclusion.next),
        hang_in_s=wanted_s - known_s if known_s else None,
        if_hang=conclusion,
    )


def _ranks_in_question(case: JobCase, conclusion: Conclusion) -> tuple[int, ...]:
    """The accused; without them the ranks that others wait for, else all that wait."""
    accused = tuple(suspect.rank for suspect in conclusion.suspects)
    return accused or tuple(seen.rank for seen in case.roots) or tuple(case.graph.waits) or _all_alive(case)


def _all_alive(case: JobCase) -> tuple[int, ...]:
    return tuple(seen.rank for seen in case.alive)


def _has_stood_still(case: JobCase, conclusion: Conclusion) -> bool:
    """Whether the job has stood still for as long as the conclusion asks for."""
    grace, ranks = conclusion.grace, _ranks_in_question(case, conclusion)
    if grace is GracePeriod.NONE:
        return True
    if any(may_be_at_work(case.by_rank[rank]) for rank in ranks if rank not in case.graph.waits):
        return False
    if not _shows_stillness(case, ranks):
        return False
    if grace.asleep_s is not None and _asleep_s(case, ranks) >= grace.asleep_s:
        return True
    return _late_s(case, conclusion, ranks) >= grace.late_s


def _shows_stillness(case: JobCase, ranks: Sequence[int]) -> bool:
    """Whether something shows that `ranks` did not run, or stacks were equal often enough: in two looks, a healthy job
    is easily found at one place. For unreached ranks, those that wait for them show it."""
    reached = [rank for rank in ranks if case.by_rank[rank].samples]
    seen = [case.by_rank[rank] for rank in reached or case.graph.waits]
    return all(is_motion_known(each) or len(each.samples) >= LEAST_EQUAL_STACKS for each in seen)


def _asleep_s(case: JobCase, ranks: Sequence[int]) -> float:
    """For how many seconds none of `ranks`, or none of the children that hold them up, has run."""
    return max(case.asleep_s(ranks), min((held_s(case.by_rank[rank]) for rank in ranks), default=0.0))


def _late_s(case: JobCase, conclusion: Conclusion, ranks: Sequence[int]) -> float:
    """For how many seconds others have waited for `ranks`, or these have waited for each other."""
    if conclusion.suspects or not all(rank in case.graph.waits for rank in ranks):
        return case.late_s(ranks)
    return case.stood_s(ranks)


def _stillness_text(case: JobCase, conclusion: Conclusion) -> str:
    ranks = _ranks_in_question(case, conclusion)
    known = max(case.asleep_s(ranks), case.late_s(ranks), case.stood_s(ranks))
    doubt = "" if _shows_stillness(case, ranks) else "; two identical stacks do not prove that a rank is stuck"
    return (f"the evidence covers {known:.0f} s" if known >= 1 else "the evidence covers less than a second") + doubt


def _look_longer(case: JobCase, conclusion: Conclusion) -> str:
    """The command that looks for as long as is missing."""
    grace = conclusion.grace
    wanted, known = _stillness(case, conclusion)
    seconds = max(10, 10 * ceil((wanted - known) / 10))
    if case.evidence.is_from_files:
        return f"py-spy dump  # again for each rank, {grace.late_s:.0f} s after the first or later"
    if seconds > MAX_SETTLE_S:
        return f"bsl spy  # again in {ceil(seconds / 60)} min: if nothing moves until then, it is a hang"
    return f"bsl spy --settle {seconds}  # if nothing moves until then, it is a hang"


def _stillness(case: JobCase, conclusion: Conclusion) -> tuple[float, float]:
    """(for how many seconds the ranks must stand still, for how many they have). Only what the kernel's own clock shows
    counts as seen: a new look begins from there, and not from the looks of this one."""
    grace, ranks = conclusion.grace, _ranks_in_question(case, conclusion)
    if grace.asleep_s is None or any(deciding_thread_ran(case.by_rank[rank]) for rank in ranks):
        wanted, known = grace.late_s, _late_s(case, conclusion, ranks)
    else:
        wanted, known = grace.asleep_s, _asleep_s(case, ranks)
    looked = max((elapsed_s(case.by_rank[rank]) or 0.0 for rank in case.graph.ranks), default=0.0)
    return wanted, known if known > looked else 0.0


def _complete(conclusion: Conclusion, case: JobCase) -> Conclusion:
    """Add what any verdict may miss, and the next command."""
    evidence = case.evidence
    missing = [*evidence.steps_left_out, *conclusion.missing]
    unreadable = [seen.rank for seen in evidence.ranks if seen.why_unreadable]
    if unreadable:
        missing.append(f"the stacks of {evidence.names(unreadable)}")
        missing += evidence.problems[:2]
    if evidence.topology is None:
        missing += [problem for problem in evidence.problems if RANKS_NOT_NAMED in problem]
    if conclusion.state in (State.HANG, State.WAITING, State.UNKNOWN):
        missing += _missing_recorders(case)
        if evidence.topology is None:
            groups = "" if _list_groups(case) else ", and which ranks form a group"
            missing.append(f"coordinates{groups}: give --topology tp=..,pp=..,dp=..")
    said = conclusion.evidence
    if conclusion.state in (State.HANG, State.WAITING, State.UNKNOWN):
        said = (*said, *_printed(evidence))
    next_steps = conclusion.next or _next_commands(conclusion, evidence)
    next_steps = tuple(typed(line, evidence) for line in next_steps)
    return replace(conclusion, evidence=said, missing=tuple(dict.fromkeys(missing)), next=next_steps)


def _list_groups(case: JobCase) -> bool:
    """Whether the recorders list the members of every group that they have used."""
    recorders = [seen.recorder for seen in case.alive if seen.recorder]
    return bool(recorders) and all(
        recorder.members and recorder.members.keys() >= recorder.last_sequence.keys() for recorder in recorders
    )


def _printed(evidence: Evidence) -> tuple[str, ...]:
    """What ranks have printed during the look. It may be progress, or a loop that waits: who reads it knows."""
    if not evidence.printed:
        return ()
    first, ranks = evidence.printed[0], [each.rank for each in evidence.printed]
    lines = "1 line" if first.num_lines == 1 else f"{first.num_lines} lines"
    if len(ranks) > 1:
        last = f"the last line of {evidence.short_name(first.rank)}: {first.last}"
        return (f"{evidence.names(ranks)} have printed during the look; {last}",)
    return (f"{evidence.names(ranks)} has printed {lines} during the look, the last: {first.last}",)


def _missing_recorders(case: JobCase) -> list[str]:
    """What recorders do not show: those that are missing, and members of groups that none of them lists."""
    without = [seen.rank for seen in case.alive if not seen.recorder]
    if not any(seen.recorder for seen in case.evidence.ranks):
        return ["sequence numbers of collectives: no rank has a flight recorder that can be read"]
    missing = [f"the flight recorder of {case.evidence.names(without)}"] if without else []
    groups = sorted({wait.call.token.group for wait in case.graph.waits.values() if wait.is_assumed and wait.call})
    if groups:
        which = f"group {groups[0]}" if len(groups) == 1 else f"groups {', '.join(groups)}"
        missing.append(f"the members of {which}: no recorder lists them, so they are assumed")
    return missing


def _next_commands(conclusion: Conclusion, evidence: Evidence) -> tuple[str, ...]:
    if conclusion.state is State.HANG and not conclusion.suspects and not any(seen.recorder for seen in evidence.ranks):
        return (ASK_RECORDER,)
    if conclusion.state in (State.PROGRESSING, State.FINISHED) or not conclusion.suspects:
        return ()
    seen = next(seen for seen in evidence.ranks if seen.rank == conclusion.suspects[0].rank)
    if seen.is_gone or seen.pid is None or seen.last is None:
        return ()
    return (explain_stall(seen).next or on_node(seen.node, f"py-spy dump --native --pid {seen.pid}"),)

"""The results of phases, from what attempts have shown. Pure: the same evidence gives the same result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from bigsci_launch.rehearse.evidence import AttemptEvidence, StepSeen
from bigsci_launch.rehearse.phases import (
    EVALUATION,
    KILL,
    RESUME_AFTER_KILL,
    RESUME_AFTER_STOP,
    SAVE,
    STEPS,
    STOP,
    Outcome,
    PhaseResult,
)
from bigsci_launch.runs.generations.records import Generations, recoveries
from bigsci_launch.runs.generations.recovery_text import SOURCES, back_text

SIGKILL_CODE = 137
REPEATABLE = 1e-3
"""Relative difference of losses that repeated steps may have on GPUs, whose sums have no fixed order."""
NO_LINES = "the program prints no iteration lines"


def judge_steps(evidence: AttemptEvidence, seconds: float) -> PhaseResult:
    """Return whether steps were made with finite losses."""
    if not evidence.steps:
        return PhaseResult(STEPS, "not checked", seconds, (NO_LINES,))
    infinite = [step for step in evidence.steps if step.loss is not None and not math.isfinite(step.loss)]
    if infinite:
        text = f"the loss of step {infinite[0].step} is {infinite[0].loss}"
        return PhaseResult(STEPS, "failed", seconds, (text,))
    losses = [step for step in evidence.steps if step.loss is not None]
    first, last = evidence.steps[0], evidence.steps[-1]
    said = [f"steps {first.step}-{last.step}"]
    said.append(f"loss {losses[0].loss:.6g} -> {losses[-1].loss:.6g}" if losses else "the losses are not printed")
    if (step_s := step_time_s(evidence.steps)) is not None:
        said.append(f"{step_s:.3g} s per step")
    return PhaseResult(STEPS, "ok" if losses else "not checked", seconds, tuple(said))


def step_time_s(steps: Sequence[StepSeen]) -> float | None:
    """Return the median seconds of a step, without the first, which compiles and allocates."""
    known = [step.seconds for step in steps[1:] if step.seconds is not None]
    return median(known) if known else None


def longest(seconds: Mapping[int, float | None]) -> float | None:
    """Return the longest of the times that were measured."""
    return max((each for each in seconds.values() if each is not None), default=None)


def judge_evaluation(evidence: AttemptEvidence, *, is_asked: bool, seconds: float) -> PhaseResult:
    """Return whether an evaluation was seen; `is_asked` is whether the run has any that bsl knows of."""
    if evidence.evaluations:
        took = longest(evidence.evaluations)
        said = f"after step {min(evidence.evaluations)}" + (f", in {took:.3g} s" if took is not None else "")
        return PhaseResult(EVALUATION, "ok", took, (said,))
    if evidence.is_recorded and not is_asked:
        said = "the run has none (monitor.eval_interval, data.held_out)"
        return PhaseResult(EVALUATION, "none", None, (said,))
    if evidence.is_recorded:
        return PhaseResult(EVALUATION, "failed", seconds, (f"none in {evidence.last_step} steps",))
    return PhaseResult(EVALUATION, "not checked", None, ("the program printed no validation loss so far",))


def judge_save(evidence: AttemptEvidence, seconds: float) -> PhaseResult:
    """Return whether a checkpoint was saved."""
    if evidence.saves:
        took = longest(evidence.saves)
        said = f"after step {min(evidence.saves)}" + (f", in {took:.3g} s" if took is not None else "")
        return PhaseResult(SAVE, "ok", took, (said,))
    if evidence.is_recorded:
        return PhaseResult(SAVE, "failed", seconds, (f"none in {evidence.last_step} steps",))
    return PhaseResult(SAVE, "not checked", None, ("no checkpoint of the program is visible so far",))


def judge_teardown(
    victim: int, ending: Mapping[str, Any] | None, teardown_s: float | None, limit_s: float
) -> PhaseResult:
    """Return whether the kill of rank `victim` ended the attempt as a crash of that rank, with its exit code."""
    if teardown_s is None:
        still = "the attempt has ended, but not its job" if ending else "the attempt still runs"
        return PhaseResult(KILL, "failed", limit_s, (f"{still} {limit_s:g} s after rank {victim} was killed",))
    if ending is None:
        text = "the job is over, but left no exit.json: unknown which rank failed first"
        return PhaseResult(KILL, "failed", teardown_s, (text,))
    first = ending.get("first_failure") or {}
    found = (ending["reason"], first.get("rank"), first.get("signal"), ending.get("exit_code"))
    if found != ("crashed", victim, "SIGKILL", SIGKILL_CODE):
        text = f"rank {victim} was killed, but the attempt ended differently: {ending_text(ending)}"
        return PhaseResult(KILL, "failed", teardown_s, (text,))
    said = f"rank {victim} killed: {ending_text(ending)}, {teardown_s:.1f} s later"
    return PhaseResult(KILL, "ok", teardown_s, (said,))


def judge_survival(
    victim: int, found: Generations | None, ending: Mapping[str, Any] | None, seconds: float
) -> PhaseResult:
    """Return whether a run with `survive` has continued in a new generation after the kill of rank `victim`."""
    came_back = recoveries(found) if found is not None else []
    if found is None or not came_back or found.is_recovering or ending is not None:
        still = f"it ended: {ending_text(ending)}" if ending else f"it has not continued within {seconds:.0f} s"
        why = f" ({found.gave_up})" if found is not None and found.gave_up else ""
        return PhaseResult(KILL, "failed", seconds, (f"rank {victim} was killed: {still}{why}",))
    first = came_back[0]
    said = f"rank {victim} killed: {back_text(first, has_phases=found.have_phases)}"
    source = (f"continued {SOURCES.get(first.source, first.source)}",) if first.source else ()
    return PhaseResult(KILL, "ok", seconds, (said, *source))


def with_left_over(
    result: PhaseResult, left: Sequence[str], looked: Sequence[str], nodes: Sequence[str]
) -> PhaseResult:
    """Return the result of the kill, with what was found on the nodes later."""
    unseen = [] if looked == ["this machine"] else [node for node in nodes if node not in looked]
    said = [f"still running, and now killed: {', '.join(left)}"] if left else []
    said += ["no process left"] if looked and not left else []
    said += [f"not checked for processes that are left: {', '.join(unseen)}"] if unseen else []
    outcome: Outcome = "failed" if left else result.outcome
    return PhaseResult(result.name, outcome, result.seconds, (*result.evidence, *said))


def judge_resume_after_kill(
    before: AttemptEvidence, after: AttemptEvidence, seconds: float, *, saved: int, tolerance: float
) -> PhaseResult:
    """Return whether the attempt resumed from the saved step, and repeated the losses of the steps after it.

    `before` is the attempt that was killed: it made steps after its last save. `saved` is 0 if no save was seen.
    """
    if (wrong := _wrong_start(after, saved, RESUME_AFTER_KILL, seconds)) is not None:
        return wrong
    said = [_start_text(after, saved)]
    old = {step.step: step for step in before.steps}
    pairs = [(old[step.step], step) for step in after.steps if step.step in old]
    pairs = [(one, other) for one, other in pairs if _is_finite(one) and _is_finite(other)]
    if not pairs:
        said.append("the killed attempt printed no loss of a step after the save, so none could be compared")
        return PhaseResult(RESUME_AFTER_KILL, "not checked", seconds, tuple(said))
    apart = max(_difference(one, other) for one, other in pairs)
    names = f"steps {pairs[0][0].step}-{pairs[-1][0].step}" if len(pairs) > 1 else f"step {pairs[0][0].step}"
    if all(one.exact == other.exact for one, other in pairs):
        same = "to the last bit" if after.is_recorded else "to the last printed digit"
        return PhaseResult(RESUME_AFTER_KILL, "ok", seconds, (*said, f"losses of {names} are equal {same}"))
    text = f"losses of {names} differ from those before the kill by up to {100 * apart:.2g} %"
    if apart <= tolerance:
        return PhaseResult(RESUME_AFTER_KILL, "ok", seconds, (*said, f"{text}, within {100 * tolerance:g} %"))
    return PhaseResult(RESUME_AFTER_KILL, "failed", seconds, (*said, text))


def judge_resume_after_stop(
    before: AttemptEvidence, after: AttemptEvidence, seconds: float, *, saved: int
) -> PhaseResult:
    """Return whether the attempt resumed from the step that was saved at the stop."""
    if (wrong := _wrong_start(after, saved, RESUME_AFTER_STOP, seconds)) is not None:
        return wrong
    said = [_start_text(after, saved)]
    first, last = after.steps[0], before.steps[-1] if before.steps else None
    if first.loss is None or last is None or last.loss is None:
        return PhaseResult(RESUME_AFTER_STOP, "not checked", seconds, (*said, "the losses are not printed"))
    said.append(f"loss {last.loss:.6g} before, {first.loss:.6g} after")
    return PhaseResult(RESUME_AFTER_STOP, "ok" if math.isfinite(first.loss) else "failed", seconds, tuple(said))


def _wrong_start(after: AttemptEvidence, saved: int, name: str, seconds: float) -> PhaseResult | None:
    """Return the result of a resume from another step than the saved one; None if it is the right one."""
    if not after.steps:
        return PhaseResult(name, "not checked", seconds, (NO_LINES,))
    first, loaded = after.steps[0].step, after.loaded
    if not saved:
        return PhaseResult(name, "not checked", seconds, (f"no save was seen; it began with step {first}",))
    if first == saved + 1 and loaded in (None, saved):
        return None
    from_step = f"loaded step {loaded} and " if loaded is not None else ""
    text = f"it {from_step}began with step {first}, although step {saved} was saved"
    return PhaseResult(name, "failed", seconds, (text,))


def _start_text(after: AttemptEvidence, saved: int) -> str:
    return f"from step {saved}, next step {after.steps[0].step}"


def _is_finite(step: StepSeen) -> bool:
    return step.loss is not None and math.isfinite(step.loss)


def _difference(one: StepSeen, other: StepSeen) -> float:
    assert one.loss is not None and other.loss is not None, "the caller has left them out"
    return abs(one.loss - other.loss) / max(abs(one.loss), 1e-12)


def judge_stop(
    evidence: AttemptEvidence, ending: Mapping[str, Any] | None, stop_s: float | None, margin_s: float, saved: int
) -> PhaseResult:
    """Return whether the attempt saved and ended within the exit margin after it was asked to stop at step `saved`+."""
    if stop_s is None:
        text = f"it still ran {margin_s:g} s after it was asked to stop, which is the exit margin of the run"
        return PhaseResult(STOP, "failed", margin_s, (text,))
    if ending is None or ending.get("exit_code") != 0 or ending["reason"] not in ("stopped", "finished"):
        said = ending_text(ending) if ending else "it left no exit.json"
        return PhaseResult(STOP, "failed", stop_s, (f"it did not end as asked: {said}",))
    took = f"in {stop_s:.1f} s; the exit margin is {margin_s:g} s"
    if evidence.last_save > saved or (evidence.is_recorded and evidence.last_save == evidence.last_step):
        return PhaseResult(STOP, "ok", stop_s, (f"saved step {evidence.last_save} and ended {took}",))
    if evidence.is_recorded:
        text = f"it ended {took}, without a save of step {evidence.last_step}"
        return PhaseResult(STOP, "failed", stop_s, (text,))
    return PhaseResult(STOP, "not checked", stop_s, (f"it ended {took}, but no save is visible",))


def ending_text(ending: Mapping[str, Any]) -> str:
    """Return why an attempt ended, on one line: `crashed, exit code 137, first failure rank 3 on n1: SIGKILL`."""
    text = f"{ending['reason']}, exit code {ending.get('exit_code')}"
    if first := ending.get("first_failure"):
        text += f", first failure rank {first.get('rank')} on {first.get('node')}"
        words = first.get("error") or first.get("signal") or f"exit code {first.get('code')}"
        text += f": {words}"
    elif ending.get("cause"):
        text += f": {ending['cause']}"
    return text

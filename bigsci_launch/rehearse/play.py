"""Plays a rehearsal: three attempts of one small run.

The first makes steps, evaluates, saves, and loses a rank. The second resumes from the save, repeats the steps that the
first made after it, and is asked to stop. The third resumes from where the second stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from bigsci_launch.errors import BslError
from bigsci_launch.progress import Report
from bigsci_launch.rehearse.attempt import RunningAttempt, Waited
from bigsci_launch.rehearse.evidence import AttemptEvidence
from bigsci_launch.rehearse.judge import (
    ending_text,
    judge_evaluation,
    judge_resume_after_kill,
    judge_resume_after_stop,
    judge_save,
    judge_steps,
    judge_stop,
    judge_survival,
    judge_teardown,
    longest,
    step_time_s,
    with_left_over,
)
from bigsci_launch.rehearse.limits import RehearsalLimits
from bigsci_launch.rehearse.phases import (
    KILL,
    PHASES,
    RESUME_AFTER_KILL,
    RESUME_AFTER_STOP,
    SAVE,
    START,
    STEPS,
    STOP,
    Measured,
    PhaseResult,
    Played,
)
from bigsci_launch.rehearse.reduce import SAVE_INTERVAL
from bigsci_launch.runs.generations.read import read_generations
from bigsci_launch.scheduler.job import JobInfo
from bigsci_launch.scheduler.waiting import meaning_of
from bigsci_launch.topology import compress_ranks
from bigsci_launch.units import format_age

FIRST_STEPS = 3
STEPS_AFTER_SAVE = 2
STEPS_AFTER_RESUME = 3
GONE_S = 120.0
"""How long a job may be completing after its script has ended."""


class Rehearsal:
    """One rehearsal. `start` submits its next attempt, `tell` reports what happens."""

    def __init__(
        self,
        start: Callable[[], RunningAttempt],
        limits: RehearsalLimits,
        tell: Report,
        *,
        has_evaluation: bool,
        tolerance: float,
        saves_on_interval: bool,
        survives: bool,
    ) -> None:
        self._start = start
        self._limits = limits
        self._tell = tell
        self._has_evaluation = has_evaluation
        self._tolerance = tolerance
        self._saves_on_interval, self._survives = saves_on_interval, survives
        self._results: dict[str, PhaseResult] = {}
        self._current: RunningAttempt | None = None
        self._first: AttemptEvidence | None = None
        self._second: AttemptEvidence | None = None
        self._never_started: str | None = None

    def play(self, *, slower_by: float, unchecked: tuple[str, ...]) -> Played:
        """Play all phases that can be played and return their results. Whatever happens, no attempt is left running.

        Raises:
            BslError: the first attempt was refused.
            KeyboardInterrupt: the user ended it.
        """
        try:
            _ = self._steps_and_kill() and self._resume_and_stop() and self._resume_again()
        except BaseException:
            self._end_current("interrupted: ending")
            raise
        self._end_current("ending")
        phases = tuple(self._results.get(name) or self._unplayed(name) for name in PHASES)
        return Played(phases, self._measured(slower_by), unchecked, self._never_started)

    def _steps_and_kill(self) -> bool:
        attempt = self._submit(START)
        if attempt is None or not self._wait_for_ranks(attempt, START):
            return False
        began = time.monotonic()
        if not self._wait_for_steps(attempt, began):
            return False
        waited, evidence = self._wait_for_save(attempt)
        self._first, seconds = evidence, time.monotonic() - began
        self._note(judge_steps(evidence, seconds))
        self._note(judge_evaluation(evidence, is_asked=self._has_evaluation, seconds=seconds))
        if waited == "ended" and not evidence.saves:
            return self._fail_end(SAVE, attempt, seconds)
        self._note(judge_save(evidence, seconds))
        return self._fail_end(STEPS, attempt, seconds) if waited == "ended" else self._kill(attempt)

    def _wait_for_steps(self, attempt: RunningAttempt, began: float) -> bool:
        limits = self._limits
        limit_s = limits.first_step_s + (FIRST_STEPS - 1) * limits.step_s
        waited, evidence = attempt.wait(lambda seen: len(seen.steps) >= FIRST_STEPS, limit_s)
        if waited == "held" or (waited == "late" and not evidence.is_recorded and not evidence.steps):
            return True
        if waited == "ended":
            return self._fail_end(STEPS, attempt, time.monotonic() - began)
        text = f"{len(evidence.steps)} steps in {limit_s:g} s; it is being ended: `bsl logs {attempt.run.path}`"
        return self._fail(STEPS, limit_s, text)

    def _wait_for_save(self, attempt: RunningAttempt) -> tuple[Waited, AttemptEvidence]:
        """Wait for the save, and for steps after it. When another program saves is not known."""
        if not self._saves_on_interval:
            return "held", attempt.evidence()
        limit_s = SAVE_INTERVAL * self._limits.step_s + self._limits.save_s
        return attempt.wait(lambda seen: seen.last_step - STEPS_AFTER_SAVE >= seen.last_save > 0, limit_s)

    def _kill(self, attempt: RunningAttempt) -> bool:
        victim = attempt.evidence().ranks[-1]
        began = time.monotonic()
        if (refused := attempt.kill(victim)) is not None:
            return self._note(PhaseResult(KILL, "not checked", None, (f"rank {victim.rank}: {refused}",)))
        if self._survives:
            return self._see_survive(attempt, victim.rank)
        attempt.wait_for_ending(self._limits.teardown_s)
        gone_s = attempt.wait_for_end(max(0.0, self._limits.teardown_s - (time.monotonic() - began)))
        teardown_s = None if gone_s is None else time.monotonic() - began
        self._first = attempt.evidence()
        result = judge_teardown(victim.rank, attempt.ending(), teardown_s, self._limits.teardown_s)
        if attempt.is_local and teardown_s is not None:
            result = with_left_over(result, *attempt.end_left_over(attempt.attempt.name), ())
        self._note(result)
        return self._end_current("ending")

    def _see_survive(self, attempt: RunningAttempt, victim: int) -> bool:
        """Wait until the ranks that are left continue, and end the attempt: the next one begins from its save."""
        began = time.monotonic()
        attempt.wait(lambda _: attempt.has_recovered(), self._limits.teardown_s)
        found, seconds = read_generations(attempt.attempt), time.monotonic() - began
        self._note(judge_survival(victim, found, attempt.ending(), seconds))
        return self._end_current("ending")

    def _resume_and_stop(self) -> bool:
        before = self._first
        began = time.monotonic()
        attempt = self._submit(RESUME_AFTER_KILL)
        if before is None or attempt is None or not self._wait_for_ranks(attempt, RESUME_AFTER_KILL):
            return False
        evidence = self._wait_for_resumed(attempt, RESUME_AFTER_KILL, began)
        if evidence is None:
            return False
        if not attempt.is_local and (killed := self._results.get(KILL)) is not None and killed.outcome != "not checked":
            name = attempt.run.attempts()[0].name
            self._results[KILL] = with_left_over(killed, *attempt.end_left_over(name), before.nodes)
        saved = before.last_save
        seconds = time.monotonic() - began
        self._note(judge_resume_after_kill(before, evidence, seconds, saved=saved, tolerance=self._tolerance))
        return self._stop(attempt, saved)

    def _stop(self, attempt: RunningAttempt, saved: int) -> bool:
        margin_s, began = self._limits.stop_s, time.monotonic()
        try:
            attempt.request_stop()
        except BslError as error:
            return self._note(PhaseResult(STOP, "not checked", None, (error.message,)))
        attempt.wait_for_ending(margin_s)
        ending, seconds = attempt.ending(), time.monotonic() - began
        self._second = evidence = attempt.evidence()
        is_late = ending is None and not attempt.is_over()
        result = judge_stop(evidence, ending, None if is_late else seconds, margin_s, saved)
        self._note(result)
        attempt.wait_for_end(0.0 if is_late else GONE_S)
        return self._end_current("ending") and result.outcome == "ok"

    def _resume_again(self) -> bool:
        before = self._second
        began = time.monotonic()
        attempt = self._submit(RESUME_AFTER_STOP)
        if before is None or attempt is None or not self._wait_for_ranks(attempt, RESUME_AFTER_STOP):
            return False
        evidence = self._wait_for_resumed(attempt, RESUME_AFTER_STOP, began)
        if evidence is None:
            return False
        seconds = time.monotonic() - began
        self._note(judge_resume_after_stop(before, evidence, seconds, saved=before.last_save))
        return True

    def _submit(self, phase: str) -> RunningAttempt | None:
        try:
            attempt = self._start()
        except BslError as error:
            if phase == START:
                raise
            self._fail(phase, 0.0, error.message)
            return None
        self._current = attempt
        self._tell(f"{attempt.label}: {phase}")
        return attempt

    def _wait_for_ranks(self, attempt: RunningAttempt, phase: str) -> bool:
        """Wait for nodes and then for all ranks. The seconds of `start` are those from the nodes to the last rank."""
        began = time.monotonic()
        job = attempt.wait_for_nodes(self._limits.pending_s, lambda job: self._tell_job(job))
        queued_s = time.monotonic() - began
        if job.state.is_queued:
            self._never_started = f"{attempt.label} never started: {_pending_text(job)}, after {format_age(queued_s)}"
            self._note(PhaseResult(phase, "not checked", None, (self._never_started,)))
            return False
        began = time.monotonic()
        waited, evidence = attempt.wait(lambda seen: len(seen.ranks) == attempt.num_ranks, self._limits.ranks_s)
        seconds = time.monotonic() - began
        if waited == "ended":
            return self._fail_end(phase, attempt, seconds)
        if waited == "late":
            missing = set(range(attempt.num_ranks)) - {rank.rank for rank in evidence.ranks}
            return self._fail(phase, seconds, f"ranks {compress_ranks(missing)} had not started after {seconds:.0f} s")
        if phase == START:
            queued = () if attempt.is_local else (f"{format_age(queued_s)} in the queue",)
            said = f"{attempt.num_ranks} ranks on {', '.join(evidence.nodes)}"
            self._note(PhaseResult(START, "ok", seconds, (said, *queued)))
        return True

    def _wait_for_resumed(self, attempt: RunningAttempt, phase: str, began: float) -> AttemptEvidence | None:
        prints_steps = self._first is not None and self._first.steps
        limits = self._limits
        limit_s = limits.first_step_s + STEPS_AFTER_RESUME * limits.step_s if prints_steps else limits.step_s
        waited, evidence = attempt.wait(lambda seen: len(seen.steps) >= STEPS_AFTER_RESUME, limit_s)
        if waited == "ended":
            self._fail_end(phase, attempt, time.monotonic() - began)
            return None
        if waited == "late" and evidence.is_recorded:
            self._fail(phase, limit_s, f"{len(evidence.steps)} steps in {limit_s:g} s")
            return None
        return evidence

    def _fail_end(self, phase: str, attempt: RunningAttempt, seconds: float) -> bool:
        """Note that an attempt ended by itself. Always False."""
        attempt.wait_for_ending(GONE_S if not attempt.is_over() else 0.0)
        ending: dict[str, Any] | None = attempt.ending()
        job = attempt.job()
        text = ending_text(ending) if ending else f"{job.state.value} ({job.reason or 'it left no exit.json'})"
        return self._fail(phase, seconds, f"the attempt ended by itself: {text}")

    def _fail(self, phase: str, seconds: float, text: str) -> bool:
        """Note that a phase failed. Always False."""
        self._note(PhaseResult(phase, "failed", seconds, (text,)))
        return False

    def _note(self, result: PhaseResult) -> bool:
        """Keep a result. Always True."""
        self._results[result.name] = result
        seconds = "" if result.seconds is None else f" {result.seconds:.1f} s:"
        self._tell(f"{result.name}: {result.outcome},{seconds} {'; '.join(result.evidence)}")
        return True

    def _tell_job(self, job: JobInfo) -> None:
        if job.state.is_queued:
            self._tell(f"job {job.job_id} waits: {_pending_text(job)}")

    def _end_current(self, why: str) -> bool:
        """End the attempt that runs, if one does; return whether none is left."""
        attempt, self._current = self._current, None
        if attempt is None:
            return True
        left = None
        if not attempt.has_gone():
            self._tell(f"{why} {attempt.label}")
            left = attempt.try_to_end()
            if left is None:
                self._tell(f"{attempt.label} has ended")
        if left is not None:
            self._tell(f"warning: {left}")
        elif attempt.is_local and (stray := attempt.end_left_over(attempt.attempt.name)[0]):
            self._tell(f"left behind, and now killed: {', '.join(stray)}")
        return left is None

    def _unplayed(self, name: str) -> PhaseResult:
        failed = next((phase for phase in PHASES if self._is_last_played(phase)), START)
        return PhaseResult(name, "not checked", None, (f"the rehearsal ended at: {failed}",))

    def _is_last_played(self, name: str) -> bool:
        return name in self._results and not any(later in self._results for later in PHASES[PHASES.index(name) + 1 :])

    def _measured(self, slower_by: float) -> Measured:
        seen = [evidence for evidence in (self._first, self._second) if evidence is not None]
        steps = [step for evidence in seen for step in evidence.steps[1:]]
        killed, stopped = self._results.get(KILL), self._results.get(STOP)
        return Measured(
            step_s=step_time_s(steps),
            save_s=longest({number: longest(evidence.saves) for number, evidence in enumerate(seen)}),
            eval_s=longest({number: longest(evidence.evaluations) for number, evidence in enumerate(seen)}),
            teardown_s=killed.seconds if killed and killed.outcome == "ok" else None,
            stop_s=stopped.seconds if stopped and stopped.outcome == "ok" else None,
            slower_by=slower_by,
        )


def _pending_text(job: JobInfo) -> str:
    meaning = meaning_of(job)
    return f"{job.state.value} ({job.reason or 'no reason given'})" + (f": {meaning}" if meaning else "")

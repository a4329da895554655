"""What a rehearsal found, as values: one result for each phase, and the verdict on all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["ok", "failed", "not checked", "none"]
"""`none`: the run has no such phase, as a run without evaluations."""
Decision = Literal["go", "no-go", "unknown"]

START, STEPS, EVALUATION, SAVE = "start", "steps", "evaluation", "save"
KILL, RESUME_AFTER_KILL, STOP, RESUME_AFTER_STOP = "kill a rank", "resume after kill", "stop", "resume after stop"
PHASES = (START, STEPS, EVALUATION, SAVE, KILL, RESUME_AFTER_KILL, STOP, RESUME_AFTER_STOP)
"""In the order in which they are played. The kill comes first, so that the resumed attempt repeats steps of one that
was not disturbed: only then can their losses be compared."""


@dataclass(frozen=True, slots=True)
class PhaseResult:
    """One phase: its outcome, its seconds (None if it was not measured), and what was seen."""

    name: str
    outcome: Outcome
    seconds: float | None
    evidence: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds that were measured; None where nothing was. `slower_by` is how many times longer a step of the whole run
    takes, by its micro batches."""

    step_s: float | None = None
    save_s: float | None = None
    eval_s: float | None = None
    teardown_s: float | None = None
    stop_s: float | None = None
    slower_by: float = 1.0


@dataclass(frozen=True, slots=True)
class Played:
    """All phases of a rehearsal, what else was not checked, and why it never started, if so."""

    phases: tuple[PhaseResult, ...]
    measured: Measured
    more_unchecked: tuple[str, ...] = ()
    never_started: str | None = None

    @property
    def not_checked(self) -> tuple[str, ...]:
        """Everything that was not checked, one sentence each."""
        found = [
            f"{phase.name}: {'; '.join(phase.evidence)}" for phase in self.phases if phase.outcome == "not checked"
        ]
        return (*found, *self.more_unchecked)

    @property
    def decision(self) -> Decision:
        return decide(self.phases, has_started=self.never_started is None)


def decide(phases: Sequence[PhaseResult], *, has_started: bool) -> Decision:
    """Return `no-go` if a phase failed. A job that never started proves nothing about the run."""
    if any(phase.outcome == "failed" for phase in phases):
        return "no-go"
    return "go" if has_started else "unknown"

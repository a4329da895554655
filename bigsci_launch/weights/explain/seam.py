"""Measures the jump of the loss at a restart, relative to its usual movement from step to step."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigsci_launch.errors import BslError, CheckpointError
from bigsci_launch.iteration_line import parse_iterations
from bigsci_launch.weights.compare.comparison import WeightsFinding
from bigsci_launch.weights.files.tensors import os_reason

# Number of steps before the restart used to estimate the loss's usual movement from step to step.
RECENT = 20
MIN_CHANGES = 4
JUMP_SPREADS = 4.0
# Relative difference of the first loss in bf16 when a run continues with another topology.
ROUNDING = 1e-4
# Median absolute deviation of a normal distribution, as a multiple of its standard deviation.
MAD = 0.6745


@dataclass(frozen=True, slots=True)
class Iteration:
    """One line of a log: the loss of a step, and how long it took, in seconds."""

    step: int
    loss: float
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Seam:
    """How the loss changes where log B continues log A: at `step`, the first step of B.

    `jump` is B's loss at `step` minus A's loss there if A has that step (`is_overlap`), otherwise minus A's last loss
    plus its trend. `spread` is the standard deviation of A's recent changes per step, None if there are too few.
    """

    step: int
    loss_before: float
    loss_after: float
    jump: float
    spread: float | None
    is_overlap: bool
    num_equal: int
    num_overlapping: int
    seconds_before: float | None
    seconds_after: float | None

    @property
    def spreads(self) -> float | None:
        """The jump in units of the spread; None if the spread is unknown."""
        return self.jump / self.spread if self.spread else None

    @property
    def is_exact(self) -> bool:
        """Whether every step that both logs contain has the same printed loss."""
        return self.is_overlap and self.num_equal == self.num_overlapping

    @property
    def is_other(self) -> bool:
        """Whether the same step has different losses in the two logs, by more than rounding explains."""
        return self.is_overlap and not abs(self.jump) <= ROUNDING * abs(self.loss_before)

    @property
    def is_jump(self) -> bool:
        """Whether the loss rises by more than its usual movement, or is NaN."""
        if self.is_exact:
            return False
        if math.isnan(self.jump):
            return True
        return self.spreads is not None and self.spreads >= JUMP_SPREADS


def read_log(path: Path) -> dict[int, Iteration]:
    """Read the steps of a log. If a step was printed twice, the later line counts.

    Raises:
        CheckpointError: the file cannot be read, or contains no step line.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise CheckpointError(f"{path}: {os_reason(error)}") from error
    found = {
        line.step: Iteration(line.step, line.loss, line.seconds)
        for line in parse_iterations(text)
        if line.loss is not None
    }
    if not found:
        raise CheckpointError(
            f"{path}: has no step lines", hint="expected lines such as `iteration 10/ 20 | ... | lm loss: 3.5E+00 |`"
        )
    return found


def measure_seam(before: Mapping[int, Iteration], after: Mapping[int, Iteration]) -> Seam:
    """Measure the seam between two logs, neither of which is empty.

    Raises:
        BslError: the second log begins before the first.
    """
    step = min(after)
    history = [before[at] for at in sorted(before) if at < step]
    if not history and step not in before:
        raise BslError("the second log begins before the first", hint="name the log of the earlier run first")
    overlap = [at for at in after if at in before]
    changes = _changes(history or [before[step]])
    expected = (
        before[step].loss if step in before else history[-1].loss + (statistics.median(changes) if changes else 0)
    )
    seconds_before = [item.seconds for item in history[-RECENT:] if item.seconds is not None]
    seconds_after = [item.seconds for item in after.values() if item.seconds is not None]
    return Seam(
        step=step,
        loss_before=before[step].loss if step in before else history[-1].loss,
        loss_after=after[step].loss,
        jump=after[step].loss - expected,
        spread=_spread(changes),
        is_overlap=step in before,
        num_equal=sum(before[at].loss == after[at].loss for at in overlap),
        num_overlapping=len(overlap),
        seconds_before=statistics.median(seconds_before) if seconds_before else None,
        seconds_after=statistics.median(seconds_after) if seconds_after else None,
    )


def _changes(history: list[Iteration]) -> list[float]:
    """Return the changes of the loss between consecutive recent steps."""
    recent = history[-RECENT - 1 :]
    changes = [late.loss - early.loss for early, late in itertools.pairwise(recent)]
    return [change for change in changes if math.isfinite(change)]


def _spread(changes: list[float]) -> float | None:
    if len(changes) < MIN_CHANGES:
        return None
    middle = statistics.median(changes)
    return statistics.median(abs(change - middle) for change in changes) / MAD or None


def seam_finding(seam: Seam, *, is_equal: bool | None) -> WeightsFinding:
    """Describe the seam; `is_equal` says whether the weights of A and B were equal, None if not compared."""
    claim = _claim(seam)
    if is_equal and (seam.is_jump or (seam.is_overlap and not seam.is_exact)):
        return WeightsFinding("data or random state", (), (), f"{claim}. Weights equal: look at data order and RNG")
    if seam.is_jump:
        return WeightsFinding("loss jump", (), (), claim)
    return WeightsFinding("other loss" if seam.is_other else "no loss jump", (), (), claim, is_fault=seam.is_other)


def _claim(seam: Seam) -> str:
    if seam.is_exact:
        return f"the losses of {seam.num_overlapping} steps from {seam.step} on are equal to the last printed digit"
    against = "in the first log" if seam.is_overlap else "one step earlier plus the trend"
    head = (
        f"at the restart, step {seam.step}, the loss is {seam.loss_after:.6g}, {seam.jump:+.4g} against "
        f"{seam.loss_before:.6g} {against}"
    )
    if seam.spreads is None:
        return f"{head} (too few earlier steps to estimate its usual movement)"
    return f"{head}, {abs(seam.spreads):.1f} times the recent spread of {seam.spread:.3g}: {_verdict(seam)}"


def _verdict(seam: Seam) -> str:
    if seam.is_jump:
        return "a jump"
    if seam.is_other:
        return "less than its usual movement, but for the same step: the restart changed the run"
    return "within its usual movement" if abs(seam.spreads or 0) < JUMP_SPREADS else "a drop"


def seam_document(seam: Seam) -> dict[str, Any]:
    """Return the seam as part of the JSON document."""

    def number(value: float | None) -> float | None:
        return value if value is not None and math.isfinite(value) else None

    return {
        "step": seam.step,
        "loss_before": number(seam.loss_before),
        "loss_after": number(seam.loss_after),
        "jump": number(seam.jump),
        "spread": number(seam.spread),
        "spreads": number(seam.spreads),
        "is_jump": seam.is_jump,
        "overlapping_steps": seam.num_overlapping,
        "equal_steps": seam.num_equal,
        "seconds_before": number(seam.seconds_before),
        "seconds_after": number(seam.seconds_after),
    }

"""Whether the loss jumps where a run continues: its first steps there, against its usual movement from step to step.

The movement is measured on the run itself, with medians, so that one odd step does not hide a jump. Few steps make a
poor measure. The limit is higher for them; below `MIN_CHANGES` nothing is claimed.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bigsci_launch.errors import BslError
from bigsci_launch.units import finite

RECENT = 20
"""Changes of the loss before the restart that are its usual movement."""
MIN_CHANGES = 8
FIRST = 3
"""Steps after the restart whose mean is compared too: a small rise that stays is not noise."""
MIN_CHANGES_OF_MEANS = 18
# With these, one healthy restart in a thousand is called a jump if the noise is normal (drawn 20,000 times).
JUMP_SPREADS = 5.0
MEAN_SPREADS = 6.0
FEW = 40.0
# Relative difference of the first loss in bf16 when a run continues with another topology.
ROUNDING = 1e-4
# Median absolute deviation of a normal distribution, as a multiple of its standard deviation.
MAD = 0.6745

JumpVerdict = Literal["spike", "other loss", "equal", "no jump", "unknown"]


@dataclass(frozen=True, slots=True)
class LossJump:
    """How the loss changes where B continues A: at `step`, the first step of B.

    `jump` is B's loss at `step` minus A's loss there if A has that step (`is_overlap`), otherwise minus A's last loss
    plus its trend. `spread` is the standard deviation of A's `num_changes` recent changes per step; None if there are
    too few, or if most are equal. `rise` is by how much the mean of B's first steps is higher than expected, and
    `rise_spreads` the same in units of what such means do in A; None if not known.
    """

    step: int
    before: float
    after: float
    jump: float
    spread: float | None
    num_changes: int
    is_overlap: bool
    num_equal: int
    num_overlapping: int
    rise: float | None = None
    rise_spreads: float | None = None
    lost_at: int | None = None
    """The first step of B whose loss is not finite, among its first ones; None if all are."""
    unit: Literal["step", "report"] = "step"
    """What is counted: `report` where the logs have losses without the numbers of their steps."""

    @property
    def spreads(self) -> float | None:
        """The jump in units of the spread; None if the spread is unknown."""
        return self.jump / self.spread if self.spread else None

    @property
    def limit(self) -> float:
        """How many spreads make a jump: more of them if the spread comes from few changes."""
        return JUMP_SPREADS + FEW * (1 / max(1, self.num_changes) - 1 / RECENT)

    @property
    def is_exact(self) -> bool:
        """Whether every step that both have has the same loss."""
        return self.is_overlap and self.num_equal == self.num_overlapping

    @property
    def is_other(self) -> bool:
        """Whether the same step has different losses in A and B, by more than rounding explains."""
        return self.is_overlap and not abs(self.jump) <= ROUNDING * abs(self.before)

    @property
    def is_jump(self) -> bool:
        """Whether the loss rises by more than its usual movement, or stops being a number."""
        if self.is_exact or not math.isfinite(self.before):
            return False
        if self.lost_at is not None:
            return True
        return (self.spreads is not None and self.spreads >= self.limit) or self.is_rise

    @property
    def is_changed(self) -> bool:
        """Whether the restart is known to have changed the loss: by a jump, or for the same step."""
        return self.is_jump or self.is_other

    @property
    def is_rise(self) -> bool:
        """Whether the mean of the first steps is too high, whatever the first step alone shows."""
        return self.rise_spreads is not None and self.rise_spreads >= MEAN_SPREADS

    @property
    def verdict(self) -> JumpVerdict:
        """What is known: `unknown` is neither a jump nor none."""
        if self.is_exact:
            return "equal"
        if self.is_jump:
            return "spike"
        if self.is_other:
            return "other loss"
        is_known = self.spreads is not None and math.isfinite(self.before)
        return "no jump" if self.is_overlap or is_known else "unknown"


def measure_jump(
    before: Mapping[int, float], after: Mapping[int, float], unit: Literal["step", "report"] = "step"
) -> LossJump:
    """Measure the jump between the losses of two attempts by step, neither of which is empty.

    Raises:
        BslError: the second begins before the first.
    """
    step = min(after)
    history = [before[at] for at in sorted(before) if at < step]
    if not history and step not in before:
        raise BslError("the second log begins before the first", hint="name the log of the earlier run first")
    overlap = [at for at in sorted(after) if at in before]
    recent = (history or [before[step]])[-RECENT - 1 :]
    changes = [late - early for early, late in itertools.pairwise(recent) if math.isfinite(late - early)]
    trend = statistics.median(changes) if changes else 0.0
    expected = before[step] if step in before else history[-1] + trend
    rise, rise_spreads = _rise(recent, before, after, changes)
    return LossJump(
        step=step,
        before=before[step] if step in before else history[-1],
        after=after[step],
        jump=after[step] - expected,
        spread=_spread(changes) if len(changes) >= MIN_CHANGES else None,
        num_changes=len(changes),
        is_overlap=step in before,
        num_equal=sum(before[at] == after[at] for at in overlap),
        num_overlapping=len(overlap),
        rise=rise,
        rise_spreads=rise_spreads,
        lost_at=next((at for at in sorted(after)[:FIRST] if not math.isfinite(after[at])), None),
        unit=unit,
    )


def _rise(
    recent: Sequence[float], before: Mapping[int, float], after: Mapping[int, float], changes: Sequence[float]
) -> tuple[float | None, float | None]:
    """Return how much the mean of the first steps rises, as it is and in spreads of such rises before the restart."""
    first = sorted(after)[:FIRST]
    if len(first) < FIRST or len(changes) < MIN_CHANGES_OF_MEANS or len(changes) != len(recent) - 1:
        return None, None
    means = [statistics.fmean(recent[at : at + FIRST]) for at in range(len(recent) - FIRST + 1)]
    usual = [late - early for early, late in zip(means, means[FIRST:], strict=False)]
    mean = statistics.fmean(after[at] for at in first)
    if all(at in before for at in first):
        rise = mean - statistics.fmean(before[at] for at in first)
    else:
        rise = mean - means[-1] - statistics.median(usual)
    spread = _spread(usual)
    return rise, rise / spread if spread else None


def _spread(changes: Sequence[float]) -> float | None:
    middle = statistics.median(changes)
    return statistics.median(abs(change - middle) for change in changes) / MAD or None


def describe_jump(jump: LossJump, *, source: str = "in the first log") -> str:
    """Return what is known of the jump, as one sentence without a full stop; `source` is where A's steps are."""
    if jump.is_exact:
        return (
            f"the losses of {jump.num_overlapping} {jump.unit}s from {jump.step} on are equal to the last printed digit"
        )
    against = source if jump.is_overlap else f"one {jump.unit} earlier plus the trend"
    head = (
        f"at the restart, {jump.unit} {jump.step}, the loss is {jump.after:.6g}, {jump.jump:+.4g} against "
        f"{jump.before:.6g} {against}"
    )
    name = "restart spike: " if jump.is_jump else ""
    if not math.isfinite(jump.before):
        return f"{head}: the loss was not finite before the restart"
    if jump.lost_at is not None:
        return f"{name}{head}; at {jump.unit} {jump.lost_at} it is not finite"
    if jump.spreads is None:
        return f"{head} (too few earlier {jump.unit}s to estimate its usual movement)"
    return f"{name}{head}, {abs(jump.spreads):.1f} times the recent spread of {jump.spread:.3g}: {_verdict(jump)}"


def _verdict(jump: LossJump) -> str:
    if jump.spreads is not None and jump.spreads >= jump.limit:
        return "a jump"
    if jump.is_rise:
        return f"the mean of {FIRST} {jump.unit}s rises by {jump.rise_spreads:.1f} times its usual movement: a jump"
    if jump.is_other:
        return f"less than its usual movement, but the {jump.unit} is the same: the restart changed the run"
    return "within its usual movement" if abs(jump.spreads or 0) < jump.limit else "a drop"


def figures_of(jump: LossJump | None) -> dict[str, Any]:
    """Return the figures of a jump as part of a JSON document; each is None if it is not known, or not finite."""
    names = ("before", "after", "jump", "spread", "spreads")
    before, after, *others = (None if jump is None else finite(getattr(jump, name)) for name in names)
    step = None if jump is None else jump.step
    return {"step": step, "loss_before": before, "loss_after": after, **dict(zip(names[2:], others, strict=True))}

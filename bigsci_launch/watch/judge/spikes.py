"""Whether the loss or the norm of the gradient is far above what it was lately, by median and absolute deviation."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

from bigsci_launch.loss_jump import MAD
from bigsci_launch.watch.judge.silence import Noticed

BEFORE, MIN_BEFORE = 64, 20
NEAR, CALM = 3, 5
"""Two of so many steps make a spike, and so many in a row are its end."""
SKIPPED_IN_A_ROW = 5
"""fp16 skips a step now and then while it looks for a loss scale."""
FINITE_IN_A_ROW = 3
LEAST = 1e-12


@dataclass(frozen=True, slots=True)
class SpikeLimits:
    """What counts as high, and what alone is a spike: times the usual, and above it in spreads.

    Below `calm` times the usual, it is over. Spreads are those of the logarithm: losses of small batches and gradients
    differ by factors. Values that may be negative are not judged.
    """

    high: float
    sharp: float
    calm: float
    high_spreads: float
    sharp_spreads: float
    least_spread: float


LOSS = SpikeLimits(1.03, 1.10, 1.03, 8.0, 15.0, 0.005)
GRAD_NORM = SpikeLimits(8.0, 30.0, 4.0, 4.0, 6.0, 0.1)


class Spikes:
    """Follows one value from step to step. While it is in a spike, what is usual stays as it was before."""

    def __init__(self, kind: str, name: str, limits: SpikeLimits) -> None:
        self._kind = kind
        self._name = name
        self._limits = limits
        self._before: deque[float] = deque(maxlen=BEFORE)
        self._near: deque[tuple[int, float, float | None]] = deque(maxlen=NEAR)
        self._usual = 0.0
        self._begun: int | None = None
        self._highest = 0.0
        self._num_calm = 0

    def add(self, step: int, value: float, time: float | None) -> Noticed | None:
        """Take a finite value, and return what it shows; None if nothing new."""
        if self._begun is not None:
            return self._follow(step, value, time)
        if len(self._before) < MIN_BEFORE:
            self._before.append(value)
            return None
        self._usual, spreads = self._measure(value)
        is_high = value > self._limits.high * self._usual and spreads > self._limits.high_spreads
        is_sharp = value > self._limits.sharp * self._usual and spreads > self._limits.sharp_spreads
        if is_high:
            self._near.append((step, value, time))
        near = [each for each in self._near if each[0] > step - NEAR]
        if is_sharp or (is_high and len(near) > 1):
            return self._begin(near)
        if not is_high:
            self._before.append(value)
        return None

    def _measure(self, value: float) -> tuple[float, float]:
        """Return what is usual, and by how many spreads the value is above it."""
        usual = statistics.median(self._before)
        if min(self._before) <= 0:
            return usual, 0.0
        middle = math.log(usual)
        spread = statistics.median(abs(math.log(each) - middle) for each in self._before) / MAD
        return usual, math.log(max(value, LEAST) / usual) / max(spread, self._limits.least_spread)

    def _begin(self, near: list[tuple[int, float, float | None]]) -> Noticed:
        step, _, time = near[0]
        self._begun, self._num_calm = step, 0
        self._highest = max(value for _, value, _ in near)
        self._near.clear()
        sentence = f"the {self._name} rises at step {step}: {self._highest:.4g} instead of about {self._usual:.4g}"
        return Noticed(self._kind, step, sentence, time)

    def _follow(self, step: int, value: float, time: float | None) -> Noticed | None:
        self._highest = max(self._highest, value)
        self._num_calm = self._num_calm + 1 if value <= self._limits.calm * self._usual else 0
        if self._num_calm < CALM or self._begun is None:
            return None
        begun, self._begun = self._begun, None
        rose = f"the {self._name} that rose at step {begun}, up to {self._highest:.4g},"
        sentence = f"{rose} is back to normal: {value:.4g}"
        return Noticed(self._kind, begun, f"{sentence} at step {step}", time, is_over=True)


class Finite:
    """Notices losses and gradients that are not finite, and steps that are skipped again and again."""

    def __init__(self) -> None:
        self._begun: int | None = None
        self._num_skipped = 0
        self._num_finite = 0

    def add(self, step: int, values: tuple[float | None, ...], is_skipped: bool, time: float | None) -> Noticed | None:
        """Take a step, and return what it shows; None if nothing new. Skipped steps count after the first good one."""
        is_lost = not is_skipped and any(value is not None and not math.isfinite(value) for value in values)
        if not is_lost and not is_skipped:
            return self._note_finite(step, time)
        has_been_finite = self._num_finite > 0 or self._num_skipped > 0
        self._num_skipped = self._num_skipped + 1 if is_skipped and has_been_finite else 0
        if self._begun is not None:
            self._num_finite = 0
        if self._begun is not None or not (is_lost or self._num_skipped >= SKIPPED_IN_A_ROW):
            return None
        self._begun, self._num_finite = step - max(0, self._num_skipped - 1), 0
        skipped = f"{self._num_skipped} steps in a row have been skipped"
        what = skipped if is_skipped else "the loss or the gradient has not been finite"
        return Noticed("nan", self._begun, f"{what} since step {self._begun}", time)

    def _note_finite(self, step: int, time: float | None) -> Noticed | None:
        self._num_finite, self._num_skipped = self._num_finite + 1, 0
        if self._begun is None or self._num_finite < FINITE_IN_A_ROW:
            return None
        begun, self._begun = self._begun, None
        return Noticed("nan", begun, f"steps are finite again at step {step}", time, is_over=True)

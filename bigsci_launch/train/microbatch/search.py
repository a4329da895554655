"""Which size to try next, and which one to take. Pure: results in, sizes out; the same on all ranks.

The largest size that fits is found by bisection, from the predicted one outwards. Without pipeline parallelism, it is
taken. With it, fewer and larger micro-batches leave a longer bubble: a step takes (m + pp - 1) times as long as one of
m micro-batches on the slowest rank. So the sizes that promise the shortest step are timed as well, within the same
number of trials, and the fastest one is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

WORTHWHILE = 0.02
"""A smaller size must be faster by this share: time is measured, and noisy."""


@dataclass(frozen=True, slots=True)
class SizeVerdict:
    """What all ranks together found of a size."""

    size: int
    fits: bool
    seconds: float
    """Forward and backward pass of one micro-batch on the slowest rank."""


@dataclass(slots=True)
class SizeSearch:
    """Searches `sizes`, smallest first, beginning with the one nearest to `guess` that is not above it.

    `samples` is the number of samples of a step on one replica.
    """

    sizes: Sequence[int]
    guess: int
    pp: int
    samples: int
    verdicts: dict[int, SizeVerdict] = field(default_factory=dict)

    @property
    def max_trials(self) -> int:
        """Two more than bisection needs."""
        return len(self.sizes).bit_length() + 2

    def note(self, verdict: SizeVerdict) -> None:
        """Take the verdict on the size that `next_size` named."""
        self.verdicts[verdict.size] = verdict

    def next_size(self) -> int | None:
        """Return the size to try next; None if the answer is known."""
        low, high = self._bounds()
        if high - low > 1:
            return self.sizes[self._pivot(low, high)]
        if low >= 0 and len(self.verdicts) < self.max_trials:
            return self._worth_timing(low)
        return None

    @property
    def answer(self) -> int | None:
        """The size to take; None if none fits."""
        fitting = [each for each in self.verdicts.values() if each.fits]
        if not fitting:
            return None
        largest = max(fitting, key=lambda each: each.size)
        fastest = min(fitting, key=self.step_seconds)
        is_faster = self.step_seconds(fastest) < self.step_seconds(largest) * (1 - WORTHWHILE)
        return fastest.size if is_faster and self.pp > 1 else largest.size

    @property
    def too_large(self) -> int | None:
        """The smallest size that is known not to fit."""
        return min((each.size for each in self.verdicts.values() if not each.fits), default=None)

    def step_seconds(self, verdict: SizeVerdict) -> float:
        """Return how long the schedule of a step takes with a size, without communication."""
        return (self.samples / verdict.size + self.pp - 1) * verdict.seconds

    def _bounds(self) -> tuple[int, int]:
        """Return the index of the largest size that fits, and that of the smallest one that does not."""
        fitting = [self.sizes.index(each.size) for each in self.verdicts.values() if each.fits]
        failing = [self.sizes.index(each.size) for each in self.verdicts.values() if not each.fits]
        return max(fitting, default=-1), min(failing, default=len(self.sizes))

    def _pivot(self, low: int, high: int) -> int:
        if not self.verdicts:
            return max((index for index, size in enumerate(self.sizes) if size <= self.guess), default=0)
        # The prediction is usually near, so its neighbour is tried before the rest is halved.
        if len(self.verdicts) == 1:
            return low + 1 if low >= 0 else high - 1
        return (low + high) // 2

    def _worth_timing(self, largest: int) -> int | None:
        """Return the size that promises the shortest step, if it was not tried yet."""
        if self.pp == 1:
            return None
        promising = min(self.sizes[: largest + 1], key=lambda size: self.step_seconds(self._expected(size)))
        return None if promising in self.verdicts else promising

    def _expected(self, size: int) -> SizeVerdict:
        """Return what is expected of a size: a micro-batch takes a time of its own, and one for each sample.

        Both follow from the two smallest sizes that were timed. Of a single one, all is taken for time of samples.
        """
        timed = sorted((each for each in self.verdicts.values() if each.fits), key=lambda each: each.size)[:2]
        first, second = timed[0], timed[-1]
        slope = (second.seconds - first.seconds) / (second.size - first.size) if len(timed) == 2 else 0.0
        own = first.seconds - slope * first.size
        if slope <= 0 or own < 0:
            slope, own = first.seconds / first.size, 0.0
        return self.verdicts.get(size) or SizeVerdict(size, True, own + slope * size)

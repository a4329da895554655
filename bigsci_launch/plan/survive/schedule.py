"""Simulates one step of a pipeline under the 1F1B schedule: the price of a pipeline of uneven stages.

Stage i of S runs min(S - 1 - i, m) forward passes first, then one forward and one backward pass in turn, then the
backward passes that are left (Narayanan et al., arXiv 2104.04473, figure 4). A forward pass waits for the stage before,
a backward pass for the stage after. Closed forms for this time (Oobleck, section 4.1.2) are exact for equal stages only
and far off for few micro batches: with stages of 2, 1, 1 and 1 seconds and one micro batch they say 2 for a step of 5.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of one micro batch on a stage: its forward pass, and its backward pass with recomputation."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        return self.forward + self.backward


class Clock:
    """Simulates steps of one pipeline; `hop` is a message between stages. Steps of different lengths share their start.

    In row j every stage runs forward pass j and the backward pass that follows it, number j - (S - 1 - i) on stage i of
    S, if there is one. Only the backward passes after the last row depend on how many micro batches there are.

    Raises:
        ValueError: there is no stage.
    """

    def __init__(self, stages: Sequence[StageTime], hop: float = 0.0) -> None:
        if not stages:
            raise ValueError("a step needs a stage and a micro batch")
        self._forward = [stage.forward for stage in stages]
        self._backward = [stage.backward for stage in stages]
        self._hop = hop
        self._rows = [array("d", [0.0] * len(stages))]

    def seconds(self, num_micro_batches: int) -> float:
        """Return the seconds from the first forward pass to the last backward pass.

        Raises:
            ValueError: there is no micro batch.
        """
        if num_micro_batches < 1:
            raise ValueError("a step needs a stage and a micro batch")
        if len(self._rows) <= num_micro_batches:
            free = self._rows[-1].tolist()
            while len(self._rows) <= num_micro_batches:
                self._run_row(free, len(self._rows) - 1)
                self._rows.append(array("d", free))
        return self._drained(self._rows[num_micro_batches].tolist(), num_micro_batches)

    def _run_row(self, free: list[float], row: int) -> None:
        """Run a row; `free` is when each stage has finished the row before, and then this one."""
        last, hop, ready = len(free) - 1, self._hop, 0.0
        for stage, (forward, backward) in enumerate(zip(self._forward, self._backward, strict=True)):
            done = free[stage]
            done = (ready if ready > done else done) + forward
            ready = done + hop
            if stage == last:
                done += backward
            elif row + stage >= last:
                # The next stage has run this backward pass in the row before.
                returned = free[stage + 1] + hop
                done = (returned if returned > done else done) + backward
            free[stage] = done

    def _drained(self, free: list[float], num_micro_batches: int) -> float:
        """Return when the backward passes that are left after the last row are done: S - 1 - i of stage i, or all."""
        last, hop, backwards = len(free) - 1, self._hop, self._backward
        for row in range(1, last + 1):
            for stage in range(max(0, last + 1 - num_micro_batches - row), last + 1 - row):
                done, returned = free[stage], free[stage + 1] + hop
                free[stage] = (returned if returned > done else done) + backwards[stage]
        return free[0]


def simulate_step(stages: Sequence[StageTime], num_micro_batches: int, hop: float = 0.0) -> float:
    """Return the seconds of one step of a pipeline.

    Raises:
        ValueError: there is no stage or no micro batch.
    """
    return Clock(stages, hop).seconds(num_micro_batches)


def steady_seconds(stages: Sequence[StageTime], hop: float = 0.0) -> float:
    """Return what one more micro batch adds to a long step.

    That is the slowest cycle of the schedule. Stages i to j have j - i + 1 micro batches under way: one must have gone
    down to j and back to i before stage i takes another. Without messages the slowest stage alone is the slowest cycle.
    """
    slowest = max(stage.both for stage in stages)
    if hop:
        for first in range(len(stages)):
            seconds = stages[first].both
            for count, stage in enumerate(stages[first + 1 :], start=2):
                seconds += stage.both + 2 * hop
                slowest = max(slowest, seconds / count)
    return slowest


def fewest_seconds(
    stage: StageTime, at: int, num_stages: int, before: float, total: float, num_micro_batches: int
) -> float:
    """Return a bound on the step that holds because of the stage at `at`, whatever the stages after it are.

    It waits for the stages before it (`before` seconds in both passes), works, and they finish after it. And when the
    first micro batch comes back to it, it has at most num_stages - at forward passes behind it: the rest of its work
    comes on top of one micro batch's way through all stages (`total` seconds).
    """
    more = num_micro_batches - 1
    rest = more * stage.backward + max(0, more - (num_stages - 1 - at)) * stage.forward
    return max(before + num_micro_batches * stage.both, total + rest)

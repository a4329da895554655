"""Simulates one step of a pipeline under the 1F1B schedule: the price of a pipeline of uneven stages.

Stage i of S runs min(S - 1 - i, m) forward passes first, then one forward and one backward pass in turn, then the
backward passes that are left (Narayanan et al., arXiv 2104.04473, figure 4). A forward pass waits for the stage before,
a backward pass for the stage after. Closed forms for this time (Oobleck, section 4.1.2) are exact for equal stages only
and far off for few micro batches: with stages of 2, 1, 1 and 1 seconds and one micro batch they say 2 for a step of 5.
"""

from __future__ import annotations

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


def simulate_step(stages: Sequence[StageTime], num_micro_batches: int, hop: float = 0.0) -> float:
    """Return the seconds from the first forward pass to the last backward pass; `hop` is a message between stages.

    Raises:
        ValueError: there is no stage or no micro batch.
    """
    if not stages or num_micro_batches < 1:
        raise ValueError("a step needs a stage and a micro batch")
    num_stages, last = len(stages), len(stages) - 1
    warm_ups = [min(last - stage, num_micro_batches) for stage in range(num_stages)]
    forward_done: list[list[float]] = [[] for _ in stages]
    backward_done: list[list[float]] = [[] for _ in stages]
    free_at = [0.0] * num_stages
    waiting = [0]
    while waiting:
        stage = waiting.pop()
        forwards, backwards, free = forward_done[stage], backward_done[stage], free_at[stage]
        arrived = forward_done[stage - 1] if stage else None
        returned = backward_done[stage + 1] if stage < last else None
        seconds, warm_up, begun = stages[stage], warm_ups[stage], len(forwards) + len(backwards)
        while True:
            done, back = len(forwards), len(backwards)
            if done < num_micro_batches and done <= warm_up + back:
                if arrived is None:
                    ready = 0.0
                elif done < len(arrived):
                    ready = arrived[done] + hop
                else:
                    break
                free = (ready if ready > free else free) + seconds.forward
                forwards.append(free)
            elif back < num_micro_batches:
                if returned is None:
                    ready = 0.0
                elif back < len(returned):
                    ready = returned[back] + hop
                else:
                    break
                free = (ready if ready > free else free) + seconds.backward
                backwards.append(free)
            else:
                break
        free_at[stage] = free
        if len(forwards) + len(backwards) > begun:
            if stage:
                waiting.append(stage - 1)
            if stage < last:
                waiting.append(stage + 1)
    return backward_done[0][-1]


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

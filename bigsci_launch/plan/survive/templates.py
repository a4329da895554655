"""Pipeline templates: sizes of pipelines, in nodes, from which every number of surviving nodes can be composed.

The terms are Oobleck's (Jang et al., SOSP 2023): n0 is the fewest nodes that hold one replica, f the number of nodes
that may fail at the same time. Training can go on as long as (f + 1) n0 nodes are left, with f + 1 replicas.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

from bigsci_launch.plan.survive.cut import Counts, CutModel
from bigsci_launch.plan.survive.schedule import Clock, steady_seconds


@dataclass(frozen=True)
class Template:
    """A pipeline of `size` nodes: the layers of every stage. It names no machine.

    `seconds(m)` is the time of a step with m micro batches. Up to six micro batches per stage it is simulated; from
    there on it grows at its final rate, which is within 1 % of the simulation. `factor` says how many times as slow
    ranks were measured to be.
    """

    size: int
    counts: Counts
    model: CutModel
    factor: float = 1.0

    def seconds(self, num_micro_batches: int) -> float:
        """Return the seconds of a step; with more micro batches they are never fewer."""
        num_stages = len(self.counts)
        more = max(0, num_micro_batches - 6 * num_stages)
        rounds = -(-more // num_stages)
        seconds = self._simulated(num_micro_batches - rounds * num_stages)
        return seconds + rounds * num_stages * self.seconds_per_micro_batch

    def most_micro_batches(self, seconds: float) -> int:
        """Return how many micro batches a step of so many seconds has time for."""
        most = int(seconds / self.seconds_per_micro_batch) + 1
        return bisect_right(range(1, most + 1), seconds, key=self.seconds)

    @cached_property
    def seconds_per_micro_batch(self) -> float:
        """What one more micro batch adds once the pipeline is full."""
        return self.factor * steady_seconds(self.model.stages(self.counts), self.model.hop)

    def _simulated(self, num_micro_batches: int) -> float:
        if num_micro_batches not in self._known:
            self._known[num_micro_batches] = self.factor * self._clock.seconds(num_micro_batches)
        return self._known[num_micro_batches]

    @cached_property
    def _clock(self) -> Clock:
        return Clock(self.model.stages(self.counts), self.model.hop)

    @cached_property
    def _known(self) -> dict[int, float]:
        return {}


def smallest_number_of_sizes(fewest_nodes: int, failures: int) -> int:
    """Return how many consecutive sizes from `fewest_nodes` (n0) on compose every number from (f + 1) n0 nodes on.

    k pipelines of sizes n0 .. n0 + p - 1 have any total from k n0 to k (n0 + p - 1). The intervals of f + 1, f + 2, ...
    pipelines leave no gap if and only if (f + 1)(n0 + p - 1) >= (f + 2) n0 - 1.
    """
    return 1 + -(-(fewest_nodes - 1) // (failures + 1))


def usable_sizes(fewest_nodes: int, failures: int, num_nodes: int) -> range:
    """Return every size that a pipeline can have: the largest leaves n0 nodes to each of f others.

    Empty if the nodes do not suffice for f + 1 replicas.
    """
    return range(fewest_nodes, num_nodes - failures * fewest_nodes + 1)


def sufficient_sizes(fewest_nodes: int, failures: int, num_nodes: int) -> tuple[int, ...]:
    """Return the fewest consecutive sizes that compose every number from (f + 1) n0 to `num_nodes`.

    For few nodes they are fewer than `smallest_number_of_sizes`, because only f + 1 pipelines fit: the largest size is
    then that of the largest of f + 1 even pipelines. Sizes that leave gaps can be fewer still (n0 = 8, f = 1: 8, 9, 11
    and 12 instead of 8 to 12), but a pipeline that loses a node then often has no template.
    """
    count = smallest_number_of_sizes(fewest_nodes, failures)
    largest = min(fewest_nodes + count - 1, -(-num_nodes // (failures + 1)))
    return tuple(size for size in usable_sizes(fewest_nodes, failures, num_nodes) if size <= largest)

"""Pipeline templates: sizes of pipelines, in nodes, from which every number of surviving nodes can be composed.

The terms are Oobleck's (Jang et al., SOSP 2023): n0 is the fewest nodes that hold one replica, f the number of nodes
that may fail at the same time. Training can go on as long as (f + 1) n0 nodes are left, with f + 1 replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from bigsci_launch.plan.survive.cut import Counts, CutModel
from bigsci_launch.plan.survive.schedule import simulate_step


@dataclass(frozen=True)
class Template:
    """A pipeline of `size` nodes: the layers of every stage. It names no machine.

    `seconds(m)` is the time of a step with m micro batches, simulated; from three micro batches per stage on every
    further one adds the same time, which is not simulated again.
    """

    size: int
    counts: Counts
    model: CutModel

    def seconds(self, num_micro_batches: int) -> float:
        """Return the simulated seconds of a step."""
        steady = 3 * len(self.counts)
        if num_micro_batches <= steady:
            return self._simulated(num_micro_batches)
        return self._simulated(steady) + (num_micro_batches - steady) * self.seconds_per_micro_batch

    @cached_property
    def seconds_per_micro_batch(self) -> float:
        """What one more micro batch adds once the pipeline is full."""
        num_stages = len(self.counts)
        return (self._simulated(3 * num_stages) - self._simulated(2 * num_stages)) / num_stages

    def _simulated(self, num_micro_batches: int) -> float:
        if num_micro_batches not in self._known:
            self._known[num_micro_batches] = simulate_step(
                self.model.stages(self.counts), num_micro_batches, self.model.hop
            )
        return self._known[num_micro_batches]

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
    """Return the smallest sufficient sizes. None of them is one that no composition of the nodes could use."""
    count = smallest_number_of_sizes(fewest_nodes, failures)
    return tuple(usable_sizes(fewest_nodes, failures, num_nodes))[:count]

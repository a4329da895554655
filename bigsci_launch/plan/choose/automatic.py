"""The micro-batch size that is expected for `training.micro_batch_size: auto`, before anything was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bigsci_launch.plan.price.calibration import Calibration
from bigsci_launch.plan.price.constants import PRIOR
from bigsci_launch.plan.price.memory import MemoryTerms, count_memory
from bigsci_launch.plan.price.price import price_setup
from bigsci_launch.plan.shape.setup import Setup


def expected_size(setup: Setup, sizes: Sequence[int], memory_gib: float | None) -> int:
    """Return the largest of `sizes` with which every stage of the setup is expected to fit into `memory_gib`.

    The smallest one if none does: whether it really does not fit is for the ranks to find out. The largest one if the
    memory is not known.
    """
    fitting = [size for size in sizes if memory_gib is None or expected_memory(setup, size).total_gib <= memory_gib]
    return max(fitting, default=min(sizes))


def with_fastest_size(setup: Setup, sizes: Sequence[int], calibration: Calibration) -> Setup:
    """Return the setup with the size that gives the shortest step among those that are expected to fit."""
    setups = [replace(setup, micro_batch_size=size) for size in sizes]
    prices = [(price_setup(each, calibration), each) for each in setups]
    fitting = [(price.seconds, each) for price, each in prices if price.is_safe]
    return min(fitting, key=lambda pair: pair[0])[1] if fitting else setups[0]


@dataclass(frozen=True, slots=True)
class ExpectedMemory:
    """What the fullest rank is expected to need, GiB: with uncalibrated constants, and without what a process needs
    before it trains."""

    state_gib: float
    optimizer_gib: float
    kept_gib: float
    working_gib: float

    @property
    def total_gib(self) -> float:
        return self.state_gib + self.optimizer_gib + self.kept_gib + self.working_gib

    @property
    def words(self) -> str:
        """The table in a line."""
        return (
            f"{self.total_gib:.3g} GiB: {self.state_gib:.3g} of weights and gradients, {self.optimizer_gib:.3g} of "
            f"optimizer state, {self.kept_gib:.3g} of kept activations, {self.working_gib:.3g} while computing"
        )


def expected_memory(setup: Setup, size: int) -> ExpectedMemory:
    """Return what the fullest rank is expected to need with micro-batches of `size`."""
    changed = replace(setup, micro_batch_size=size)
    stages = (count_memory(changed, stage) for stage in range(setup.topology.pp))
    return max((_weighed(terms) for terms in stages), key=lambda each: each.total_gib)


def _weighed(terms: MemoryTerms) -> ExpectedMemory:
    optimizer = terms.state_gib(PRIOR) - terms.resident_gib
    kept = terms.kept_gib * terms.weights(PRIOR).activation_factor
    return ExpectedMemory(terms.resident_gib, optimizer, kept, terms.working_gib)

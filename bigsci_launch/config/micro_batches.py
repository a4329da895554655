"""Which micro-batch sizes a run can have: those that divide every batch of it, on the ramp as well."""

from __future__ import annotations

from math import gcd, isqrt

from bigsci_launch.config.schema.run import TrainingSection
from bigsci_launch.topology import Topology


def legal_sizes(training: TrainingSection, dp: int) -> tuple[int, ...]:
    """Return the micro-batch sizes with which every global batch of the run is a whole number of micro-batches on each
    of `dp` replicas, smallest first; none if `dp` does not divide the batches."""
    common = training.global_batch_size
    if training.rampup is not None:
        common = gcd(common, training.rampup.start, training.rampup.increment)
    share, rest = divmod(common, dp)
    if rest:
        return ()
    small = [size for size in range(1, isqrt(share) + 1) if share % size == 0]
    return tuple(sorted({*small, *(share // size for size in small)}))


def assumed_size(training: TrainingSection, topology: Topology) -> int:
    """Return the micro-batch size of a run; for `auto`, the largest legal one that keeps every stage busy.

    It is 1 if there is no legal size: `config.check` says that.
    """
    if training.micro_batch_size != "auto":
        return training.micro_batch_size
    sizes = legal_sizes(training, topology.dp)
    filling = training.global_batch_size // (topology.dp * topology.pp)
    return max((size for size in sizes if size <= filling), default=1)


def legal_size_below(sizes: tuple[int, ...], size: int) -> int | None:
    """Return the largest legal size below `size`; None if there is none."""
    return max((each for each in sizes if each < size), default=None)

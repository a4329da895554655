"""Cuts by price: `time` minimises the time of the slowest stage, `memory` the memory of the fullest.

Prices are those of the planner, including embeddings and head. Every stage gets at least one transformer layer, since
DeepSpeed's gradient norm hangs otherwise (`plan.preflight`). What precedes the first layer is then on the first stage,
what follows the last layer is on the last stage, and only the number of layers of each stage is left to choose. A stage
costs more with each layer, so it is optimal to give each layer to the stage that is cheapest with it. When the most
expensive stage got its last layer, every other stage would have cost at least as much with one more. So a cut in which
every stage costs less would have fewer layers in total.

A resolved method includes its cut, as in `time:7,6,6,5`. Ranks, checkpoints and later attempts thus do not depend on a
calibration that may have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heapify, heapreplace

from bigsci_launch.plan.price.calibration import Calibration
from bigsci_launch.plan.price.count import count_work
from bigsci_launch.plan.price.memory import count_memory, weigh_memory
from bigsci_launch.plan.price.step_time import layer_and_head_seconds
from bigsci_launch.plan.shape.setup import Setup

PRICED_METHODS = ("time", "memory")
StagePrice = Callable[[int], float]
"""The price of a stage by its number of transformer layers; it rises with each layer."""


def share_out_layers(num_layers: int, prices: Sequence[StagePrice]) -> tuple[int, ...]:
    """Return the layers of every stage, at least one each, such that the most expensive stage is as cheap as possible.

    Of equal stages, the later one gets a layer first, because it keeps fewer micro batches.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    if num_layers < len(prices):
        raise ValueError(f"{num_layers} layers cannot fill {len(prices)} pipeline stages")
    counts = [1] * len(prices)
    heap = [(price(2), -stage) for stage, price in enumerate(prices)]
    heapify(heap)
    for _ in range(num_layers - len(prices)):
        stage = -heap[0][1]
        counts[stage] += 1
        heapreplace(heap, (prices[stage](counts[stage] + 1), -stage))
    return tuple(counts)


def price_stages(setup: Setup, method: str, calibration: Calibration) -> list[StagePrice]:
    """Return the price of each stage by its number of layers: seconds per micro batch, or GiB of needed memory."""
    pp = setup.topology.pp
    if method == "time":
        # The work of a layer does not depend on the cut, but counting it requires one.
        work = count_work(replace(setup, partition_method="uniform"), calibration.gpu)
        layer, head = layer_and_head_seconds(work, calibration.constants)
        return [_line(layer, head if stage == pp - 1 else 0.0) for stage in range(pp)]
    return [_need(setup, stage, calibration) for stage in range(pp)]


def _line(layer: float, rest: float) -> StagePrice:
    return lambda layers: layers * layer + rest


def _need(setup: Setup, stage: int, calibration: Calibration) -> StagePrice:
    def need(layers: int) -> float:
        return weigh_memory(count_memory(setup, stage, layers), calibration.constants, calibration.gpu)[0]

    return need


def settle_method(setup: Setup, calibration: Calibration) -> Setup:
    """Return `setup` with the cut of `time` or `memory` filled in, unless there are fewer layers than stages."""
    method, shape = setup.partition_method, setup.shape
    if method not in PRICED_METHODS or shape.num_layers < setup.topology.pp:
        return setup
    counts = share_out_layers(shape.num_layers, price_stages(setup, method, calibration))
    return replace(setup, partition_method=f"{method}:{','.join(map(str, counts))}")

"""Cuts by price: `time` makes the slowest stage as quick as it can be, `memory` the fullest as empty.

Prices are the planner's own, embeddings and head included. Every stage gets at least one transformer layer: without,
DeepSpeed's gradient norm hangs (`plan.preflight`). What comes before the first layer is then on the first stage and
what comes after the last on the last one, so that only the number of layers of each stage is left to choose. A stage
costs more with each layer, so giving layer after layer to the stage that is cheapest with it is optimal: when the
dearest stage got its last layer, every other one would have been at least as dear with one more, and a cut in which
all cost less holds fewer layers in all.

A resolved method carries its cut, `time:7,6,6,5`: ranks, checkpoints and later attempts do not depend on a calibration
that may have changed since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heapify, heapreplace

from bigsci_launch.plan.price.calibration import Calibration
from bigsci_launch.plan.price.memory import count_memory, weigh_memory
from bigsci_launch.plan.price.step_time import count_work, layer_and_head_seconds
from bigsci_launch.plan.shape.setup import Setup

PRICED_METHODS = ("time", "memory")
StagePrice = Callable[[int], float]
"""The price of a stage with so many transformer layers; more with each."""


def share_out_layers(num_layers: int, prices: Sequence[StagePrice]) -> tuple[int, ...]:
    """Layers of every stage, at least one each, such that the dearest stage is as cheap as can be.

    Of equal stages the later one gets a layer first: it keeps fewer micro batches.

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
    """What each stage costs by its number of layers: seconds of a micro batch, or GiB that must be there."""
    pp = setup.topology.pp
    if method == "time":
        # The work of a layer does not depend on the cut, but counting it asks for one.
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
    """The same setup; `time` and `memory` with their cut, unless there is a layer too few for it."""
    method, shape = setup.partition_method, setup.shape
    if method not in PRICED_METHODS or shape.num_layers < setup.topology.pp:
        return setup
    counts = share_out_layers(shape.num_layers, price_stages(setup, method, calibration))
    return replace(setup, partition_method=f"{method}:{','.join(map(str, counts))}")

"""Oracles that share no code with the package: the schedule as a graph, and every cut of a small model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path

import pytest

from bigsci_launch.plan.price.calibration import Calibration, read_calibration
from bigsci_launch.plan.price.hardware import GpuModel
from bigsci_launch.plan.shape.parameters import ModelShape
from bigsci_launch.plan.shape.setup import UNFUSED_2021, Setup
from bigsci_launch.plan.survive.cut import CutModel
from bigsci_launch.plan.survive.replica import Replica
from bigsci_launch.plan.survive.schedule import StageTime
from bigsci_launch.plan.survive.survival import Survival, plan_survival
from bigsci_launch.plan.survive.templates import Template
from bigsci_launch.topology import Topology

LongestPath = Callable[..., float]


@pytest.fixture(scope="session")
def longest_path() -> LongestPath:
    """Return the 1F1B oracle: the longest path through the passes of (forward, backward) stages."""

    def seconds(stages: Sequence[tuple[float, float]], micro_batches: int, hop: float = 0.0) -> float:
        last = len(stages) - 1
        orders: list[list[tuple[str, int]]] = []
        for stage in range(len(stages)):
            ahead = min(last - stage, micro_batches)
            order = [("F", index) for index in range(ahead)]
            for index in range(micro_batches - ahead):
                order += [("F", ahead + index), ("B", index)]
            orders.append(order + [("B", index) for index in range(micro_batches - ahead, micro_batches)])
        places = [{job: place for place, job in enumerate(order)} for order in orders]

        @cache
        def end(stage: int, job: tuple[str, int]) -> float:
            kind, _ = job
            place = places[stage][job]
            begin = end(stage, orders[stage][place - 1]) if place else 0.0
            source = stage - 1 if kind == "F" else stage + 1
            if 0 <= source <= last:
                begin = max(begin, end(source, job) + hop)
            return begin + stages[stage][kind == "B"]

        for index in range(micro_batches):
            end(0, ("B", index))
        return end(0, ("B", micro_batches - 1))

    return seconds


@pytest.fixture(scope="session")
def best_of_all_cuts(longest_path: LongestPath) -> Callable[..., float | None]:
    """Return the oracle of cuts: the fewest seconds over every cut under the limits, None if there is none."""

    def seconds(
        layers: Sequence[tuple[float, float]], limits: Sequence[int], micro_batches: int, hop: float = 0.0
    ) -> float | None:
        found = []
        for inner in combinations(range(1, len(layers)), len(limits) - 1):
            parts = [layers[first:last] for first, last in pairwise((0, *inner, len(layers)))]
            if all(len(part) <= limit for part, limit in zip(parts, limits, strict=True)):
                stages = [(sum(layer[0] for layer in part), sum(layer[1] for layer in part)) for part in parts]
                found.append(longest_path(stages, micro_batches, hop))
        return min(found, default=None)

    return seconds


@pytest.fixture(scope="session")
def one_stage() -> Callable[[float, int], Template]:
    """Return what makes a template of one stage, whose m micro batches take m times as long as one."""

    def make(seconds: float, size: int) -> Template:
        return Template(size, (1,), CutModel((StageTime(seconds / 3, seconds * 2 / 3),), lambda stage, stages: 1))

    return make


@pytest.fixture(scope="session")
def bloom_replica(bloom: Setup, root: Path) -> Replica:
    """BLOOM on Jean Zay, f = 1."""
    return Replica(bloom, read_calibration(root / "slurm/calibrations/jean-zay-a100.json"), 1)


@pytest.fixture(scope="session")
def bloom_plan(bloom_replica: Replica) -> Callable[[int], Survival]:
    """Return what plans BLOOM on 48 nodes for f, once."""
    return cache(lambda failures: plan_survival(replace(bloom_replica, failures=failures), 48))


@pytest.fixture(scope="session")
def toy_replica() -> Callable[..., Replica]:
    """Return what makes a model of one stage to a node, of which 2 nodes hold f + 1 replicas."""

    def make(
        failures: int = 1, *, layers: int = 8, batch: int = 32, memory_gib: float = 3.93, ranks: int = 2
    ) -> Replica:
        setup = Setup(
            shape=ModelShape(layers, 2048, 16, 8192, 512, 32000),
            topology=Topology(tp=2, pp=2, dp=2),
            micro_batch_size=1,
            global_batch_size=batch,
            ranks_per_node=ranks,
            partition_method="uniform",
            technique=UNFUSED_2021,
        )
        return Replica(setup, Calibration(gpu=GpuModel("toy", memory_gib, 312)), failures)

    return make

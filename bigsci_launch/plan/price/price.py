"""Prices a setup under a calibration: the time of a step with its error band, and the memory of its ranks."""

from __future__ import annotations

from dataclasses import dataclass

from bigsci_launch.plan.price.calibration import Calibration
from bigsci_launch.plan.price.count import count_work
from bigsci_launch.plan.price.memory import StageMemory, is_out_of_memory, outer_stages, predict_stage_memory
from bigsci_launch.plan.price.neighbours import point_of
from bigsci_launch.plan.price.step_time import StepTime, predict_step
from bigsci_launch.plan.price.terms import TERMS
from bigsci_launch.plan.shape.setup import Setup

NEIGHBOUR_TERM = "measured neighbours"
TERM_NAMES = (*TERMS, "once per step", NEIGHBOUR_TERM)


@dataclass(frozen=True, slots=True)
class Price:
    """What a setup costs. `band` is relative, and 9 of 10 left-out measurements were inside it. `terms` add up to
    `seconds`, in the order of `TERM_NAMES`. `closeness` to the nearest measured run is 1 for the same and 0 for far."""

    seconds: float
    band: float
    terms: tuple[float, ...]
    stage_seconds: tuple[float, ...]
    micro_batch_seconds: float
    bubble: float
    closeness: float
    first_stage: StageMemory
    last_stage: StageMemory
    is_out_of_memory: bool

    @property
    def memory_gib(self) -> float:
        """The memory that nvidia-smi will show on the fuller of the first and the last stage."""
        return max(self.first_stage.predicted_gib, self.last_stage.predicted_gib)

    @property
    def need_gib(self) -> float:
        return max(self.first_stage.need_gib, self.last_stage.need_gib)


def price_setup(setup: Setup, calibration: Calibration) -> Price:
    """Return what a step of `setup` costs.

    Raises:
        ValueError: the layers cannot be cut into stages.
    """
    point = point_of(setup)
    step = _step(setup, calibration)
    time_factor, nearest = calibration.time_neighbours.look_up(point)
    closeness = calibration.closeness_of(setup, nearest)
    memory_factor, _ = calibration.memory_neighbours.look_up(point)
    stages = [price_stage_memory(setup, stage, calibration, memory_factor) for stage in outer_stages(setup)]
    need = max(stage.need_gib for stage in stages)
    once = step.seconds - sum(step.terms)
    return Price(
        seconds=step.seconds * time_factor,
        band=calibration.band(closeness),
        terms=(*step.terms, once, step.seconds * (time_factor - 1)),
        stage_seconds=tuple(seconds * time_factor for seconds in step.stage_seconds),
        micro_batch_seconds=step.micro_batch_seconds * time_factor,
        bubble=step.bubble,
        closeness=closeness,
        first_stage=stages[0],
        last_stage=stages[-1],
        is_out_of_memory=is_out_of_memory(
            need, calibration.gpu, is_measured=bool(calibration.memory_neighbours.points)
        ),
    )


def _step(setup: Setup, calibration: Calibration) -> StepTime:
    drift_from = calibration.drift_from.toordinal() if calibration.drift_from else None
    return predict_step(count_work(setup, calibration.gpu), calibration.constants, drift_from)


def price_stage_memory(setup: Setup, stage: int, calibration: Calibration, factor: float | None = None) -> StageMemory:
    """Return the memory of a rank of `stage`, corrected by `factor`; default: that of the measured neighbours."""
    if factor is None:
        factor, _ = calibration.memory_neighbours.look_up(point_of(setup))
    memory = predict_stage_memory(setup, stage, calibration.constants, calibration.gpu)
    return StageMemory(stage, memory.state_gib, memory.need_gib, memory.predicted_gib * factor)

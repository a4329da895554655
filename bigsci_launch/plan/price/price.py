"""Prices a setup under a calibration: the time of a step with its error band, and the memory of its ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from bigsci_launch.plan.price.calibration import UNCALIBRATED_BAND, Calibration
from bigsci_launch.plan.price.count import count_work
from bigsci_launch.plan.price.memory import SAFE, MemoryFit, StageMemory, judge_fit, outer_stages, predict_stage_memory
from bigsci_launch.plan.price.neighbours import point_of
from bigsci_launch.plan.price.own_memory import is_own
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
    fit: MemoryFit

    @property
    def is_out_of_memory(self) -> bool:
        return self.fit == "does not fit"

    @property
    def is_safe(self) -> bool:
        """Whether it needs no more than the GPU has, so that it can be proposed."""
        return self.fit in SAFE

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
        band=_band(setup, step, calibration, closeness),
        terms=(*step.terms, once, step.seconds * (time_factor - 1)),
        stage_seconds=tuple(seconds * time_factor for seconds in step.stage_seconds),
        micro_batch_seconds=step.micro_batch_seconds * time_factor,
        bubble=step.bubble,
        closeness=closeness,
        first_stage=stages[0],
        last_stage=stages[-1],
        fit=judge_fit(setup, need, calibration.gpu, is_known=calibration.knows_need_of(setup)),
    )


def _band(setup: Setup, step: StepTime, calibration: Calibration, closeness: float) -> float:
    """Return the half-width of the band: that of a setup so close to measured ones, and what terms add that the
    measured ones do not show."""
    terms, guessed = dict(zip(TERMS, step.terms, strict=True)), calibration.guessed_terms(setup)
    added = sum(error * terms[name] for name, error in guessed.items()) / step.seconds
    band = calibration.time_errors.band(closeness)
    return max(band, min(UNCALIBRATED_BAND, math.hypot(band, added)))


def _step(setup: Setup, calibration: Calibration) -> StepTime:
    drift_from = calibration.drift_from.toordinal() if calibration.drift_from else None
    return predict_step(count_work(setup, calibration.gpu), calibration.constants, drift_from)


def price_stage_memory(setup: Setup, stage: int, calibration: Calibration, factor: float | None = None) -> StageMemory:
    """Return the memory of a rank of `stage`, corrected by `factor`; default: that of the measured neighbours. Nothing
    corrects what is counted."""
    memory = predict_stage_memory(setup, stage, calibration.constants, calibration.gpu)
    if is_own(setup):
        return memory
    if factor is None:
        factor, _ = calibration.memory_neighbours.look_up(point_of(setup))
    return replace(memory, predicted_gib=memory.predicted_gib * factor)

"""Fits the constants of a cluster to measured runs, and estimates their errors.

Time and memory are fitted separately. Errors are those of left-out rows: constants and neighbours of all other rows
predict each row.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import TypeVar

from bigsci_launch.plan.calibrate.fit import Fit, Prior, fit_constants
from bigsci_launch.plan.calibrate.rows import Measurement
from bigsci_launch.plan.price.calibration import Calibration, ErrorSummary, counted_framework
from bigsci_launch.plan.price.constants import CONSTANTS, MEMORY_CONSTANTS, TIME_CONSTANTS, Constants, priors_for
from bigsci_launch.plan.price.count import StepWork, count_work
from bigsci_launch.plan.price.hardware import GpuModel
from bigsci_launch.plan.price.memory import count_memory, outer_stages, weigh_memory
from bigsci_launch.plan.price.neighbours import (
    DAY_AXIS,
    MEMORY_NUGGET,
    MEMORY_SCALES,
    TIME_NUGGET,
    TIME_SCALES,
    Neighbours,
    Point,
    interpolate,
    invert_kernel,
    kernel_row,
    leave_one_out,
    point_of,
)
from bigsci_launch.plan.price.step_time import drift_on, step_seconds
from bigsci_launch.plan.price.terms import rates_of
from bigsci_launch.progress import Progress, no_progress

_Value = TypeVar("_Value")

DRIFT_GAIN = 20.0
"""How much a change of the cluster on some day must lower the discord of similar setups to be believed."""

DRIFT_NUGGET = 0.02
"""How little two measurements of a setup should differ: variance of the noise over that of the model's error."""

DRIFT_ROWS = 4
"""Timed runs required before and after that day."""

LEFT_OUT_ITERATIONS = 3
"""Iterations of the fit without one row, which starts from the fit with all rows."""


@dataclass(frozen=True, slots=True)
class _Task:
    """One of the two fits: its predictions for given constants, the measurements, and the points of the rows."""

    names: tuple[str, ...]
    predict: Callable[[Constants], list[float]]
    measured: tuple[float, ...]
    points: tuple[Point, ...]
    scales: Point
    nugget: float
    expected: Constants

    def subset(self, indices: Sequence[int]) -> _Task:
        return _Task(
            self.names,
            lambda constants: _pick(self.predict(constants), indices),
            tuple(self.measured[index] for index in indices),
            tuple(self.points[index] for index in indices),
            self.scales,
            self.nugget,
            self.expected,
        )


def _pick(numbers: Sequence[float], indices: Sequence[int]) -> list[float]:
    return [numbers[index] for index in indices]


@dataclass(frozen=True, slots=True)
class _Fitted:
    """A fit with its neighbours."""

    fit: Fit
    constants: Constants
    residuals: tuple[float, ...]
    inverse: list[list[float]]
    neighbours: Neighbours


def calibrate(
    measurements: Sequence[Measurement],
    gpu: GpuModel,
    *,
    site: str | None = None,
    sources: Sequence[str] = (),
    command: str = "",
    report_progress: Progress = no_progress,
) -> Calibration:
    """Return the calibration of `site`, on which `measurements` were made, with the errors of left-out rows.

    `report_progress` gets the number of parts done, of 100.
    """
    drift_from, time_task, memory_task = _tasks(measurements, gpu)
    report_progress(20)
    time_fit, time_errors = _best_fit(time_task)
    report_progress(60)
    memory_fit, memory_errors = _best_fit(memory_task)
    report_progress(80)
    learning_curve = _learning_curve(time_task)
    report_progress(100)
    return replace(
        _calibration(measurements, gpu, drift_from, time_task, time_fit, memory_task, memory_fit),
        time_errors=time_errors,
        memory_errors=memory_errors,
        learning_curve=learning_curve,
        site=site,
        sources=tuple(sources),
        command=command,
    )


def fit_calibration(measurements: Sequence[Measurement], gpu: GpuModel) -> Calibration:
    """Return the same constants and neighbours faster, without errors and thus without bands."""
    drift_from, time_task, memory_task = _tasks(measurements, gpu)
    return _calibration(measurements, gpu, drift_from, time_task, _fit(time_task), memory_task, _fit(memory_task))


def _tasks(measurements: Sequence[Measurement], gpu: GpuModel) -> tuple[date | None, _Task, _Task]:
    timed = [measurement for measurement in measurements if measurement.seconds]
    weighed = [measurement for measurement in measurements if measurement.memory_gib]
    drift_from = find_drift(timed, gpu)
    return drift_from, _time_task(timed, gpu, drift_from), _memory_task(weighed, gpu)


def _calibration(
    measurements: Sequence[Measurement],
    gpu: GpuModel,
    drift_from: date | None,
    time_task: _Task,
    time_fit: _Fitted,
    memory_task: _Task,
    memory_fit: _Fitted,
) -> Calibration:
    timed = [measurement for measurement in measurements if measurement.seconds]
    return Calibration(
        gpu=gpu,
        constants=replace(priors_for(gpu), **_values(time_task, time_fit.fit), **_values(memory_task, memory_fit.fit)),
        spreads=_spreads(time_task, time_fit.fit, memory_task, memory_fit.fit),
        drift_from=drift_from,
        has_blocking_launches=2 * sum(measurement.setup.has_blocking_launches for measurement in timed) > len(timed),
        time_neighbours=time_fit.neighbours,
        memory_neighbours=memory_fit.neighbours,
        framework=_only(counted_framework(measurement.setup.framework) for measurement in measurements),
        attention=_only(measurement.setup.technique.attention for measurement in measurements),
    )


def _only(values: Iterable[_Value]) -> _Value | None:
    """Return what all rows have in common, or None if they differ."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None


def _values(task: _Task, fit: Fit) -> dict[str, float]:
    return dict(zip(task.names, fit.values, strict=True))


def _spreads(time_task: _Task, time_fit: Fit, memory_task: _Task, memory_fit: Fit) -> tuple[float, ...]:
    """Return the spreads in the order of `CONSTANTS`; constants that were not fitted keep that of the prior."""
    found = {
        **dict(zip(time_task.names, time_fit.spreads, strict=True)),
        **dict(zip(memory_task.names, memory_fit.spreads, strict=True)),
    }
    return tuple(found.get(constant.name, constant.spread) for constant in CONSTANTS)


def _time_task(timed: Sequence[Measurement], gpu: GpuModel, drift_from: date | None) -> _Task:
    works = [count_work(measurement.setup, gpu) for measurement in timed]
    names = TIME_CONSTANTS if drift_from else tuple(name for name in TIME_CONSTANTS if name != "drift")
    ordinal = drift_from.toordinal() if drift_from else None
    return _Task(
        names,
        lambda constants: _seconds(works, constants, ordinal),
        tuple(measurement.seconds or 0.0 for measurement in timed),
        tuple(point_of(measurement.setup) for measurement in timed),
        TIME_SCALES,
        TIME_NUGGET,
        priors_for(gpu),
    )


def _seconds(works: Sequence[StepWork], constants: Constants, drift_from: int | None) -> list[float]:
    rates = rates_of(constants)
    return [step_seconds(work, rates) * drift_on(work.day_ordinal, constants.drift, drift_from) for work in works]


def _memory_task(weighed: Sequence[Measurement], gpu: GpuModel) -> _Task:
    works = [
        [count_memory(measurement.setup, stage) for stage in outer_stages(measurement.setup)] for measurement in weighed
    ]
    return _Task(
        MEMORY_CONSTANTS,
        lambda constants: [max(weigh_memory(work, constants, gpu)[1] for work in stages) for stages in works],
        tuple(measurement.memory_gib or 0.0 for measurement in weighed),
        tuple(point_of(measurement.setup) for measurement in weighed),
        MEMORY_SCALES,
        MEMORY_NUGGET,
        priors_for(gpu),
    )


def _residuals(task: _Task, values: Sequence[float]) -> list[float]:
    predicted = task.predict(Constants.of_values(dict(zip(task.names, values, strict=True))))
    return [math.log(one / other) for one, other in zip(predicted, task.measured, strict=True)]


def _priors(task: _Task) -> list[Prior]:
    expected = task.expected.as_dict()
    return [
        Prior(expected[constant.name], constant.spread, constant.least, constant.most)
        for constant in CONSTANTS
        if constant.name in task.names
    ]


def _fit_only(task: _Task) -> Fit:
    return fit_constants(lambda values: _residuals(task, values), _priors(task))


def _fit_again(task: _Task, values: Sequence[float], noise: float, num_iterations: int) -> Fit:
    """Fit from values that are nearly right, with the noise that was found with them."""
    return fit_constants(lambda values: _residuals(task, values), _priors(task), values, num_iterations, (noise,))


def _fit(task: _Task) -> _Fitted:
    fit = _fit_only(task)
    residuals = tuple(-residual for residual in _residuals(task, fit.values))
    inverse = invert_kernel(task.points, task.scales, task.nugget)
    constants = Constants.of_values(_values(task, fit))
    return _Fitted(fit, constants, residuals, inverse, interpolate(task.points, residuals, inverse, task.scales))


def _best_fit(task: _Task) -> tuple[_Fitted, ErrorSummary]:
    """Return what predicts rows that are left out best, with its errors: the fit, or the expected constants with the
    measured neighbours or without. So a few rows make no prediction worse than none would."""
    fitted = _fit(task)
    priors = _priors(task)
    values, spreads = tuple(prior.value for prior in priors), tuple(prior.spread for prior in priors)
    residuals = tuple(-residual for residual in _residuals(task, values))
    near = interpolate(task.points, residuals, fitted.inverse, task.scales)
    alone = replace(near, weights=(0.0,) * len(residuals))
    expected = _Fitted(Fit(values, spreads, fitted.fit.noise), task.expected, residuals, fitted.inverse, near)
    guessed = leave_one_out(residuals, fitted.inverse)
    candidates = (
        (fitted, _left_out_errors(task, fitted)),
        (expected, _errors_of(task, [one - other for one, other in zip(guessed, residuals, strict=True)])),
        (replace(expected, neighbours=alone), _errors_of(task, [-residual for residual in residuals])),
    )
    return min(candidates, key=lambda candidate: candidate[1].mean) if len(residuals) > 1 else candidates[0]


def _errors_of(task: _Task, logarithms: Sequence[float]) -> ErrorSummary:
    """Return for each row the closeness of its nearest neighbour, and the error whose logarithm is given."""
    if len(logarithms) < 2:
        return ErrorSummary()
    nearest = (
        max(kernel_row(point, [*task.points[:index], *task.points[index + 1 :]], task.scales))
        for index, point in enumerate(task.points)
    )
    return ErrorSummary(tuple((near, abs(math.expm1(error))) for near, error in zip(nearest, logarithms, strict=True)))


def find_drift(timed: Sequence[Measurement], gpu: GpuModel) -> date | None:
    """Return the day since which the same work takes a different time, or None.

    Similar setups should have similar errors on all days; it is the day that best achieves this.
    """
    days = sorted(measurement.setup.day for measurement in timed if measurement.setup.day)
    steady = _time_task(timed, gpu, None)
    start = _fit_only(steady)
    ageless = (*TIME_SCALES[:DAY_AXIS], math.inf, *TIME_SCALES[DAY_AXIS + 1 :])
    inverse = invert_kernel(steady.points, ageless, DRIFT_NUGGET)
    best_day, best_cost = None, _discord(_residuals(steady, start.values), inverse) - DRIFT_GAIN
    for day in sorted(set(days))[1:]:
        if min(sum(other < day for other in days), sum(other >= day for other in days)) < DRIFT_ROWS:
            continue
        task = _time_task(timed, gpu, day)
        fit = _fit_again(task, (*start.values, 1.0), start.noise, num_iterations=5)
        cost = _discord(_residuals(task, fit.values), inverse)
        if cost < best_cost:
            best_day, best_cost = day, cost
    return best_day


def _discord(residuals: Sequence[float], inverse: list[list[float]]) -> float:
    """Return how much the errors of similar setups differ; outliers count as 10 %."""
    clipped = [max(-0.1, min(0.1, residual)) for residual in residuals]
    return sum(one * sum(map(float.__mul__, row, clipped)) for one, row in zip(clipped, inverse, strict=True)) * 400


def _left_out_errors(task: _Task, fitted: _Fitted) -> ErrorSummary:
    """Return for each row the closeness of its nearest neighbour and the error when the other rows predict it."""
    count = len(task.measured)
    errors = []
    for index in range(count if count > 1 else 0):
        others = [other for other in range(count) if other != index]
        fit = _fit_again(task.subset(others), fitted.fit.values, fitted.fit.noise, LEFT_OUT_ITERATIONS)
        residuals = [-residual for residual in _residuals(task, fit.values)]
        errors.append(leave_one_out(residuals, fitted.inverse)[index] - residuals[index])
    return _errors_of(task, errors)


def _learning_curve(task: _Task) -> tuple[tuple[int, float], ...]:
    """Return the mean error on the remaining rows after fitting 4, 8, 16, ... of them, each three times."""
    count, shuffled = len(task.measured), random.Random(0)
    curve = []
    size = 4
    while size <= count // 2:
        errors: list[float] = []
        for _ in range(3):
            order = shuffled.sample(range(count), count)
            errors += _errors_of_rest(task, order[:size], order[size:])
        curve.append((size, sum(errors) / len(errors)))
        size *= 2
    return tuple(curve)


def _errors_of_rest(task: _Task, given: Sequence[int], rest: Sequence[int]) -> list[float]:
    fitted = _fit(task.subset(given))
    predicted = task.predict(fitted.constants)
    corrected = [predicted[index] * fitted.neighbours.look_up(task.points[index])[0] for index in rest]
    return [abs(one / task.measured[index] - 1) for one, index in zip(corrected, rest, strict=True)]

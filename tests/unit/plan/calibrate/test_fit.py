"""The robust fit and the interpolation between neighbours, on made-up data with known answers."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.plan.calibrate.fit import NOISES, Prior, fit_constants
from bigsci_launch.plan.price.neighbours import (
    TIME_NUGGET,
    Neighbours,
    Point,
    interpolate,
    invert_kernel,
    invert_positive_definite,
    kernel_row,
    leave_one_out,
)

SCALES = (1.0,) * 10


def residuals_of(xs: list[float], ys: list[float]):  # type: ignore[no-untyped-def]
    return lambda values: [math.log((values[0] + values[1] * x) / y) for x, y in zip(xs, ys, strict=True)]


def test_constants_are_found_again() -> None:
    xs = [float(x) for x in range(20)]
    ys = [3 + 0.5 * x for x in xs]
    fit = fit_constants(residuals_of(xs, ys), [Prior(1, 2), Prior(1, 2)])
    assert fit.values == pytest.approx((3, 0.5), rel=1e-2)


def test_an_outlier_moves_little() -> None:
    source = random.Random(0)
    xs = [float(x) for x in range(40)]
    ys = [(3 + 0.5 * x) * math.exp(source.gauss(0, 0.01)) for x in xs]
    ys[7] *= 2
    fit = fit_constants(residuals_of(xs, ys), [Prior(1, 2), Prior(1, 2)])
    assert fit.values == pytest.approx((3, 0.5), rel=0.05)


@pytest.mark.parametrize(("noise", "least", "most"), [(0.01, 0.02, 0.03), (0.08, 0.045, 0.15)])
def test_the_noise_of_the_rows_is_found(noise: float, least: float, most: float) -> None:
    source = random.Random(1)
    xs = [float(x) for x in range(40)]
    ys = [(3 + 0.5 * x) * math.exp(source.gauss(0, noise)) for x in xs]
    assert least <= fit_constants(residuals_of(xs, ys), [Prior(1, 2), Prior(1, 2)]).noise <= most


def test_constants_that_can_explain_every_row_do_not_hide_its_noise() -> None:
    """Five rows and three free constants: what is left of an error of 10 % is far less, and is not taken for it."""
    xs = [float(x) for x in range(5)]
    found = []
    for seed in range(20):
        source = random.Random(seed)
        ys = [(3 + 0.5 * x) * math.exp(source.gauss(0, 0.1)) for x in xs]

        def residuals(values: Sequence[float], ys: list[float] = ys) -> list[float]:
            return [math.log((values[0] + values[1] * x + values[2] * x * x) / y) for x, y in zip(xs, ys, strict=True)]

        found.append(fit_constants(residuals, [Prior(1, 3)] * 3).noise)
    assert 0.065 < sum(found) / len(found) < 0.12


def test_ten_rows_of_unlike_programs_move_the_constants_less_than_if_they_were_trusted() -> None:
    priors = [Prior(3, 0.3), Prior(0.5, 0.5)]
    xs = [float(x) for x in range(10)]

    def distance(ys: list[float], noises: tuple[float, ...]) -> float:
        values = fit_constants(residuals_of(xs, ys), priors, noises=noises).values
        return sum(abs(math.log(value / prior.value)) for value, prior in zip(values, priors, strict=True))

    found, trusting = 0.0, 0.0
    for seed in range(20):
        source = random.Random(seed)
        ys = [(3 + 0.5 * x) * math.exp(source.gauss(0, 0.4)) for x in xs]
        found, trusting = found + distance(ys, NOISES), trusting + distance(ys, NOISES[:1])
    assert found < trusting / 1.5


def test_without_data_the_prior_stands() -> None:
    fit = fit_constants(lambda values: [], [Prior(12, 1), Prior(0.84, 0.3)])
    assert fit.values == pytest.approx((12, 0.84))
    assert fit.spreads == pytest.approx((1, 0.3))


def test_data_narrow_only_what_they_speak_of() -> None:
    fit = fit_constants(lambda values: [math.log(values[0] / 5)] * 8, [Prior(4, 1), Prior(2, 1)])
    assert fit.values[0] == pytest.approx(5, rel=1e-3)
    assert fit.spreads[0] < 0.02
    assert fit.spreads[1] == pytest.approx(1)


def test_a_constant_stays_within_what_is_possible_and_the_others_explain_the_rest() -> None:
    xs = [float(x) for x in range(20)]
    ys = [3 + 0.5 * x for x in xs]
    for prior, value in ((Prior(1, 2, most=2), 2), (Prior(6, 2, least=4), 4)):
        fit = fit_constants(residuals_of(xs, ys), [prior, Prior(1, 2)])
        assert fit.values[0] == pytest.approx(value)

        def left(slope: float, bound: float = value) -> float:
            return sum(abs(error) for error in residuals_of(xs, ys)([bound, slope]))

        assert left(fit.values[1]) < min(left(0.5), left(1.0))


@given(st.integers(1, 7), st.randoms(use_true_random=False))
def test_inverse(size: int, source: random.Random) -> None:
    factor = [[source.uniform(-1, 1) for _ in range(size)] for _ in range(size)]
    matrix = [[sum(a * b for a, b in zip(one, two, strict=True)) + (one is two) for two in factor] for one in factor]
    inverse = invert_positive_definite(matrix)
    for i in range(size):
        for j in range(size):
            assert sum(matrix[i][k] * inverse[k][j] for k in range(size)) == pytest.approx(float(i == j), abs=1e-8)


def points(count: int) -> list[Point]:
    source = random.Random(1)
    return [tuple(source.uniform(0, 4) for _ in range(10)) for _ in range(count)]


def test_a_plan_beside_a_measured_one_takes_over_its_error() -> None:
    where = points(8)
    residuals = [0.05] * 8
    neighbours = interpolate(where, residuals, invert_kernel(where, SCALES, TIME_NUGGET), SCALES)
    factor, closeness = neighbours.look_up(where[3])
    assert closeness == 1
    assert factor == pytest.approx(math.exp(0.05), abs=0.004)


def test_a_plan_far_from_all_keeps_the_models_figure() -> None:
    where = points(8)
    neighbours = interpolate(where, [0.05] * 8, invert_kernel(where, SCALES, TIME_NUGGET), SCALES)
    factor, closeness = neighbours.look_up((100.0,) * 10)
    assert closeness < 1e-9
    assert factor == pytest.approx(1)
    assert Neighbours().look_up(where[0]) == (1.0, 0.0)


def test_days_that_are_not_given_are_at_no_distance() -> None:
    dated, undated = (0.0,) * 10, (*(0.0,) * 7, math.inf, 0.0, 0.0)
    assert kernel_row(undated, [dated], SCALES) == [1.0]


def test_left_out_is_what_the_others_interpolate() -> None:
    where, source = points(9), random.Random(2)
    residuals = [source.gauss(0, 0.05) for _ in where]
    guessed = leave_one_out(residuals, invert_kernel(where, SCALES, TIME_NUGGET))
    for index, point in enumerate(where):
        others = [other for other in range(len(where)) if other != index]
        rest = [where[other] for other in others]
        without = interpolate(
            rest, [residuals[other] for other in others], invert_kernel(rest, SCALES, TIME_NUGGET), SCALES
        )
        assert math.log(without.look_up(point)[0]) == pytest.approx(guessed[index], abs=1e-9)

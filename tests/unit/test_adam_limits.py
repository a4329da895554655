"""How large AdamW's first moment can be: no gradients pass the bound, and the worst ones reach it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.adam_limits import moment_bound

BETAS = ((0.9, 0.95), (0.9, 0.999), (0.95, 0.9), (0.9, 0.81), (0.0, 0.5))
BELOW_1 = st.floats(0, 1, exclude_max=True)


def trained(betas: Any, gradients: Any, first: Any = 0.0, second: Any = 0.0) -> tuple[Any, Any]:
    """Return both moments after these gradients."""
    one, two = betas
    for gradient in gradients:
        first, second = one * first + (1 - one) * gradient, two * second + (1 - two) * gradient**2
    return first, second


@pytest.mark.parametrize("betas", BETAS)
def test_no_gradients_pass_the_bound_and_the_worst_ones_reach_it(betas: Any) -> None:
    draw = np.random.default_rng(1)
    one, two = betas
    for num_steps in (1, 2, 7, 60):
        limit = moment_bound(betas, num_steps)
        for scale in (1.0, 1e-3):
            first, second = trained(betas, draw.standard_cauchy((num_steps, 500)) * scale)
            assert (np.abs(first) <= limit * np.sqrt(second) * (1 + 1e-9)).all()
        # Cauchy-Schwarz is an equality for gradients in proportion to (b1/b2)^age.
        first, second = trained(betas, [(one / two) ** age for age in range(num_steps - 1, -1, -1)])
        assert first / math.sqrt(second) == pytest.approx(limit, rel=1e-9)


@pytest.mark.parametrize("betas", BETAS)
def test_moments_of_other_betas_move_the_bound_as_far_as_they_can(betas: Any) -> None:
    before = trained((0.9, 0.999), np.random.default_rng(2).standard_cauchy((50, 400)))
    had = float((np.abs(before[0]) / np.sqrt(before[1])).max())
    for num_steps in (0, 1, 3, 30):
        gradients = np.random.default_rng(3).standard_normal((num_steps, 400))
        first, second = trained(betas, gradients, *before)
        assert (np.abs(first) <= moment_bound(betas, num_steps, had) * np.sqrt(second) * (1 + 1e-9)).all()


def test_a_bound_for_any_number_of_steps_is_that_for_many() -> None:
    assert moment_bound((0.9, 0.999)) == pytest.approx(moment_bound((0.9, 0.999), 400)) == pytest.approx(7.27, abs=1e-2)
    for betas in ((0.99, 0.9), (0.9, 1.0), (0.9, 0.0), (1.0, 0.9), (math.nan, 0.9)):
        assert moment_bound(betas) == math.inf


@given(BELOW_1, BELOW_1, st.integers(0, 10**9) | st.just(math.inf), st.floats(0, allow_nan=False))
def test_the_bound_is_a_number_for_all_betas(one: float, two: float, num_steps: float, before: float) -> None:
    assert moment_bound((one, two), num_steps, before) >= 0

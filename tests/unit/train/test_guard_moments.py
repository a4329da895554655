"""The limits that AdamW's own recurrences put on its moments, and the seal between two steps."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")

from bigsci_launch.train.guards.moments import (  # noqa: E402
    MomentLimits,
    Range,
    find_used_padding,
    find_wrong_moments,
    largest_factor,
    moment_factor,
)
from bigsci_launch.train.guards.seal import Seal, sample_of  # noqa: E402
from bigsci_launch.train.guards.state import OptimizerPartition  # noqa: E402

pytestmark = pytest.mark.torch

BETAS = ((0.9, 0.95), (0.9, 0.999), (0.95, 0.9), (0.9, 0.81), (0.0, 0.5))


def trained(betas: Any, gradients: Any, first: Any = 0.0, second: Any = 0.0) -> tuple[Any, Any]:
    """Return both moments after these gradients."""
    one, two = betas
    for gradient in gradients:
        first, second = one * first + (1 - one) * gradient, two * second + (1 - two) * gradient**2
    return first, second


@pytest.mark.parametrize("betas", BETAS)
def test_no_gradients_pass_the_limit_and_the_worst_ones_reach_it(betas: Any) -> None:
    draw = np.random.default_rng(1)
    one, two = betas
    for num_steps in (1, 2, 7, 60):
        limit = moment_factor(betas, num_steps)
        for scale in (1.0, 1e-3):
            gradients = draw.standard_cauchy((num_steps, 500)) * scale
            first, second = trained(betas, gradients)
            assert (np.abs(first) <= limit * np.sqrt(second) * (1 + 1e-9)).all()
        # Cauchy-Schwarz is an equality for gradients in proportion to (b1/b2)^age.
        first, second = trained(betas, [(one / two) ** age for age in range(num_steps - 1, -1, -1)])
        assert first / math.sqrt(second) == pytest.approx(limit, rel=1e-9)


@pytest.mark.parametrize("betas", BETAS)
def test_moments_of_other_betas_move_the_limit_as_far_as_they_can(betas: Any) -> None:
    before = trained((0.9, 0.999), np.random.default_rng(2).standard_cauchy((50, 400)))
    had = float((np.abs(before[0]) / np.sqrt(before[1])).max())
    for num_steps in (0, 1, 3, 30):
        gradients = np.random.default_rng(3).standard_normal((num_steps, 400))
        first, second = trained(betas, gradients, *before)
        assert (np.abs(first) <= moment_factor(betas, num_steps, had) * np.sqrt(second) * (1 + 1e-9)).all()


def a_partition() -> tuple[OptimizerPartition, dict[str, Any]]:
    """Return a partition with two parameters, trained for ten steps of clipped gradients."""
    torch.manual_seed(5)
    master = torch.randn(1000)
    first, second = trained((0.9, 0.95), torch.randn(10, 1000) / 100)
    state = {"exp_avg": first, "exp_avg_sq": second, "step": torch.tensor(10.0)}
    part = OptimizerPartition("decay", master.bfloat16(), master, {"a": (0, 300), "b": (300, 700)})
    return part, state


LIMITS = MomentLimits(moment_factor((0.9, 0.95), 10), 0.2)


def findings(part: Any, state: Any, limits: MomentLimits = LIMITS) -> list[tuple[str, str]]:
    return [(found.tensor, found.text) for found in find_wrong_moments(part, state, limits, 0)]


def test_healthy_moments_pass() -> None:
    part, state = a_partition()
    assert findings(part, state) == []
    assert findings(part, {}) == []
    assert 0 < largest_factor(state["exp_avg"], state["exp_avg_sq"]) < LIMITS.factor


@pytest.mark.parametrize(
    ("key", "value", "tensor", "words"),
    [
        ("exp_avg", math.nan, "first moment of b", "1 of 700 elements are not finite"),
        ("exp_avg", 1e34, "first moment of b", "holds 1e+34, and no run comes to more than 0.2"),
        ("exp_avg", 0.15, "first moment of b", "times the root of the second moment; AdamW's betas allow 1.04"),
        ("exp_avg_sq", -1e-9, "second moment of b", "holds -1e-09, though it is a mean of squares"),
        ("exp_avg_sq", 0.5, "second moment of b", "holds 0.5, and no run comes to more than 0.04"),
        ("exp_avg_sq", math.inf, "second moment of b", "1 of 700 elements are not finite"),
        ("master", 1e7, "fp32 master of b", "holds 1e+07"),
        ("master", math.nan, "fp32 master of b", "1 of 700 elements are not finite"),
    ],
)
def test_impossible_numbers_are_named(key: str, value: float, tensor: str, words: str) -> None:
    part, state = a_partition()
    (part.master if key == "master" else state[key])[400] = value
    found = dict(findings(part, state))
    assert words in found[tensor]
    assert not any(name.endswith(" of a") for name in found)


def test_gradients_too_small_to_square_in_32_bits_are_no_finding() -> None:
    part, state = a_partition()
    state["exp_avg"], state["exp_avg_sq"] = torch.full((1000,), 1e-19), torch.zeros(1000)
    assert findings(part, state) == []
    state["exp_avg"] *= 1e6
    assert findings(part, state) != []


def test_padding_is_zero() -> None:
    rows = torch.zeros(10)
    where = [Range("embedding", 6, 10)]
    assert list(find_used_padding(where, {"first moment": rows}, 0)) == []
    rows[5] = 1
    assert list(find_used_padding(where, {"first moment": rows}, 0)) == []
    rows[6] = 1e-30
    (found,) = find_used_padding(where, {"first moment": rows}, 3)
    assert (found.check, found.tensor, found.ranks) == ("padding", "first moment of embedding", (3,))


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_seal_is_whole_until_something_changes(is_whole: bool) -> None:
    part, state = a_partition()
    seal = Seal([part], [state], 2)
    assert list(seal.find_broken()) == []
    seal.take(7, is_whole=is_whole)
    assert list(seal.find_broken()) == []
    state["exp_avg"][300:] = 0
    state["exp_avg_sq"] *= 100
    state["step"] -= 1
    found = {each.tensor: each for each in seal.find_broken()}
    assert found.keys() == {"first moment of b", "second moment of a", "step count of group decay"}
    assert {each.ranks for each in found.values()} == {(2,)}
    assert "after the end of step 7, when nothing may change it: it is zero" in found["first moment of b"].text
    assert "(and of 1 more tensors)" in found["second moment of a"].text
    assert ("each 100 times what it was" in found["second moment of a"].text) == (not is_whole)
    seal.take(8, is_whole=is_whole)
    assert list(seal.find_broken()) == []


def test_a_whole_seal_sees_any_bit_and_a_sampled_one_sees_it_in_time() -> None:
    part, state = a_partition()
    seal = Seal([part], [state], 0)
    for at in range(300, 1000, 70):
        seal.take(1, is_whole=True)
        state["exp_avg_sq"].view(torch.int32)[at] ^= 1
        assert [each.tensor for each in seal.find_broken()] == ["second moment of b"]
    seen = 0
    for step in range(100):
        seal.take(step, is_whole=False)
        state["exp_avg_sq"].view(torch.int32)[777] ^= 1
        seen += bool(list(seal.find_broken()))
    assert 20 < seen < 60


def test_samples_stay_in_their_parameters_and_take_small_ones_whole() -> None:
    part, _ = a_partition()
    for step in range(50):
        at = sample_of(part, step)
        assert len(at) == len(set(at.tolist())) == 512
        assert int(at.min()) >= 0
        assert int(at.max()) < 1000
    small = OptimizerPartition("no_decay", part.weights, part.master, {"a": (5, 10), "c": (20, 0), "b": (30, 256)})
    assert sorted(sample_of(small, 3).tolist()) == [*range(5, 15), *range(30, 286)]
    empty = OptimizerPartition("no_decay", part.weights[:0], part.master[:0], {})
    assert len(sample_of(empty, 3)) == 0

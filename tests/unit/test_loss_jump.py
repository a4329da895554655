"""Whether a loss that continues has jumped: against the run's own noise, and never claimed from too few steps."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bigsci_launch.loss_jump import MIN_CHANGES, LossJump, describe_jump, measure_jump
from tests.support.texts import CheckText, has_parts

NOISE = 0.02


def losses(first: int, last: int, seed: int, noise: float = NOISE) -> dict[int, float]:
    drawn = np.random.default_rng(seed).standard_normal(last + 1 - first).tolist()
    return {step: 10 * step**-0.2 + noise * drawn[step - first] for step in range(first, last + 1)}


def restart(at: int, seed: int, rise: float = 0.0, *, num_after: int = 5, first: int | None = None) -> LossJump:
    """The jump where a run continues after step `at`, from where on its loss is higher by `rise`."""
    whole = losses(max(1, at - 40) if first is None else first, at + num_after, seed)
    before = {step: loss for step, loss in whole.items() if step <= at}
    return measure_jump(before, {step: loss + rise for step, loss in whole.items() if step > at})


@pytest.mark.parametrize("at", [12, 20, 60, 400])
def test_a_healthy_restart_is_hardly_ever_a_jump(at: int) -> None:
    called = [restart(at, seed).is_jump for seed in range(400)]
    assert sum(called) <= 2


@pytest.mark.parametrize(("at", "rise"), [(12, 2.0), (60, 0.4), (400, 0.4)])
def test_a_jump_of_many_spreads_is_always_seen(at: int, rise: float) -> None:
    assert all(restart(at, seed, rise).verdict == "spike" for seed in range(100))


def test_a_small_rise_that_stays_is_seen_in_the_mean_of_the_first_steps() -> None:
    """Four and a half times the noise: the first step alone shows it in half of the runs."""
    found = [restart(200, seed, 4.5 * NOISE) for seed in range(300)]
    by_first_step = sum(jump.spreads is not None and jump.spreads >= jump.limit for jump in found)
    assert sum(jump.is_jump for jump in found) > by_first_step + 10
    seen = next(jump for jump in found if jump.is_rise and (jump.spreads or 0) < jump.limit)
    assert has_parts(describe_jump(seen), "restart spike: ", "mean of 3 steps")


@pytest.mark.parametrize("num_steps", [1, 2, 8])
def test_too_few_steps_are_not_known_to_be_anything(num_steps: int) -> None:
    jump = restart(100, 0, 3.0, first=101 - num_steps)
    assert (jump.verdict, jump.spread, jump.is_jump) == ("unknown", None, False)


def test_few_steps_call_for_more_spreads_than_many() -> None:
    limits = [restart(100, 0, first=100 - count).limit for count in (MIN_CHANGES, 12, 20, 60)]
    assert limits == sorted(limits, reverse=True) and limits[0] > 7 and limits[-1] == 5


@pytest.mark.parametrize("lost", [math.nan, math.inf])
@pytest.mark.parametrize("step", [51, 53])
def test_a_loss_that_is_lost_in_the_first_steps_is_a_spike(step: int, lost: float) -> None:
    whole = losses(1, 55, 0)
    before = {at: loss for at, loss in whole.items() if at <= 50}
    jump = measure_jump(before, {at: lost if at == step else loss for at, loss in whole.items() if at > 50})
    assert jump.verdict == "spike" and f"step {step}" in describe_jump(jump)


@pytest.mark.parametrize("after", [3.0, math.nan])
def test_a_loss_that_was_lost_before_the_restart_is_no_spike(after: float) -> None:
    before = {**losses(1, 49, 0), 50: math.nan}
    jump = measure_jump(before, {51: after})
    assert jump.verdict == "unknown"


def test_each_verdict_has_its_sentence(check_text: CheckText) -> None:
    whole, lost = losses(1, 60, 0), {50: math.nan}
    early = {step: loss for step, loss in whole.items() if step <= 50}
    late = {step: loss for step, loss in whole.items() if step > 50}
    found = [restart(60, 0), restart(60, 0, 2.0), restart(100, 0, 3.0, first=98), measure_jump(early, {51: math.inf})]
    found += [measure_jump({**early, **lost}, {51: 3.0}), measure_jump(whole, late)]
    found += [measure_jump(whole, {step: loss + 0.01 for step, loss in late.items()})]
    check_text(*(f"{jump.verdict}: {describe_jump(jump)}" for jump in found))


def test_the_same_steps_are_compared_with_each_other() -> None:
    whole = losses(1, 60, 0)
    again = {step: loss for step, loss in whole.items() if step > 50}
    assert measure_jump(whole, again).verdict == "equal"
    other = measure_jump(whole, {step: loss + 0.01 for step, loss in again.items()})
    assert (other.verdict, other.jump) == ("other loss", pytest.approx(0.01))
    assert "in attempt 0001" in describe_jump(other, source="in attempt 0001")
    rounded = measure_jump(whole, {step: loss * (1 + 1e-6) for step, loss in again.items()})
    assert rounded.verdict == "no jump"

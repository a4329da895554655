"""The expected run: exact sums, a simulation of the same failures, and its speed."""

from __future__ import annotations

import random
import time
from math import comb, exp, sqrt

import pytest

from bigsci_launch.plan.survive.expected import expected_run
from bigsci_launch.plan.survive.trace import FailureTrace, NodeEvent, Strategy, replay


def stairs(nodes: int) -> float:
    """Whole replicas of 4 nodes, at least 2 of them."""
    return float(nodes // 4 * 4) if nodes >= 8 else 0.0


def test_without_pauses_it_is_the_integral_over_the_binomial_number_of_nodes() -> None:
    num_nodes, mtbf, horizon, steps = 13, 70.0, 48.0, 4000
    total = 0.0
    for step in range(steps):
        left = exp(-(step + 0.5) * horizon / steps / mtbf)
        total += sum(
            comb(num_nodes, n) * left**n * (1 - left) ** (num_nodes - n) * stairs(n) for n in range(num_nodes + 1)
        )
    found = expected_run(Strategy("s", stairs, lambda before, after: 0.0), num_nodes, mtbf, horizon)
    assert found.effective_share == pytest.approx(total / steps / stairs(num_nodes), rel=1e-6)
    assert found.num_losses == pytest.approx(num_nodes * (1 - exp(-horizon / mtbf)))
    assert found.paused_share == 0


def test_it_agrees_with_a_simulation_within_four_standard_errors() -> None:
    num_nodes, mtbf, horizon, runs = 16, 60.0, 40.0, 2500
    strategy = Strategy("s", stairs, lambda before, after: 1800.0)
    drawn = random.Random(17)
    shares, paused, stopped = [], [], []
    for _ in range(runs):
        times = sorted(drawn.expovariate(1 / mtbf) for _ in range(num_nodes))
        events = tuple(NodeEvent(3600 * hours, "remove") for hours in times if hours < horizon)
        found = replay(FailureTrace(num_nodes, events, 3600 * horizon), strategy)
        shares.append(found.effective_share)
        paused.append(found.paused_s / found.seconds)
        stopped.append(found.stopped_s / found.seconds)
    expected = expected_run(strategy, num_nodes, mtbf, horizon)
    for sample, value in (
        (shares, expected.effective_share),
        (paused, expected.paused_share),
        (stopped, expected.stopped_share),
    ):
        mean = sum(sample) / runs
        error = sqrt(sum((one - mean) ** 2 for one in sample) / (runs - 1) / runs)
        assert abs(mean - value) < 4 * error < 0.02


def test_nodes_that_hardly_fail_lose_hardly_anything() -> None:
    strategy = Strategy("s", float, lambda before, after: 60.0)
    assert expected_run(strategy, 100, 1e9, 24).effective_share == pytest.approx(1, abs=1e-6)


def test_nodes_that_fail_at_once_train_nothing() -> None:
    found = expected_run(Strategy("s", stairs, lambda before, after: 60.0), 16, 1e-3, 1000)
    assert found.effective_share < 1e-5 and found.stopped_share > 0.999 and found.num_losses == 16


def test_a_pause_longer_than_the_horizon_leaves_only_the_time_before_the_first_loss() -> None:
    found = expected_run(Strategy("s", float, lambda before, after: 1e9), 4, 10, 10)
    assert found.effective_share == pytest.approx((1 - exp(-4)) / 4)


@pytest.mark.parametrize(("mtbf", "horizon"), [(0, 1), (1, 0), (-1, 1)])
def test_times_must_be_positive(mtbf: float, horizon: float) -> None:
    with pytest.raises(ValueError, match="nothing to expect"):
        expected_run(Strategy("s", float, lambda before, after: 0), 4, mtbf, horizon)


@pytest.mark.parametrize("mtbf", [200.0, 5000.0, 100_000.0])
def test_a_thousand_nodes_take_less_than_a_fifth_of_a_second(mtbf: float) -> None:
    strategy = Strategy("s", float, lambda before, after: 60 + after / 10)
    began = time.process_time()
    found = expected_run(strategy, 1000, mtbf, 720)
    assert time.process_time() - began < 0.2
    assert 0 < found.effective_share < 1

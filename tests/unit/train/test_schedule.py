"""Learning rate and batch size as functions of progress."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.config.schema.run import OptimizerSection, RampupSection, TrainingSection
from bigsci_launch.train.steps.schedule import BatchSize, LearningRate


def test_learning_rate_rises_falls_and_stays() -> None:
    rate = LearningRate(peak=1.0, floor=0.1, warmup_steps=4, decay_steps=20)
    assert [rate.at(step) for step in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert rate.at(12) == pytest.approx(0.55)
    assert rate.at(16) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.75)))
    assert [rate.at(step) for step in (20, 21, 1000)] == [0.1, 0.1, 0.1]


def test_without_warm_up_the_first_step_is_near_the_peak() -> None:
    rate = LearningRate(peak=1.0, floor=0.0, warmup_steps=0, decay_steps=100)
    assert rate.at(1) == pytest.approx(0.5 * (1 + math.cos(math.pi / 100)))


def test_the_decay_ends_with_the_training_unless_told() -> None:
    training = TrainingSection(steps=50, micro_batch_size=1, global_batch_size=8)
    assert LearningRate.of_config(OptimizerSection(), training).decay_steps == 50
    assert LearningRate.of_config(OptimizerSection(decay_steps=70), training).decay_steps == 70


@given(st.integers(0, 50), st.integers(1, 200), st.integers(1, 400))
def test_learning_rate_never_leaves_its_bounds(warmup: int, decay_after: int, step: int) -> None:
    rate = LearningRate(peak=3.0, floor=1.0, warmup_steps=warmup, decay_steps=warmup + decay_after)
    assert 0.0 < rate.at(step) <= 3.0
    if step >= warmup:
        assert rate.at(step) >= rate.at(step + 1) >= 1.0


def test_ramp_is_megatrons() -> None:
    """BLOOM's: 192 to 2048 in steps of 16 over 9,765,625 samples: 116 increments of 84,186.4 samples."""
    ramp = BatchSize(full=2048, start=192, increment=16, samples=9_765_625)
    assert ramp.at(0) == 192
    assert ramp.at(84_186) == 192
    assert ramp.at(84_187) == 208
    assert ramp.at(9_765_624) == 2032
    assert ramp.at(9_765_625) == 2048
    assert ramp.at(10**9) == 2048


def test_bloom_takes_the_steps_that_its_log_shows() -> None:
    ramp = BatchSize(full=2048, start=192, increment=16, samples=9_765_625)
    consumed = step = 0
    while consumed + ramp.at(consumed) <= 220_000_000:
        consumed, step = consumed + ramp.at(consumed), step + 1
    assert step == 115_311


def test_no_ramp_means_one_size() -> None:
    training = TrainingSection(steps=1, micro_batch_size=2, global_batch_size=16)
    assert BatchSize.of_config(training).at(5) == 16


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 20), st.integers(1, 1000))
def test_ramp_only_rises_and_takes_only_its_sizes(start: int, increment: int, increments: int, samples: int) -> None:
    full = start + increment * increments
    rampup = RampupSection(start=start, increment=increment, samples=samples)
    ramp = BatchSize.of_config(TrainingSection(steps=1, micro_batch_size=1, global_batch_size=full, rampup=rampup))
    sizes = [ramp.at(consumed) for consumed in range(0, samples + 5)]
    assert sizes == sorted(sizes)
    assert set(sizes) <= set(range(start, full + 1, increment))
    assert sizes[samples] == full

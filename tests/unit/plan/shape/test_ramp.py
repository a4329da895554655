"""Phases of the batch-size ramp-up, against the trainer's own rule."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from bigsci_launch.config.schema.run import RampupSection, TrainingSection
from bigsci_launch.plan.shape.ramp import count_samples, filling_batch_size, phases_of
from bigsci_launch.train.steps.schedule import BatchSize


def training(steps: int, start: int, increment: int, samples: int, full: int) -> TrainingSection:
    ramp = RampupSection(start=start, increment=increment, samples=samples)
    return TrainingSection(steps=steps, micro_batch_size=1, global_batch_size=full, rampup=ramp)


@given(st.integers(1, 300), st.integers(1, 8), st.integers(1, 4), st.integers(1, 2000), st.integers(0, 12))
def test_phases_are_what_training_does(steps: int, start: int, increment: int, samples: int, increments: int) -> None:
    section = training(steps, start, increment, samples, start + increment * increments)
    sizes, consumed = [], 0
    rule = BatchSize.of_config(section)
    for _ in range(steps):
        sizes.append(rule.at(consumed))
        consumed += sizes[-1]
    phases = phases_of(section)
    assert [size for phase in phases for size in [phase.global_batch_size] * phase.num_steps] == sizes
    assert count_samples(phases) == consumed
    assert [phase.first_step for phase in phases] == [
        1 + sum(other.num_steps for other in phases[:index]) for index in range(len(phases))
    ]


@given(st.integers(1, 50), st.integers(1, 50))
def test_without_a_ramp_there_is_one_phase(steps: int, size: int) -> None:
    assume(steps)
    (phase,) = phases_of(TrainingSection(steps=steps, micro_batch_size=1, global_batch_size=size))
    assert (phase.global_batch_size, phase.num_steps) == (size, steps)


def test_blooms_ramp_comes_to_its_220_million_samples() -> None:
    phases = phases_of(training(115311, 192, 16, 9765625, 2048))
    assert len(phases) == 117
    assert 219_990_000 < count_samples(phases) < 220_010_000


def test_the_first_batch_that_fills_the_pipeline() -> None:
    # The document writes 12*2*4 = 384 (PP*MBS*DP); 12 x 2 x 4 is 96. For PP12 MBS2 DP8, where main-5 began, it is 192;
    # 384 needs MBS 4 and DP 8.
    assert filling_batch_size(2, 4, 12) == 96
    assert filling_batch_size(2, 8, 12) == 192
    assert filling_batch_size(4, 8, 12) == 384

"""Which micro-batch sizes are legal, and what stands for `auto` before the ranks have found one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.config.load import LoadedRun
from bigsci_launch.config.micro_batches import assumed_size, legal_size_below, legal_sizes
from bigsci_launch.config.schema.run import TrainingSection
from bigsci_launch.errors import ConfigError
from bigsci_launch.topology import Topology
from tests.support.texts import has_parts


def training(batch: int, size: Any = "auto", **rampup: int) -> TrainingSection:
    section = {"steps": 10, "micro_batch_size": size, "global_batch_size": batch, "rampup": rampup or None}
    return TrainingSection.model_validate(section)


@pytest.mark.parametrize(
    ("batch", "rampup", "dp", "sizes"),
    [
        (16, {}, 2, (1, 2, 4, 8)),
        (12, {}, 1, (1, 2, 3, 4, 6, 12)),
        (64, {"start": 16, "increment": 8, "samples": 100}, 2, (1, 2, 4)),
        (16, {}, 3, ()),
    ],
)
def test_legal_sizes_divide_every_batch_of_the_ramp(batch: int, rampup: Any, dp: int, sizes: tuple[int, ...]) -> None:
    assert legal_sizes(training(batch, **rampup), dp) == sizes


@given(share=st.integers(1, 60), dp=st.integers(1, 8), start=st.integers(1, 20), steps=st.integers(1, 10))
def test_every_batch_is_a_whole_number_of_micro_batches(share: int, dp: int, start: int, steps: int) -> None:
    ramp = {"start": start * dp, "increment": share * dp, "samples": 1000}
    batch = ramp["start"] + steps * ramp["increment"]
    sizes = legal_sizes(training(batch, **ramp), dp)
    batches = range(ramp["start"], batch + 1, ramp["increment"])
    assert sizes
    assert all(each % (size * dp) == 0 for each in batches for size in sizes)


def test_the_size_below() -> None:
    assert legal_size_below((1, 2, 4, 8), 8) == 4
    assert legal_size_below((1, 3, 6), 6) == 3
    assert legal_size_below((1, 2), 1) is None


def test_what_is_assumed_fills_the_pipeline() -> None:
    assert assumed_size(training(64), Topology(tp=1, pp=4, dp=2)) == 8
    assert assumed_size(training(4), Topology(tp=1, pp=8, dp=2)) == 1
    assert assumed_size(training(64, 2), Topology(tp=1, pp=4, dp=2)) == 2


Load = Callable[..., LoadedRun]
AUTO = "training.micro_batch_size=auto"


def problems(load: Load, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(AUTO, *overrides)
    return str([each.text for each in caught.value.problems])


def test_a_run_file_may_leave_the_size_to_the_trainer(load: Load) -> None:
    assert load(AUTO).config.training.micro_batch_size == "auto"


def test_another_program_cannot_find_the_size(load: Load) -> None:
    assert "bsl train" in problems(load, "run.command=[python, train.py]")


def test_replicas_that_cannot_share_the_batch_are_refused(load: Load) -> None:
    assert has_parts(problems(load, "training.global_batch_size=15"), "batch 15", "1 x dp 2")


def test_a_ramp_that_replicas_cannot_share_is_refused(load: Load) -> None:
    ramp = ["training.rampup.start=4", "training.rampup.increment=3", "training.rampup.samples=100"]
    assert "the ramp reaches 7" in problems(load, *ramp)

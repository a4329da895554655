"""Which pipelines the ranks form, and what becomes of them: the same answer on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.errors import ConfigError
from bigsci_launch.topology import Topology
from bigsci_launch.train.uneven.layout import UnevenLayout, first_layout, next_layout
from tests.train.conftest import make_config
from tests.train.uneven_settings import UNEVEN


@pytest.fixture
def config() -> RunConfig:
    return make_config(Topology(), Path("tokens"), {"parallelism": UNEVEN})


def ranks(layout: UnevenLayout) -> list[tuple[int, ...]]:
    return [each.ranks for each in layout.pipelines]


def require_sound(layout: UnevenLayout, config: RunConfig, num_ranks: int) -> None:
    """Every rank has one place, every layer and every micro batch is there once in each pipeline or in all."""
    assert sorted(layout.places) == list(range(num_ranks))
    for each in layout.pipelines:
        # torch sorts the ranks of a group, and a stage is a place in it.
        assert list(each.ranks) == sorted(each.ranks)
        assert sum(each.counts) == config.model.num_layers
        assert len(each.counts) == len(each.ranks) in (2, 3)
    batches = [each.first + number for each in layout.pipelines for number in range(each.micro_batches)]
    assert batches == list(range(8))


@pytest.mark.parametrize("num_ranks", range(2, 12))
def test_all_ranks_are_used(config: RunConfig, num_ranks: int) -> None:
    require_sound(first_layout(config, num_ranks), config, num_ranks)


def test_too_few_ranks(config: RunConfig) -> None:
    with pytest.raises(ConfigError):
        first_layout(config, 1)


@pytest.mark.parametrize("lost", range(5))
def test_a_replacement_may_be_anywhere(config: RunConfig, lost: int) -> None:
    before = first_layout(config, 5)
    left = {rank: rank for rank in range(5) if rank != lost}
    require_sound(next_layout(config, before, left, 5), config, 5)


@pytest.mark.parametrize("lost", range(5))
def test_the_rest_of_a_broken_pipeline_is_used(config: RunConfig, lost: int) -> None:
    before = first_layout(config, 5)
    left = {rank: new for new, rank in enumerate(rank for rank in range(5) if rank != lost)}
    after = next_layout(config, before, left, 4)
    require_sound(after, config, 4)
    assert (after.failures, after.means) == (1, "simple" if lost > 1 else "borrow")


@pytest.mark.parametrize(("failures", "num_ranks", "kept"), [(0, 5, 1), (2, 7, 2), (2, 5, 1), (3, 4, 1)])
def test_f_is_that_of_the_run_file(failures: int, num_ranks: int, kept: int) -> None:
    sections = {"parallelism": UNEVEN, "survive": {"failures": failures}}
    layout = first_layout(make_config(Topology(), Path("tokens"), sections), num_ranks)
    assert layout.failures == kept and layout.record()["wanted_failures"] == failures
    assert ("cannot be kept" in layout.lines()[0]) == (kept < failures)


def test_f_is_lowered_where_it_cannot_be_kept(config: RunConfig) -> None:
    four = first_layout(config, 4)
    three = next_layout(config, four, {0: 0, 1: 1, 3: 2}, 3)
    assert (ranks(three), three.failures) == ([(0, 1, 2)], 0)
    again = next_layout(config, three, {0: 0, 1: 1, 2: 2}, 4)
    assert (len(again.pipelines), again.failures) == (2, 1)

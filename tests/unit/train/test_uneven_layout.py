"""Which pipelines the ranks form, and what becomes of them: the same answer on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.errors import ConfigError
from bigsci_launch.plan.survive.uneven import UnevenLayout, balanced_layout, first_layout, next_layout
from bigsci_launch.topology import Topology
from bigsci_launch.train.uneven.speed import WARM_UP, WINDOW, PipelineSpeeds
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


@pytest.mark.parametrize("lost", range(10))
def test_blocks_of_two_ranks_are_what_single_ranks_are(config: RunConfig, lost: int) -> None:
    """With tp 2, rank r of 5 is ranks 2 r and 2 r + 1 of 10. A block that has lost a rank is gone, or filled up."""
    sections = {"parallelism": {**UNEVEN, "tensor_parallel_size": 2}}
    double = make_config(Topology(tp=2), Path("tokens"), sections)
    one, two = first_layout(config, 5), first_layout(double, 10)
    assert [each.ranks[::2] for each in two.pipelines] == [tuple(2 * rank for rank in each) for each in ranks(one)]
    assert [ranks(lane)[1] for lane in two.lanes] == [(4, 6, 8), (5, 7, 9)]
    assert str(two.topology) == "pipelines=tp=2,0-3x4/4-9x4"
    filled = next_layout(double, two, {rank: rank for rank in range(10) if rank != lost}, 10)
    assert (ranks(filled), filled.means) == (ranks(two), "unchanged")
    left = [rank for rank in range(10) if rank // 2 != lost // 2]
    after = next_layout(double, two, {rank: new for new, rank in enumerate(left)}, 8)
    alike = next_layout(config, one, {rank // 2: new // 2 for new, rank in enumerate(left)}, 4)
    assert [each.ranks[::2] for each in after.pipelines] == [tuple(2 * rank for rank in each) for each in ranks(alike)]
    assert after.means == alike.means


def test_a_block_of_ranks_of_two_blocks_is_one_of_them(config: RunConfig) -> None:
    """Ranks 0 and 3 are lost: rank 1 and 2 form a block. It is one of the two that were, and the other is lost."""
    sections = {"parallelism": {**UNEVEN, "tensor_parallel_size": 2}}
    double = make_config(Topology(tp=2), Path("tokens"), sections)
    before = first_layout(double, 10)
    new_ranks = {2: 0, 1: 1, **{rank: rank - 2 for rank in range(4, 10)}}
    after = next_layout(double, before, new_ranks, 8)
    assert sorted(after.places) == list(range(8)) and after.means == "borrow"


@pytest.mark.parametrize(("slower", "wanted"), [(1.0, (4, 4)), (1.5, (5, 3)), (100.0, (7, 1))])
def test_micro_batches_follow_the_measured_speed(config: RunConfig, slower: float, wanted: tuple[int, ...]) -> None:
    before = first_layout(config, 4)
    after = balanced_layout(config, before, [0.5, 0.5 * slower])
    assert tuple(each.micro_batches for each in after.pipelines) == wanted
    assert [each.first for each in after.pipelines] == [0, wanted[0]]
    require_sound(after, config, 4)
    assert (ranks(after), after.means) == (ranks(before), "balanced")
    # The price is the planner's, as slow as measured; what is measured so is not priced otherwise.
    again = balanced_layout(config, after, [after.seconds * share for share in (1, 1)])
    assert after.seconds <= 0.5 * slower and again.seconds <= after.seconds * (1 + 1e-9)


@pytest.mark.parametrize(("second", "changes"), [(1.02, False), (2.0, True)])
def test_only_a_gain_changes_micro_batches(config: RunConfig, second: float, changes: bool) -> None:
    """A single slow step is no speed, and steps right after a change do not count."""
    layout, speeds = first_layout(config, 4), PipelineSpeeds(config)
    odd = [[1.0, 9.0], [1.0, 9.0], [1.0, 9.0], *[[1.0, second]] * (WARM_UP + WINDOW - 3)]
    found = [speeds.after_step(layout, each) for each in odd]
    assert [each is not None for each in found] == [False] * (len(odd) - 1) + [changes]


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

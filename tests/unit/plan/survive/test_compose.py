"""Compositions: the counts of every vector, the split of a batch against brute force, and many nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import combinations_with_replacement, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.plan.survive import compose as composing
from bigsci_launch.plan.survive.compose import (
    compose,
    compositions,
    count_compositions,
    most_nodes,
    price_composition,
    split_batch,
)
from bigsci_launch.plan.survive.cut import CutModel, find_cut
from bigsci_launch.plan.survive.schedule import StageTime
from bigsci_launch.plan.survive.templates import Template

OneStage = Callable[[float, int], Template]


@cache
def even_templates(sizes: range, num_layers: int = 24) -> dict[int, Template]:
    """Return a template for every size, one stage to a node, of a model of equal layers."""
    model = CutModel((StageTime(1.0, 2.0),) * num_layers, lambda stage, stages: num_layers, 0.05)
    cuts = {size: find_cut(model, size, 4 * size) for size in sizes}
    return {size: Template(size, cut.counts, model) for size, cut in cuts.items() if cut}


@pytest.mark.parametrize(
    ("num_nodes", "sizes", "by_failures"),
    [
        (8, range(2, 9), (7, 6, 3, 1, 0)),
        (6, range(2, 7), (4, 3, 1, 0)),
        (6, range(2, 9), (4, 3, 1, 0)),
        (7, range(2, 9), (4, 3, 1, 0)),
        (13, range(2, 8), (17, 17, 16, 10, 4, 1)),
        (13, range(3, 10), (8, 8, 5, 1, 0)),
        (16, range(3, 10), (15, 15, 13, 6, 1)),
        (21, range(3, 10), (35, 35, 35, 28, 14, 4)),
        (30, range(3, 25), (327,)),
    ],
)
def test_number_of_compositions_by_f(num_nodes: int, sizes: range, by_failures: tuple[int, ...]) -> None:
    assert count_compositions(num_nodes, sizes) == by_failures[0]
    for failures, number in enumerate(by_failures):
        assert len(list(compositions(num_nodes, sizes, failures + 1))) == number


@pytest.mark.parametrize(
    ("num_nodes", "expected"),
    [
        (8, [{2: 4}, {2: 2, 4: 1}, {2: 1, 3: 2}, {2: 1, 6: 1}, {3: 1, 5: 1}, {4: 2}, {8: 1}]),
        (7, [{2: 2, 3: 1}, {2: 1, 5: 1}, {3: 1, 4: 1}, {7: 1}]),
        (6, [{2: 3}, {2: 1, 4: 1}, {3: 2}, {6: 1}]),
    ],
)
def test_the_compositions_of_the_issue(num_nodes: int, expected: list[dict[int, int]]) -> None:
    """Those that Oobleck printed for the eight entries of a hostfile, and those for seven and six nodes."""
    found = [dict(Counter(sizes)) for sizes in compositions(num_nodes, range(2, 9))]
    assert sorted(map(sorted, found)) == sorted(map(sorted, expected))
    assert all(sizes in found for sizes in expected)


def test_f_failures_need_one_replica_more_than_f() -> None:
    """A difference from Oobleck: its filter of 2024 asks for f pipelines, so f = 3 lets {2: 1, 3: 2} pass.

    Three simultaneous losses, one in each pipeline, would then leave no whole replica. Of eight nodes only 4 x 2 has
    the fourth one.
    """
    off_by_one = [sizes for sizes in compositions(8, range(2, 9)) if len(sizes) >= 3]
    assert (2, 3, 3) in off_by_one
    assert list(compositions(8, range(2, 9), 3 + 1)) == [(2, 2, 2, 2)]
    templates = even_templates(range(2, 9))
    composed = compose(8, templates, 64, 3 + 1)
    assert composed is not None
    assert composed.sizes == (2, 2, 2, 2)
    assert compose(8, templates, 64, 4 + 1) is None


@given(st.integers(0, 10), st.sets(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 4))
def test_compositions_are_all_multisets(num_nodes: int, sizes: set[int], fewest_pipelines: int) -> None:
    expected = [
        chosen
        for count in range(fewest_pipelines, num_nodes + 1)
        for chosen in combinations_with_replacement(sorted(sizes), count)
        if sum(chosen) == num_nodes
    ]
    found = list(compositions(num_nodes, sorted(sizes), fewest_pipelines))
    assert sorted(found) == sorted(expected)
    assert len(found) == len(set(found))


def test_dead_ends_and_long_compositions_cost_nothing() -> None:
    assert list(compositions(1001, range(2, 60, 2))) == []
    assert list(compositions(2000, [1])) == [(1,) * 2000]
    assert count_compositions(1001, range(2, 60, 2)) == 0


def test_the_most_nodes_that_pipelines_can_use() -> None:
    assert most_nodes(11, [6, 7], 1) == 7
    assert most_nodes(13, [6, 7], 2) == 13
    assert most_nodes(11, [6, 7], 2) is None


@given(st.lists(st.integers(2, 30), min_size=1, max_size=3), st.integers(0, 9))
def test_no_split_of_a_batch_is_faster(one_stage: OneStage, tenths: list[int], more: int) -> None:
    templates = [one_stage(value / 10, 1) for value in tenths]
    num_micro_batches = len(templates) + more
    split = split_batch(templates, num_micro_batches)
    assert sum(split) == num_micro_batches
    assert min(split) >= 1

    def slowest(counts: tuple[int, ...]) -> float:
        return max(template.seconds(count) for template, count in zip(templates, counts, strict=True))

    splits = product(range(1, num_micro_batches + 1), repeat=len(templates))
    assert slowest(split) == min(slowest(counts) for counts in splits if sum(counts) == num_micro_batches)


@pytest.mark.parametrize("num_micro_batches", [5, 17, 64, 333])
def test_the_split_is_that_of_giving_out_one_at_a_time(num_micro_batches: int) -> None:
    """The start from the rates only saves steps; of equal pipelines the first one still gets the micro batch."""
    known = even_templates(range(2, 9))
    templates = [known[size] for size in (2, 3, 3, 5, 8)]
    counts = [1] * 5
    for _ in range(num_micro_batches - 5):
        first = min(range(5), key=lambda index: (templates[index].seconds(counts[index] + 1), index))
        counts[first] += 1
    assert split_batch(templates, num_micro_batches) == tuple(counts)


def test_the_batch_of_the_artifact(one_stage: OneStage) -> None:
    """21 nodes, f = 3, n0 = 3, 4,096 micro batches on {3: 4, 4: 1, 5: 1}: the artifact gives 594, 758 and 962 of them.

    Its layers were random. The seconds per micro batch follow from its predicted 3,639.08, 3,634.72 and 3,635.89 s. It
    minimises the variance with a solver; the slowest pipeline, on which everybody waits, needs none.
    """
    seconds = [3639.08 / 594] * 4 + [3634.72 / 758, 3635.89 / 962]
    split = split_batch([one_stage(value, 1) for value in seconds], 4096)
    assert split == (594, 594, 594, 594, 758, 962)
    assert 4 * 594 + 758 + 962 == sum(split) == 4096


def test_every_pipeline_works(one_stage: OneStage) -> None:
    """A difference from Oobleck: its solver of 2024 may give a slow pipeline no micro batch at first start.

    Its nodes would then be held for nothing, and without gradients its layers cannot take part in the mean.
    """
    assert split_batch([one_stage(1, 1), one_stage(1000, 1)], 20) == (19, 1)
    with pytest.raises(ValueError, match=r"1 micro batches .* 2 pipelines"):
        split_batch([one_stage(1, 1), one_stage(1, 1)], 1)


@pytest.mark.parametrize("num_nodes", [4, 8, 13])
@pytest.mark.parametrize("num_micro_batches", [3, 32])
def test_no_composition_is_faster(num_nodes: int, num_micro_batches: int) -> None:
    templates = even_templates(range(2, 12))
    found = compose(num_nodes, templates, num_micro_batches, 2)
    prices = [
        price_composition(option, templates, num_micro_batches)
        for option in compositions(num_nodes, sorted(templates), 2)
        if len(option) <= num_micro_batches
    ]
    assert found is not None
    assert found.seconds == min(price.seconds for price in prices)


@pytest.mark.parametrize("num_nodes", [12, 20, 30])
@pytest.mark.parametrize("num_micro_batches", [64, 512])
def test_the_highest_rate_is_nearly_the_fastest(
    monkeypatch: pytest.MonkeyPatch, num_nodes: int, num_micro_batches: int
) -> None:
    templates = even_templates(range(3, 13))
    exact = compose(num_nodes, templates, num_micro_batches, 2)
    monkeypatch.setattr(composing, "MOST_COMPOSITIONS", 0)
    quick = compose(num_nodes, templates, num_micro_batches, 2)
    assert exact is not None
    assert quick is not None
    assert len(quick.sizes) >= 2
    assert sum(quick.sizes) == num_nodes
    assert exact.seconds <= quick.seconds <= 1.05 * exact.seconds


def test_many_nodes_with_few_micro_batches_get_few_pipelines() -> None:
    """The highest rate of 200 nodes has more pipelines than micro batches here: the fewest pipelines are taken then."""
    composed = compose(200, even_templates(range(2, 25)), 12, 2)
    assert composed is not None
    assert sum(composed.sizes) == 200
    assert 2 <= len(composed.sizes) <= 12


def test_thirteen_nodes_instead_of_eight() -> None:
    """Nodes that come back are used: from 8 to 13 nodes every number has a composition with two replicas."""
    templates = even_templates(range(2, 12))
    steps = [compose(num_nodes, templates, 64, 2) for num_nodes in range(8, 14)]
    seconds = [step.seconds for step in steps if step]
    assert len(seconds) == 6
    assert seconds == sorted(seconds, reverse=True)

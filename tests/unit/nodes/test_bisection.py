"""The search for slow nodes finds them for any number of nodes, spares, and noise."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.nodes.bisection import (
    CONFIRMATIONS,
    FACTOR,
    NodeGroup,
    SlowFound,
    absorb_round,
    begin_search,
    end_search,
    next_round,
)


def search_all(
    names: list[str], slow: dict[str, float], most: int, *, smallest: int = 1, noise: float = 0.0, seed: int = 0
) -> SlowFound:
    """Run a search in which a group takes as long as its slowest node, and up to `noise` longer."""
    chance = random.Random(seed)

    def seconds(group: NodeGroup) -> float:
        assert len(group.nodes) >= smallest
        return max(slow.get(node, 1.0) for node in group.nodes) * (1 + chance.random() * noise)

    search = begin_search(names, most, smallest=smallest)
    while groups := next_round(search):
        used = [node for group in groups for node in group.nodes]
        assert len(used) == len(set(used)), "a node cannot be in two groups at once"
        search = absorb_round(search, {group: seconds(group) for group in groups})
        assert search.num_rounds < 60
    return end_search(search)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[str], dict[str, float], int, int]:
    most = draw(st.integers(1, 4))
    smallest = draw(st.integers(1, 3))
    count = draw(st.integers((most + 1) * smallest, 70))
    names = [f"n{number}" for number in range(count)]
    bad = draw(st.lists(st.sampled_from(names), max_size=most, unique=True))
    return names, {name: draw(st.floats(1.5, 20)) for name in bad}, most, smallest


@given(clusters(), st.integers(0, 2**32))
def test_it_names_exactly_the_slow_nodes(cluster: tuple[list[str], dict[str, float], int, int], seed: int) -> None:
    names, slow, most, smallest = cluster
    found = search_all(names, slow, most, smallest=smallest, noise=0.1, seed=seed)
    assert (set(found.slow), found.unexplained, found.are_too_many) == (set(slow), (), False)
    assert set(found.good) == set(names) - set(slow)
    assert sorted(found.good) == sorted(set(found.good)), "nobody is counted twice"


@given(clusters())
def test_rounds_are_few(cluster: tuple[list[str], dict[str, float], int, int]) -> None:
    names, slow, most, _ = cluster
    largest = math.ceil(len(names) / (most + 1))
    halves = math.ceil(math.log2(largest))  # between the first round and the confirmations
    assert search_all(names, slow, most).num_rounds <= halves + CONFIRMATIONS


def test_384_nodes_with_two_slow_ones_take_nine_rounds() -> None:
    names = [f"n{number}" for number in range(384)]
    found = search_all(names, {"n17": 2.0, "n300": 3.0}, 2, smallest=2, noise=0.1)
    assert (set(found.slow), found.num_rounds) == ({"n17", "n300"}, 9)


def test_noise_of_one_moment_blames_nobody() -> None:
    search = begin_search(["a", "b", "c", "d"], 1)
    for delayed in (True, False, False):
        groups = next_round(search)
        search = absorb_round(search, {group: 3.0 if delayed and "a" in group.nodes else 1.0 for group in groups})
    assert next_round(search) == []
    assert (dict(end_search(search).slow), sorted(end_search(search).good)) == ({}, ["a", "b", "c", "d"])


def test_a_slow_reference_is_corrected_when_a_faster_group_is_seen() -> None:
    search = begin_search(["a", "b", "c", "d"], 1)
    first, second = next_round(search)
    search = absorb_round(search, {first: 2.0, second: 2.0 * FACTOR * 1.1})
    # Both halves of the slower group turn out to be faster than the group that counted as fast.
    search = absorb_round(search, dict.fromkeys(next_round(search), 1.0))
    assert {group.members for group in next_round(search)} == {("a",), ("b",)}


def test_what_cannot_be_timed_is_not_known() -> None:
    search = begin_search(["a", "b", "c", "d"], 1)
    first, second = next_round(search)
    search = absorb_round(search, {first: None, second: 1.0})
    found = end_search(search)
    assert (found.unexplained, dict(found.slow), found.good) == ((("a", "b"),), {}, ("c", "d"))
    nothing = end_search(absorb_round(begin_search(["a", "b"], 1), {}))
    assert nothing.reference_s is None and nothing.unexplained == (("a",), ("b",))


def test_more_slow_nodes_than_spares_are_told() -> None:
    found = search_all([f"n{number}" for number in range(8)], {"n4": 2.0, "n7": 2.0}, 1)
    assert (set(found.slow), found.are_too_many) == ({"n4", "n7"}, True)


@pytest.mark.parametrize(("count", "most", "smallest"), [(2, 2, 1), (3, 1, 2), (4, 0, 1)])
def test_too_few_nodes_are_refused(count: int, most: int, smallest: int) -> None:
    with pytest.raises(ValueError, match="too few"):
        begin_search([f"n{number}" for number in range(count)], most, smallest=smallest)

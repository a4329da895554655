"""The search for the size of micro-batches: it finds the largest one that fits, or the fastest, in few trials."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.train.microbatch.search import SizeSearch, SizeVerdict

POWERS = tuple(2**power for power in range(8))


def run(search: SizeSearch, limit: int, seconds: Callable[[int], float] = lambda size: size / 8) -> list[int]:
    """Search where sizes up to `limit` fit, and return the sizes that were tried."""
    tried = []
    while (size := search.next_size()) is not None:
        tried.append(size)
        search.note(SizeVerdict(size, size <= limit, seconds(size)))
    return tried


@given(
    sizes=st.sets(st.integers(1, 500), min_size=1, max_size=40).map(sorted),
    guess=st.integers(1, 500),
    limit=st.integers(0, 500),
)
def test_the_largest_size_that_fits_is_found_in_few_trials(sizes: list[int], guess: int, limit: int) -> None:
    search = SizeSearch(sizes, guess, pp=1, samples=512)
    tried = run(search, limit)
    assert search.answer == max((size for size in sizes if size <= limit), default=None)
    assert search.too_large == min((size for size in sizes if size in tried and size > limit), default=None)
    assert len(tried) == len(set(tried)) <= len(sizes).bit_length() + 2


def test_a_good_guess_needs_two_trials() -> None:
    assert run(SizeSearch(POWERS, 8, pp=1, samples=512), limit=8) == [8, 16]
    assert run(SizeSearch(POWERS, 16, pp=1, samples=512), limit=8) == [16, 8]


def test_a_guess_between_two_sizes_begins_with_the_smaller_one() -> None:
    assert run(SizeSearch(POWERS, 12, pp=1, samples=512), limit=8)[0] == 8


@pytest.mark.parametrize("own", [0.0, 0.1, 1.0, 10.0, 100.0])
@pytest.mark.parametrize("limit", [16, 128])
def test_with_a_pipeline_the_fastest_size_is_taken(own: float, limit: int) -> None:
    search = SizeSearch(POWERS, 64, pp=8, samples=128)
    tried = run(search, limit, seconds=lambda size: own + size)
    fitting = [size for size in POWERS if size <= limit]
    assert search.answer == min(fitting, key=lambda size: (128 / size + 7) * (own + size))
    assert len(tried) <= search.max_trials


def test_without_a_pipeline_larger_is_better_even_if_it_seems_slower() -> None:
    search = SizeSearch(POWERS, 1, pp=1, samples=128)
    run(search, limit=32, seconds=lambda size: 10.0 if size == 32 else 0.1)
    assert search.answer == 32


@pytest.mark.parametrize("pp", [1, 4])
def test_where_nothing_fits_there_is_no_answer(pp: int) -> None:
    search = SizeSearch(POWERS, 16, pp=pp, samples=128)
    tried = run(search, limit=0)
    assert search.answer is None
    assert 1 in tried

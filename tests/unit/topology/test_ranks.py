"""Lists of ranks read back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.topology import compress_ranks, expand_ranks


@given(st.sets(st.integers(0, 400)))
def test_compressed_ranks_read_back(ranks: set[int]) -> None:
    assert expand_ranks(compress_ranks(ranks)) == tuple(sorted(ranks))


@pytest.mark.parametrize("text", ["0-99999999999999999999", "0-4194303,7", ",".join(["0-999999"] * 9)])
def test_more_ranks_than_any_job_has_are_refused_before_they_are_made(text: str) -> None:
    with pytest.raises(ValueError, match="more than"):
        expand_ranks(text)

"""Lists of ranks read back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.topology import compress_ranks, expand_ranks


@given(st.sets(st.integers(0, 400)))
def test_compressed_ranks_read_back(ranks: set[int]) -> None:
    assert expand_ranks(compress_ranks(ranks)) == tuple(sorted(ranks))

"""Lists of ranks as text: `0-3,7`."""

from __future__ import annotations

from collections.abc import Iterable

MOST_RANKS = 1 << 22
"""Of all lists together in one text: more ranks than any machine has, and still few megabytes."""


def expand_ranks(text: str) -> tuple[int, ...]:
    """The ranks of a compressed list such as `0-3,7`: the inverse of `compress_ranks`.

    Raises:
        ValueError: it is not such a list, or has more than `MOST_RANKS`.
    """
    ends = [part.partition("-")[::2] for part in text.split(",") if text]
    spans = [range(int(first), int(last or first) + 1) for first, last in ends]
    if sum(map(_length, spans)) > MOST_RANKS:
        raise ValueError(f"a list of more than {MOST_RANKS} ranks")
    return tuple(rank for span in spans for rank in span)


def _length(span: range) -> int:
    """`len` has no answer for a span of more than 2**63."""
    return max(0, span.stop - span.start)


def compress_ranks(ranks: Iterable[int]) -> str:
    """Ranks as a sorted compressed list: `0-3,7`. Duplicates count once; no ranks give an empty text."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)

"""Lists of ranks as text: `0-3,7`."""

from __future__ import annotations

from collections.abc import Iterable


def expand_ranks(text: str) -> tuple[int, ...]:
    """The ranks of a compressed list such as `0-3,7`: the inverse of `compress_ranks`.

    Raises:
        ValueError: it is not such a list.
    """
    ends = [part.partition("-")[::2] for part in text.split(",") if text]
    return tuple(rank for first, last in ends for rank in range(int(first), int(last or first) + 1))


def compress_ranks(ranks: Iterable[int]) -> str:
    """Ranks as a sorted compressed list: `0-3,7`. Duplicates count once; no ranks give an empty text."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)

"""Ranks and coordinates in words."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.topology import Coordinate
from bigsci_launch.topology.words import compress_coordinates


def expand(text: str) -> list[tuple[int, int, int]]:
    found = []
    for box in text.split("; "):
        axes = []
        for word in box.split():
            spans = [part.split("-") for part in word[2:].split(",")]
            axes.append([n for span in spans for n in range(int(span[0]), int(span[-1]) + 1)])
        found += [(dp, pp, tp) for dp in axes[0] for pp in axes[1] for tp in axes[2]]
    return found


@given(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), min_size=1))
def test_compression_names_every_coordinate_once(coordinates: set[tuple[int, int, int]]) -> None:
    text = compress_coordinates(Coordinate(each) for each in coordinates)
    assert sorted(expand(text)) == sorted(coordinates)

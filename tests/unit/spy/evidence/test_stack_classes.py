from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.spy.evidence.bundle import Bundle
from bigsci_launch.spy.evidence.ranks import Evidence
from bigsci_launch.spy.evidence.stack_classes import merge_stacks

MakeRank = Callable[..., dict[str, Any]]


def document(rank: int, place: int) -> dict[str, Any]:
    frames = [
        {"function": "f", "file": "/src/a.py", "line": place},
        {"function": "main", "file": "/src/a.py", "line": 1},
    ]
    threads = [{"tid": rank, "name": "MainThread", "frames": frames}]
    return {"rank": rank, "pid": rank, "samples": [{"mono": 0.0, "state": "S", "stack": {"threads": threads}}]}


def evidence_of(places: list[int], order: list[int]) -> Evidence:
    ranks = [document(rank, places[rank]) for rank in order]
    return Bundle({}, ({"node": "n0", "ranks": ranks},)).evidence()


@given(st.lists(st.integers(1, 4), min_size=1, max_size=30), st.randoms())
def test_merging_is_free_of_order_and_loses_no_rank(places: list[int], random: Any) -> None:
    order = list(range(len(places)))
    random.shuffle(order)
    merged = merge_stacks(evidence_of(places, order).ranks)
    assert merged == merge_stacks(reversed(evidence_of(places, list(range(len(places)))).ranks))
    assert sorted(rank for found in merged for rank in found.ranks) == list(range(len(places)))
    assert [len(found.ranks) for found in merged] == sorted((len(found.ranks) for found in merged), reverse=True)
    for found in merged:
        assert {places[rank] for rank in found.ranks} == {found.frames[0].line}

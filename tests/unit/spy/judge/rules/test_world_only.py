"""Where connections show that all groups are the world, it is certain who waits for whom."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bigsci_launch.spy.evidence.ranks import Evidence
from bigsci_launch.spy.judge.case import JobCase
from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.judge.waits import build_graph
from bigsci_launch.spy.taxonomy import State
from tests.support.texts import has_parts

from ...conftest import Document, accused, mesh_of, rank_of
from ..small_cases import job

MEAN = "all_reduce@c10d:1 < mean@/src/loop.py:5 < train@/src/loop.py:20"
END = "barrier@c10d:1 < finish@/src/loop.py:9"
BACKWARD = (
    "_engine_run_backward@/venv/torch/autograd/graph.py:8 < backward@/venv/torch/_tensor.py:5 < train@/src/loop.py:4"
)


def case_of(stacks: Sequence[str], ends: Sequence[Document] | None = None, **last: object) -> Evidence:
    """Ranks in these stacks, connected as one group; `last` is said of the last of them."""
    ends = mesh_of(len(stacks)) if ends is None else ends
    ranks = [
        rank_of(rank, stack, sample={"connections": end}, **(last if rank == len(stacks) - 1 else {}))
        for rank, (stack, end) in enumerate(zip(stacks, ends, strict=True))
    ]
    return job(ranks)


def swapped_ends() -> list[Document]:
    """Two ranks have a group of their own, too."""
    ends = mesh_of(4)
    ends[1]["opened"]["127.0.0.1"].append(50000)
    ends[0]["listening"]["127.0.0.1:50000"] = 1
    return ends


def test_all_waits_are_of_the_world() -> None:
    graph = build_graph(case_of([MEAN, MEAN, MEAN, END]))
    assert graph.is_certain
    assert has_parts(str(graph.waits[3]), "barrier", "world")
    assert graph.blockers == {0: {3}, 1: {3}, 2: {3}, 3: {0, 1, 2}}


@pytest.mark.parametrize("others", [MEAN, BACKWARD], ids=["in another collective", "in backward"])
def test_one_against_all_others_is_a_side_and_where_to_look_first(others: str) -> None:
    """The one may be right, and all others wrong."""
    conclusion = judge(case_of([others, others, others, END]))
    assert (conclusion.state, accused(conclusion)) == (State.HANG, [])
    assert [pointer.rank for pointer in conclusion.look_first][:1] == [3]
    assert {side.ranks for side in conclusion.sides} == {(3,), (0, 1, 2)}
    assert has_parts(conclusion.claim, "barrier", "finish (loop.py:9)")


def test_there_may_be_another_group() -> None:
    stacks = [MEAN, MEAN, MEAN, END]
    assert not build_graph(case_of(stacks, swapped_ends())).is_certain
    with_device = [dict(end, devices=["/dev/nvidia0"]) for end in mesh_of(4)]
    assert not build_graph(case_of(stacks, with_device)).is_certain


def test_messages_between_two_stay_open() -> None:
    receive = "recv@c10d:1 < take@/src/loop.py:7"
    assert not build_graph(case_of([MEAN, MEAN, MEAN, receive])).is_certain


def test_others_that_are_not_known_to_sleep_may_compute() -> None:
    evidence = case_of([END, BACKWARD, BACKWARD, BACKWARD], wchan="0")
    assert not JobCase.of(evidence).graph.waits.keys() - {0}
    assert judge(evidence).suspects == ()

"""Where connections show that all groups are the world, it is certain who waits for whom: the odd one is named."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bigsci_launch.spy.evidence.ranks import Evidence
from bigsci_launch.spy.judge.case import JobCase
from bigsci_launch.spy.judge.conclusion import Strength
from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.judge.waits import build_graph
from bigsci_launch.spy.taxonomy import HangClass, State
from tests.support.texts import has_parts

from ...conftest import Document, accused, mesh_of, rank_of
from ..small_cases import job

MEAN = "all_reduce@c10d:1 < mean@/src/loop.py:5 < train@/src/loop.py:20"
OTHER_MEAN = "all_reduce@c10d:1 < evaluate@/src/eval.py:5 < train@/src/loop.py:22"
END = "barrier@c10d:1 < finish@/src/loop.py:9"
START = "broadcast@c10d:1 < share@/src/loop.py:2"
COUNT = "reduce@c10d:1 < count@/src/loop.py:3"
BACKWARD = (
    "_engine_run_backward@/venv/torch/autograd/graph.py:8 < backward@/venv/torch/_tensor.py:5 < train@/src/loop.py:4"
)
JAX = "block_until_ready@/venv/jax/_src/array.py:7 < train@/src/loop.py:4"
SPREAD = "allreduce@/venv/horovod/torch/mpi_ops.py:7 < mean@/src/loop.py:5"
LOADER = "next@/src/data.py:3 < train@/src/loop.py:4"


def case_of(stacks: Sequence[str], ends: Sequence[Document] | None = None, **last: object) -> Evidence:
    """Ranks in these stacks, connected as one group; `last` is said of the last of them."""
    ends = mesh_of(len(stacks)) if ends is None else ends
    ranks = [
        rank_of(rank, stack, sample={"connections": end}, **(last if rank == len(stacks) - 1 else {}))
        for rank, (stack, end) in enumerate(zip(stacks, ends, strict=True))
    ]
    return job(ranks)


def accused_in(evidence: Evidence) -> list[int]:
    conclusion = judge(evidence)
    assert conclusion.state is State.HANG
    return accused(conclusion)


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


def test_the_one_that_is_in_another_collective_than_all_others() -> None:
    conclusion = judge(case_of([MEAN, MEAN, MEAN, END]))
    assert accused(conclusion) == [3]
    assert (conclusion.hang_class, conclusion.strength) == (HangClass.LEFT_EARLY, Strength.DERIVED)
    assert has_parts(conclusion.claim, "rank 3 (n0)", "barrier", "finish (loop.py:9)")
    assert any(has_parts(line, "gloo", "world") for line in conclusion.evidence)


@pytest.mark.parametrize(
    "stacks",
    [
        [MEAN, MEAN, END],
        [MEAN, MEAN, END, END],
        [MEAN, MEAN, START, END],
        [MEAN, MEAN, OTHER_MEAN, END],
        [MEAN, MEAN, MEAN, OTHER_MEAN],
        [MEAN, MEAN, MEAN, COUNT],
        [COUNT, COUNT, COUNT, END],
        [SPREAD, SPREAD, SPREAD, END],
    ],
    ids=[
        "two others", "two against two", "two places", "two paths", "the same operation", "it may wait as the root",
        "others may disagree about the root", "not of process groups",
    ],
)  # fmt: skip
def test_nobody_is_accused(stacks: list[str]) -> None:
    assert accused_in(case_of(stacks)) == []


def test_nobody_is_accused_where_there_may_be_another_group() -> None:
    stacks = [MEAN, MEAN, MEAN, END]
    assert not build_graph(case_of(stacks, swapped_ends())).is_certain
    assert accused_in(case_of(stacks, swapped_ends())) == []
    with_device = [dict(end, devices=["/dev/nvidia0"]) for end in mesh_of(4)]
    assert accused_in(case_of(stacks, with_device)) == []


def test_messages_between_two_stay_open() -> None:
    receive = "recv@c10d:1 < take@/src/loop.py:7"
    assert not build_graph(case_of([MEAN, MEAN, MEAN, receive])).is_certain


def test_one_in_a_collective_while_all_others_wait_in_backward() -> None:
    conclusion = judge(case_of([BACKWARD, BACKWARD, BACKWARD, END]))
    assert accused(conclusion) == [3]
    assert (conclusion.state, conclusion.hang_class) == (State.HANG, HangClass.LEFT_EARLY)
    assert has_parts(conclusion.claim, "barrier", "finish (loop.py:9)", "3", "train")


@pytest.mark.parametrize(
    "stacks",
    [
        [BACKWARD, BACKWARD, END],
        [BACKWARD, BACKWARD, BACKWARD, COUNT],
        [BACKWARD, BACKWARD, BACKWARD, END, END],
        [LOADER, LOADER, LOADER, END],
        [JAX, JAX, JAX, END],
        [BACKWARD, BACKWARD, LOADER, END],
    ],
    ids=["two others", "it may wait as the root", "two in the collective", "no communication", "JAX", "two places"],
)
def test_nobody_is_accused_while_others_are_elsewhere(stacks: list[str]) -> None:
    assert accused_in(case_of(stacks)) == []


def test_nobody_is_accused_while_others_may_wait_for_devices_or_other_groups() -> None:
    stacks = [BACKWARD, BACKWARD, BACKWARD, END]
    for ends in ([dict(end, devices=["/dev/nvidia0"]) for end in mesh_of(4)], swapped_ends()):
        assert accused_in(case_of(stacks, ends)) == []


def test_others_that_are_not_known_to_sleep_may_compute() -> None:
    evidence = case_of([END, BACKWARD, BACKWARD, BACKWARD], wchan="0")
    assert not JobCase.of(evidence).graph.waits.keys() - {0}
    assert judge(evidence).suspects == ()

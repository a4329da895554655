"""What follows from the rings of several ranks, and what does not."""

from __future__ import annotations

from typing import Any

import pytest

from bigsci_launch.spy.judge.conclusion import Strength
from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.taxonomy import HangClass, State
from tests.support.texts import has_parts

from ..conftest import accused, outcome
from .small_cases import one_aborted, one_names_another_root, ring_of, sleeps_alone


def test_a_rank_that_names_another_root_than_ever_before_is_accused() -> None:
    found = judge(one_names_another_root())
    assert (found.state, found.hang_class) == (State.HANG, HangClass.ROOT_DIFFERS)
    assert accused(found) == [1] and found.strength is Strength.AGREED
    assert has_parts(found.claim, "rank 1 it is rank 1;", "ranks 0,2")


@pytest.mark.parametrize("past", [(1, 1, 1), (2, 0, 2), (2,), ()])
def test_nobody_is_accused_of_a_root_that_is_not_new_or_has_no_past(past: tuple[int, ...]) -> None:
    found = judge(one_names_another_root(past))
    assert found.hang_class is HangClass.ROOT_DIFFERS and not found.suspects
    assert any("which root" in line for line in found.missing)


@pytest.mark.parametrize("others", [(2, 0, 2), (0, 0, 0), (2,)])
def test_nobody_is_accused_if_the_others_did_not_do_as_always(others: tuple[int, ...]) -> None:
    assert not judge(one_names_another_root(others=others)).suspects


@pytest.mark.parametrize("how", [{"newest": 2}, {"group": "0: 1,3"}], ids=["equal", "of groups with one name"])
def test_roots_that_are_no_disagreement(how: dict[str, Any]) -> None:
    assert judge(one_names_another_root(**how)).hang_class is not HangClass.ROOT_DIFFERS


def open_call(operation: str, *, is_async: bool = False) -> dict[str, object]:
    """A ring in which a second thread is in `operation`."""
    threads = ring_of((1.0, 1.1, "all_reduce", "0: 0,1,2", None, 1, 0), (2.0, None, operation, None, None, 0, 0))[
        "threads"
    ]
    threads[0]["open"][0][10] = is_async
    return {"threads": threads}


def accused_asleep(**how: object) -> list[int]:
    found = judge(sleeps_alone(**how))  # type: ignore[arg-type]
    return accused(found.if_hang or found)


def test_a_rank_that_sleeps_in_no_recorded_call_is_accused_where_collectives_return_when_they_are_done() -> None:
    assert accused_asleep() == [1]
    assert accused_asleep(**open_call("torch.save")) == [1]
    assert accused_asleep(without=[2]) == [1]


@pytest.mark.parametrize(
    "how",
    [
        {"are_blocking": False},
        {"lost_threads": 1},
        {"frame": "_engine_run_backward@/venv/torch/autograd/graph.py:7"},
        {"frame": "_sync_buffers@/venv/torch/nn/parallel/distributed.py:7"},
        {"frame": "allreduce@/venv/lib/python3.11/site-packages/mpi.py:7"},
        {"frame": "forward@<eval_with_key>.3:7"},
        open_call("wait"),
        open_call("all_reduce", is_async=True),
    ],
)
def test_a_rank_that_may_wait_for_work_that_is_not_recorded_is_not_accused(how: dict[str, object]) -> None:
    assert not accused_asleep(**how)


def test_the_rank_whose_last_collective_had_another_size_than_always_is_accused_of_an_abort() -> None:
    found = judge(one_aborted())
    assert outcome(found) == ("crashed", HangClass.SIZE_DIFFERS, [1])
    assert has_parts(found.claim, "all_reduce of [[8]] [float32]", "all_reduce of [[4]] [float32]", "rank 0")


@pytest.mark.parametrize(
    "how",
    [
        {"last": ["all_reduce [[4]]"]},
        {"last": ["reduce [[4]]"]},
        {"last": ["all_reduce [[8]]", "broadcast [[1]]", "all_reduce [[4]]", "broadcast [[1]]"]},
        {"lost_threads": 1},
    ],
    ids=["as always", "another operation", "long ago", "a ring with gaps"],
)
def test_an_abort_that_rings_do_not_explain_accuses_nobody(how: dict[str, Any]) -> None:
    assert not judge(one_aborted(**how)).suspects

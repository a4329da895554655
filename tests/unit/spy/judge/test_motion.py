"""A healthy job whose ranks step together: in the first sample all of them are between two collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bigsci_launch.spy.evidence.ranks import Evidence
from bigsci_launch.spy.judge.conclusion import Strength
from bigsci_launch.spy.judge.verdict import judge

REST = "train_step@/src/train.py:10 < <module>@/src/train.py:13"
WAIT = "all_reduce@c10d:10 < " + REST


@pytest.mark.parametrize("calls", ["", "w w w"])
@pytest.mark.parametrize("still", [{2}, {0, 3}, {1, 2, 3}])
def test_ranks_that_came_to_a_collective_between_the_looks_get_on(
    make_rank: Callable[..., dict[str, Any]], make_evidence: Callable[..., Evidence], still: set[int], calls: str
) -> None:
    """Also with a recorder that was read once, at the end: it shows nothing about the time between the samples."""
    stacks = [[REST, REST if rank in still else WAIT] for rank in range(4)]
    last = [calls + ("!" if calls and rank not in still else "") for rank in range(4)]
    members = {"w": range(4)}
    ranks = [
        make_rank(rank, stacks[rank], wchan="hrtimer_nanosleep", calls=last[rank], members=members)
        for rank in range(4)
    ]  # fmt: skip
    verdict = judge(make_evidence(ranks))
    assert verdict.state.value == "progressing", verdict.claim
    assert not verdict.suspects


def test_ranks_that_waited_in_both_looks_wait(
    make_rank: Callable[..., dict[str, Any]], make_evidence: Callable[..., Evidence]
) -> None:
    waits = [make_rank(rank, WAIT, wchan="futex_do_wait") for rank in (0, 1, 3)]
    verdict = judge(make_evidence([*waits, make_rank(2, REST, wchan="hrtimer_nanosleep")]))
    assert verdict.state.value == "hang"
    assert [suspect.rank for suspect in verdict.suspects] == [2]


def test_one_rank_that_joins_does_not_tell_that_all_will(
    make_rank: Callable[..., dict[str, Any]], make_evidence: Callable[..., Evidence]
) -> None:
    """As `bsl hang-lab run H46` showed: one rank looks elsewhere, and another joins between the samples."""
    init = "init_process_group@c10d:20 < main@/src/train.py:3"
    at_store = f"_create_c10d_store@/venv/torch/distributed/rendezvous.py:199 < {init}"
    inside = f"_new_process_group_helper@c10d:10 < {init}"
    stacks = [at_store, inside, inside, [at_store, inside]]
    verdict = judge(make_evidence([make_rank(rank, stack) for rank, stack in enumerate(stacks)]))
    assert (verdict.state.value, verdict.strength) == ("progressing", Strength.GUESS)
    assert verdict.claim == "the ranks are still connecting to each other: 1 of 4 ranks moved between the samples"
    assert verdict.next == ("bsl spy --settle 60  # look for longer",)

"""A healthy job whose ranks step together: in the first sample all of them are between two collectives."""

from __future__ import annotations

import pytest

from bigsci_launch.spy.judge.conclusion import Strength
from bigsci_launch.spy.judge.verdict import judge

from ..conftest import accused, make_evidence, rank_of

REST = "train_step@/src/train.py:10 < <module>@/src/train.py:13"
WAIT = "all_reduce@c10d:10 < " + REST


@pytest.mark.parametrize("calls", ["", "w w w"])
@pytest.mark.parametrize("still", [{2}, {0, 3}, {1, 2, 3}])
def test_ranks_that_came_to_a_collective_between_the_looks_get_on(still: set[int], calls: str) -> None:
    """Also with a recorder that was read once, at the end: it shows nothing about the time between the samples."""
    stacks = [[REST, REST if rank in still else WAIT] for rank in range(4)]
    last = [calls + ("!" if calls and rank not in still else "") for rank in range(4)]
    members = {"w": range(4)}
    ranks = [
        rank_of(rank, stacks[rank], wchan="hrtimer_nanosleep", calls=last[rank], members=members)
        for rank in range(4)
    ]  # fmt: skip
    verdict = judge(make_evidence(ranks))
    assert verdict.state.value == "progressing", verdict.claim
    assert not verdict.suspects


def test_ranks_that_waited_in_both_looks_wait() -> None:
    waits = [rank_of(rank, WAIT, wchan="futex_do_wait") for rank in (0, 1, 3)]
    verdict = judge(make_evidence([*waits, rank_of(2, REST, wchan="hrtimer_nanosleep")]))
    assert verdict.state.value == "hang"
    assert accused(verdict) == [2]


def test_one_rank_that_joins_does_not_tell_that_all_will() -> None:
    """As `bsl hang-lab run H46` showed: one rank looks elsewhere, and another joins between the samples."""
    init = "init_process_group@c10d:20 < main@/src/train.py:3"
    at_store = f"_create_c10d_store@/venv/torch/distributed/rendezvous.py:199 < {init}"
    inside = f"_new_process_group_helper@c10d:10 < {init}"
    stacks = [at_store, inside, inside, [at_store, inside]]
    verdict = judge(make_evidence([rank_of(rank, stack) for rank, stack in enumerate(stacks)]))
    assert (verdict.state.value, verdict.strength) == ("progressing", Strength.GUESS)
    assert "1 of 4 ranks" in verdict.claim
    assert [command.partition("  #")[0] for command in verdict.next] == ["bsl spy --settle 60"]

"""A healthy job whose ranks step together: in the first sample all of them are between two collectives."""

from __future__ import annotations

from typing import Any

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


def with_shares(ranks: list[dict[str, Any]], shares: tuple[float, ...]) -> list[dict[str, Any]]:
    """Give the main thread of each rank this share of a core in every second of its samples."""
    for rank, share in zip(ranks, shares, strict=True):
        for second, sample in enumerate(rank["samples"]):
            sample["thread_times"] = {str(rank["pid"]): round((100 + second * share) * 1e9)}
    return ranks


WORKS = [REST, REST, WAIT, REST, REST]
"""In one sample of five it waits too: its stacks alone do not show that it is late."""


@pytest.mark.parametrize(
    ("shares", "state"),
    [
        ((0.05, 0.95, 0.1, 0.05), "slow"),
        ((0.05, 0.95, 0.9, 0.05), "progressing"),
        ((0.5, 0.95, 0.5, 0.5), "progressing"),
        ((0.05, 0.5, 0.1, 0.05), "progressing"),
    ],
)
def test_a_rank_that_works_while_all_others_wait_is_late_by_its_time_on_a_core(
    shares: tuple[float, ...], state: str
) -> None:
    stacks = [WORKS if rank == 1 else [WAIT, WAIT, WAIT, REST, WAIT] for rank in range(4)]
    ranks = [rank_of(rank, stack, cpu_ticks=range(10, 60, 10)) for rank, stack in enumerate(stacks)]
    verdict = judge(make_evidence(with_shares(ranks, shares)))
    assert (verdict.state.value, accused(verdict)) == (state, [1] if state == "slow" else []), verdict.claim


def test_of_two_ranks_that_take_turns_none_is_late() -> None:
    """A server waits for its only worker, as it should."""
    ranks = [rank_of(0, [REST, *[WAIT] * 4], cpu_ticks=range(5)), rank_of(1, WORKS, cpu_ticks=range(5))]
    verdict = judge(make_evidence(with_shares(ranks, (0.05, 0.95))))
    assert (verdict.state.value, accused(verdict)) == ("progressing", []), verdict.claim

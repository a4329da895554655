"""Ranks that may wait for a communicator of NCCL that is made at its first use."""

from __future__ import annotations

from typing import Any

import pytest

from bigsci_launch.spy.evidence.ranks import Evidence
from bigsci_launch.spy.judge.first_use import ASK_NCCL, words_of_first_use
from bigsci_launch.spy.judge.verdict import judge
from tests.support.texts import has_parts

from ..conftest import make_evidence, rank_of

SEND = "isend@c10d:2371 < send_forward@/src/p2p.py:5 < step@/src/train.py:9"
RECEIVE = "irecv@c10d:2401 < recv_forward@/src/p2p.py:8 < step@/src/train.py:9"
REDUCE = "all_reduce@c10d:10 < step@/src/train.py:5"


def pair(first: str, second: str) -> Evidence:
    return make_evidence([rank_of(0, first), rank_of(1, second)], "pp=2")


def test_two_ends_of_a_message_that_does_not_begin() -> None:
    evidence = pair(SEND, RECEIVE)
    assert has_parts(words_of_first_use(evidence), "ranks 0-1", "isend or irecv", "communicator")
    found = judge(evidence)
    assert any("communicator" in line for line in found.evidence) and ASK_NCCL in found.next
    assert not found.suspects


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (SEND, REDUCE),
        (SEND.replace("isend", "send"), RECEIVE.replace("irecv", "recv")),
        (SEND.replace("c10d", "/src/own.py"), RECEIVE.replace("c10d", "/src/own.py")),
        ("wait@/src/p2p.py:9 < step@/src/train.py:9", RECEIVE),
    ],
)
def test_other_pairs_say_nothing_of_a_communicator(first: str, second: str) -> None:
    assert words_of_first_use(pair(first, second)) == ""


def of_nccl(calls: str, **more: Any) -> Evidence:
    ranks = [rank_of(rank, REDUCE, calls=calls, members={"w": [0, 1]}) for rank in (0, 1)]
    for rank in ranks:
        rank["samples"][-1]["recorder"] |= {"open_messages": 0, **more}
    return make_evidence(ranks)


def test_the_first_collective_of_a_group_makes_its_communicator() -> None:
    assert has_parts(words_of_first_use(of_nccl("w!")), "all_reduce", "group w", "communicator")
    assert words_of_first_use(of_nccl("w w!")) == ""
    assert words_of_first_use(of_nccl("w!", open_messages=None)) == "", "gloo has none"

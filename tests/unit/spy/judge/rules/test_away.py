"""Ranks that others wait for and whose stacks show no collective, although they may be in one."""

from __future__ import annotations

import pytest

from bigsci_launch.spy.judge.rules.away import UNEVEN
from bigsci_launch.spy.judge.verdict import judge

from ...conftest import make_evidence, rank_of

BACKWARD = "_engine_run_backward@/venv/torch/autograd/graph.py:865 < step@/src/train.py:20"
REDUCE = "all_reduce@c10d:2806 < end_of_epoch@/src/train.py:30"
IN_HOOK = "all_reduce@c10d:2806 < hook@/src/zero.py:30 < _engine_run_backward@/venv/torch/autograd/graph.py:865"
ELSEWHERE = "wait_stream@/venv/torch/cuda/streams.py:5 < step@/src/train.py:20"


@pytest.mark.parametrize(
    ("away", "waiting", "may"),
    [
        ([BACKWARD], [REDUCE] * 3, True),
        ([BACKWARD] * 2, [REDUCE] * 2, False),
        ([BACKWARD], [IN_HOOK] * 3, False),
        ([ELSEWHERE], [REDUCE] * 3, False),
    ],
)
def test_one_batch_more_than_the_others_is_thought_of(away: list[str], waiting: list[str], may: bool) -> None:
    ranks = [rank_of(number, stack) for number, stack in enumerate([*away, *waiting])]
    found = judge(make_evidence(ranks))
    assert (UNEVEN in found.missing) == may
    assert not found.suspects or not may

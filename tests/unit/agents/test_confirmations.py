"""Tokens of acts: each confirms one act, once, and for a short time."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigsci_launch.agents.confirmations import MOST_WAITING, VALID_S, Confirmations, NotConfirmed, PlannedAct

ACT = PlannedAct(Path("/runs/demo"), "exit", "the loss is NaN", None, ("attempt 0001, job 7",))


def test_a_token_confirms_its_act_once() -> None:
    waiting = Confirmations()
    token, other = waiting.offer(ACT), waiting.offer(ACT)
    assert token != other and waiting.take(token) == ACT
    with pytest.raises(NotConfirmed):
        waiting.take(token)
    assert waiting.take(other) == ACT


def test_an_old_token_confirms_nothing() -> None:
    now = [0.0]
    waiting = Confirmations(lambda: now[0])
    token = waiting.offer(ACT)
    now[0] = VALID_S + 1
    with pytest.raises(NotConfirmed):
        waiting.take(token)


def test_only_so_many_acts_wait() -> None:
    waiting = Confirmations()
    first, *others = [waiting.offer(ACT) for _ in range(MOST_WAITING + 1)]
    with pytest.raises(NotConfirmed):
        waiting.take(first)
    assert waiting.take(others[0]) == ACT


def test_what_was_never_offered_confirms_nothing() -> None:
    with pytest.raises(NotConfirmed):
        Confirmations().take("dG9rZW4")

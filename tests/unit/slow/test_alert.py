"""When a watcher asks who makes a run slow: the clock is the test's, the threads that ask are real."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bigsci_launch.slow.answer import Asked
from bigsci_launch.watch.facts import stragglers
from bigsci_launch.watch.facts.stragglers import AGAIN_S, ALERT_S, EVERY_S, FIRST_STEPS, StragglerWatch
from tests.support.waiting import wait_until

from .jobs import answer_of_rings, data_parallel, run


class Clock:
    """Lets a watch consider at moments, and counts how often it has asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        even = run(data_parallel(4), 4, lambda rank, step, part: 0.0 if part == "garbage" else 0.01)
        asked = Asked(answer_of_rings(even, {}), None)
        assert asked.answer.undecided is None and not asked.answer.stragglers
        self.count = 0

        def ask(_run: str) -> Asked:
            self.count += 1
            return asked

        monkeypatch.setattr(stragglers, "who_is_slow", ask)
        watched: Any = SimpleNamespace(run=object(), attempt=None, home=SimpleNamespace(path="run"), argument="run")
        self.watch = StragglerWatch(watched)
        self.watch.consider(0, 0.0, is_slower=False)

    def at(self, now: float, *, is_slower: bool = False) -> int:
        self.watch.consider(FIRST_STEPS, now, is_slower=is_slower)
        question = self.watch._question
        if question is not None:
            wait_until(lambda: not question.is_alive(), 10)
            self.watch.consider(FIRST_STEPS, now, is_slower=False)
        return self.count


def test_it_asks_again_soon_after_steps_have_become_slower_until_rings_hold_enough_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    assert [clock.at(1.0), clock.at(2 + AGAIN_S), clock.at(EVERY_S - 1)] == [1, 1, 1]
    began = EVERY_S
    assert clock.at(began, is_slower=True) == 2
    assert [clock.at(began + 1), clock.at(began + 1 + AGAIN_S), clock.at(began + 2 + 2 * AGAIN_S)] == [2, 3, 4]
    last = began + 3 + ALERT_S
    assert [clock.at(last), clock.at(last + AGAIN_S + 1), clock.at(last + EVERY_S + 1)] == [5, 5, 6]

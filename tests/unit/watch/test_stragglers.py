"""When a watcher asks who makes a run slow, and what it does if the question fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.errors import CollectError
from bigsci_launch.runs.layout import RunDir, write_json
from bigsci_launch.watch.facts import stragglers
from bigsci_launch.watch.facts.stragglers import AGAIN_S, FIRST_STEPS, StragglerWatch
from bigsci_launch.watch.watched import WatchedRun
from tests.support.waiting import wait_until

Answers = list[Callable[[], Any]]


@pytest.fixture
def asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[StragglerWatch, Answers, list[str]]:
    """A watch of a run, the answers of the ranks in the order of the questions, and the questions so far."""
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    write_json(run.record, {"name": "run"})
    answers: Answers = []
    asked: list[str] = []

    def who_is_slow(argument: str) -> Any:
        asked.append(argument)
        return answers.pop(0)()

    monkeypatch.setattr(stragglers, "who_is_slow", who_is_slow)
    return StragglerWatch(WatchedRun(run, run, None, None)), answers, asked


def raising(error: Exception) -> Callable[[], Any]:
    def answer() -> Any:
        raise error

    return answer


def ask(watch: StragglerWatch, now: float, *, is_slower: bool = False) -> None:
    """One round of the watcher, and the end of a question that it begins."""
    watch.consider(FIRST_STEPS, now, is_slower=is_slower)
    question = watch._question
    if question is not None:
        question.join(60)
    watch.consider(FIRST_STEPS, now, is_slower=False)


def test_a_defect_in_the_question_is_one_line_until_the_next_answer(
    asking: tuple[StragglerWatch, Answers, list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    watch, answers, asked = asking
    answers += [raising(KeyError("ranks\nof node n1")), raising(CollectError("no rank answered"))]
    watch.consider(0, 0.0, is_slower=False)
    ask(watch, 10.0)
    assert "KeyError" in watch.trouble and "ranks" in watch.trouble and "\n" not in watch.trouble
    assert capfd.readouterr() == ("", "")
    ask(watch, 10.0 + stragglers.EVERY_S)
    assert (watch.trouble, len(asked)) == ("", 2)


def test_steps_that_become_slower_during_a_question_are_asked_about_after_it(
    asking: tuple[StragglerWatch, Answers, list[str]],
) -> None:
    watch, answers, asked = asking
    go_on = threading.Event()
    answers += [lambda: go_on.wait(60) and raising(CollectError("no rank answered"))(), raising(CollectError("none"))]
    watch.consider(0, 0.0, is_slower=False)
    watch.consider(FIRST_STEPS, 10.0, is_slower=False)
    wait_until(lambda: asked, 60)
    watch.consider(FIRST_STEPS, 11.0, is_slower=True)
    go_on.set()
    ask(watch, 12.0)
    assert len(asked) == 1
    ask(watch, 12.0 + AGAIN_S)
    assert len(asked) == 2

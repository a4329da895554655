"""Whether a run starts again: by what its starts made, by count and by time. The decision is pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.house.conftest import standalone


@pytest.fixture(scope="module")
def chain() -> Iterator[Any]:
    """The module `chain_decision`, as the job script finds it."""
    with standalone() as program:
        yield program("chain_decision")


HANG = {"act": "end_ranks", "who": "agent", "why": "no step for 62 s", "continues": True}


@pytest.fixture(scope="module")
def by() -> Iterator[Callable[..., Any]]:
    """What `ended.json` says, as the job script reads it: an act, and what is not as when a watcher ends a hang."""
    with standalone() as program:
        yield lambda **fields: program("exit_outside").EndedBy(**{**HANG, **fields})


class Starts:
    """Starts of a run, each given as (reason, last step, step of the newest checkpoint after it); `more` are the last
    step of the run, as printed, or who ended the start."""

    def __init__(self, module: Any, *given: tuple[Any, ...], **bounds: Any) -> None:
        self.module = module
        self.chain = module.Chain(**{"by": "requeue", "max_starts": 50, "total_steps": 60, **bounds})
        self.starts = [
            module.Start(
                name=f"0001.r{number}" if number else "0001",
                reason=reason,
                step=step,
                checkpoint=None if saved is None else module.Mark(saved, 100.0 + number),
                started=1000.0 + number,
                total_steps=next((each for each in more if isinstance(each, int)), None),
                ended_by=next((each for each in more if not isinstance(each, int)), None),
            )
            for number, (reason, step, saved, *more) in enumerate(given)
        ]

    def decide(self, now: float = 2000.0) -> Any:
        return self.module.decide(self.chain, self.starts, now)


@pytest.mark.parametrize(
    "reason", ["stopped", "preempted", "time_limit", "crashed", "hang", "left_early", "node_failure", "unknown", None]
)
def test_a_start_that_made_steps_is_followed_by_another(chain: Any, reason: str | None) -> None:
    found = Starts(chain, (reason, 19, 19)).decide()
    assert (found.action, found.progress, found.step) == ("continue", "made", 19)
    assert "it reached step 19" in found.sentence


def test_a_finished_run_is_not_started_again(chain: Any) -> None:
    assert Starts(chain, ("stopped", 19, 19), ("finished", 60, 60)).decide().action == "finished"
    # The batch host died after the last save: nobody wrote why the start ended.
    assert Starts(chain, ("stopped", 19, 19), (None, 60, 60)).decide().action == "finished"


def test_a_start_without_a_step_more_stops_the_chain(chain: Any) -> None:
    found = Starts(chain, ("stopped", 19, 15), ("crashed", 19, 15)).decide()
    assert (found.action, found.progress) == ("stop", "none")
    assert found.sentence == "no step since the start before (step 19); start 0001.r1 ended: crashed"
    first = Starts(chain, ("crashed", 0, None)).decide()
    assert (first.action, first.sentence) == ("stop", "its first start made no step; start 0001 ended: crashed")


def test_a_newer_checkpoint_is_progress_even_if_fewer_steps_were_reached(chain: Any) -> None:
    """The start before was killed at step 35 and had saved 30; this one was stopped at 33 and saved."""
    assert Starts(chain, ("crashed", 35, 30), ("stopped", 33, 33)).decide().action == "continue"


def test_one_step_more_without_a_checkpoint_is_tolerated_a_few_times_only(chain: Any) -> None:
    given = [("crashed", 21 + number, 20) for number in range(5)]
    assert Starts(chain, *given[:3]).decide().action == "continue"
    stopped = Starts(chain, *given[:4]).decide()
    assert (stopped.action, stopped.progress) == ("stop", "made")
    assert "none left a newer checkpoint" in stopped.sentence
    outside = [("node_failure", 21 + number, 20) for number in range(5)]
    assert Starts(chain, *outside).decide().action == "continue"


def test_starts_that_were_ended_from_outside_too_early_are_tolerated_a_few_times(chain: Any) -> None:
    early = [("stopped", 19, 19), ("preempted", 0, 19), ("node_failure", 0, 19), (None, 0, 19), ("preempted", 0, 19)]
    for number in (2, 3, 4):
        found = Starts(chain, *early[:number]).decide()
        assert (found.action, found.progress) == ("continue", "none")
        assert "ended from outside before it made a step" in found.sentence
    found = Starts(chain, *early).decide()
    assert found.action == "stop"
    assert "4 starts in a row were ended from outside (preempted, node_failure, no record, preempted)" in found.sentence
    assert Starts(chain, *early[:3], ("crashed", 0, 19)).decide().action == "stop"


def test_what_is_not_known_is_neither_progress_nor_its_absence(chain: Any) -> None:
    given = [("crashed", None, None)] * 3
    for number in (1, 2):
        found = Starts(chain, *given[:number], total_steps=None).decide()
        assert (found.action, found.progress, found.step) == ("continue", "unknown", None)
        assert "its progress is not known" in found.sentence
    found = Starts(chain, *given, total_steps=None).decide()
    assert (found.action, found.progress) == ("stop", "unknown")
    assert "is not known" in found.sentence
    assert Starts(chain, *given, ("crashed", None, 40), total_steps=None).decide().action == "continue"


def test_a_program_that_printed_steps_once_makes_none_when_it_prints_none(chain: Any) -> None:
    found = Starts(chain, ("crashed", 7, None, 100), ("crashed", None, None), total_steps=None).decide()
    assert (found.action, found.progress) == ("stop", "none")


def test_a_program_that_leaves_with_0_before_its_last_step_is_not_finished(chain: Any) -> None:
    assert Starts(chain, ("finished", 50, None, 100), total_steps=None).decide().action == "continue"
    assert Starts(chain, ("finished", 100, None, 100), total_steps=None).decide().action == "finished"
    assert Starts(chain, ("finished", None, None), total_steps=None).decide().action == "finished"


def test_a_program_that_could_not_be_launched_made_no_progress(chain: Any) -> None:
    found = Starts(chain, ("launch_failed", None, None), total_steps=None).decide()
    assert (found.action, found.progress) == ("stop", "none")


def test_count_and_time_bound_a_chain(chain: Any) -> None:
    given = (("stopped", 10, 10), ("stopped", 20, 20))
    assert Starts(chain, *given, max_starts=3).decide().action == "continue"
    found = Starts(chain, *given, max_starts=2).decide()
    assert (found.action, found.sentence) == ("stop", "this was start 2, and slurm.chain.max_starts is 2")
    assert Starts(chain, *given, max_hours=1).decide(now=1000 + 3599).action == "continue"
    found = Starts(chain, *given, max_hours=1).decide(now=1000 + 5400)
    assert found.sentence == "the first start was 1.5 hours ago, and slurm.chain.max_hours is 1"


def test_what_somebody_cancelled_stays_ended(chain: Any) -> None:
    found = Starts(chain, ("cancelled", 19, 19))
    assert (found.decide().action, found.decide().sentence) == ("stop", "somebody cancelled the job")
    marked = Starts(chain, ("preempted", 19, 19))
    marked.starts = [marked.starts[0]._replace(is_cancelled=True)]
    assert (marked.decide().action, marked.decide().sentence) == ("stop", "`bsl cancel` ended it")


@pytest.mark.parametrize(("act", "reason"), [("exit", "stopped"), ("exit", "cancelled"), ("kill", "cancelled")])
def test_nothing_follows_what_a_person_ended(chain: Any, by: Callable[..., Any], act: str, reason: str) -> None:
    wish = by(act=act, who="alice", why="the loss is NaN", continues=False)
    found = Starts(chain, (reason, 19, 19, wish)).decide()
    words = {"exit": "alice asked to exit: the loss is NaN", "kill": "alice asked to kill it: the loss is NaN"}
    assert (found.action, found.sentence) == ("stop", words[act])
    # It had made its last step all the same.
    assert Starts(chain, ("finished", 60, 60, wish)).decide().action == "finished"


@pytest.mark.parametrize("reason", ["stopped", "cancelled", "crashed"])
def test_a_restart_that_a_person_asked_for_follows_without_progress_too(
    chain: Any, by: Callable[..., Any], reason: str
) -> None:
    wish = by(act="restart", who="bob", why="new revision", step=120)
    given = [("stopped", 19, 19), (reason, 19, 19, wish)]
    found = Starts(chain, *given).decide()
    assert (found.action, found.progress) == ("continue", "none")
    assert found.sentence == "bob asked to restart after step 120: new revision"
    assert Starts(chain, *given, max_starts=2).decide().sentence.startswith("this was start 2")
    assert Starts(chain, *given, ("crashed", 19, 19)).decide().action == "stop", "that one failed by itself"


def test_restarts_that_a_person_asked_for_do_not_count_as_starts_that_show_nothing(
    chain: Any, by: Callable[..., Any]
) -> None:
    wish = by(act="restart", who="bob", why="")
    silent, wished = ("crashed", None, None), ("stopped", None, None, wish)
    assert Starts(chain, wished, wished, wished, silent, total_steps=None).decide().action == "continue"
    assert Starts(chain, silent, wished, silent, silent, total_steps=None).decide().action == "stop"


def test_a_hang_that_a_watcher_ended_is_tried_again_from_the_same_step_but_not_for_ever(
    chain: Any, by: Callable[..., Any]
) -> None:
    given = [("stopped", 30, 30), *[("hang", 45, 40, by())] * 3]
    assert Starts(chain, *given[:2]).decide().sentence == "start 0001.r1 ended: hang; it reached step 45, from 30"
    found = Starts(chain, *given[:3]).decide()
    assert (found.action, found.progress) == ("continue", "none")
    assert found.sentence == "start 0001.r2 ended: hang; no step beyond 45 (end 2 of at most 3 there)"
    found = Starts(chain, *given).decide()
    assert (found.action, found.sentence) == ("stop", "3 starts ended at step 45: hang: no step for 62 s")
    # A newer checkpoint in between is progress.
    assert Starts(chain, *given[:3], ("hang", 45, 45, by())).decide().action == "continue"
    # Nobody ended this hang: the program gave up by itself, and would do so again.
    assert Starts(chain, *given[:2], ("hang", 45, 40)).decide().action == "stop"


def test_other_failures_at_the_step_of_a_hang_count_and_planned_ends_do_not(chain: Any, by: Callable[..., Any]) -> None:
    hang = ("hang", 45, 40, by())
    found = Starts(chain, ("crashed", 45, 40), hang, hang).decide()
    assert (found.action, found.sentence) == (
        "stop",
        "3 starts ended at step 45: crashed, hang, hang: no step for 62 s",
    )
    assert Starts(chain, ("stopped", 45, 40), hang, ("preempted", 40, 40), hang).decide().action == "continue"
    at_start = [("hang", 0, None, by())] * 3
    assert Starts(chain, *at_start[:2]).decide().sentence.endswith("it made no step (end 2 of at most 3 there)")
    found = Starts(chain, *at_start).decide()
    assert found.sentence == "3 starts ended before they made a step: hang: no step for 62 s"


def test_a_program_that_a_person_stopped_at_its_last_step_is_finished(chain: Any, by: Callable[..., Any]) -> None:
    wish = by(act="restart", who="bob", why="new revision")
    assert Starts(chain, ("stopped", 99, None, 100, wish), total_steps=None).decide().action == "continue"
    assert Starts(chain, ("stopped", 100, None, 100, wish), total_steps=None).decide().action == "finished"

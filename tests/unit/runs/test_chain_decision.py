"""Whether a run starts again: by what its starts made, by count and by time. The decision is pure."""

from __future__ import annotations

from typing import Any

import pytest

from bigsci_launch.runs.chain.decision import ChainDecision, ChainStart, Mark, decide
from bigsci_launch.runs.chain.records import ChainRecord
from bigsci_launch.runs.watching.ended import EndedBy
from tests.support.texts import CheckText, has_parts

HANG = {"act": "end_ranks", "who": "agent", "why": "no step for 62 s", "continues": True}


def by(**fields: Any) -> EndedBy:
    """What `ended.json` says: an act, and what is not as when a watcher ends a hang."""
    return EndedBy(**{**HANG, **fields})


UNBOUND = {
    "by": "requeue", "max_starts": 50, "max_hours": None, "total_steps": 60, "only_preempted": False, "first": "0001",
}  # fmt: skip


class Starts:
    """Starts of a run, each given as (reason, last step, step of the newest checkpoint after it); `more` are the last
    step of the run, as printed, or who ended the start."""

    def __init__(self, *given: tuple[Any, ...], **bounds: Any) -> None:
        self.chain = ChainRecord(**{**UNBOUND, **bounds})
        self.starts = [
            ChainStart(
                name=f"0001.r{number}" if number else "0001",
                reason=reason,
                step=step,
                checkpoint=None if saved is None else Mark(saved, 100.0 + number),
                started=1000.0 + number,
                total_steps=next((each for each in more if isinstance(each, int)), None),
                ended_by=next((each for each in more if not isinstance(each, int)), None),
            )
            for number, (reason, step, saved, *more) in enumerate(given)
        ]

    def decide(self, now: float = 2000.0) -> ChainDecision:
        return decide(self.chain, self.starts, now)


EARLY = [("stopped", 19, 19), ("preempted", 0, 19), ("node_failure", 0, 19), (None, 0, 19), ("preempted", 0, 19)]
"""Starts that were stopped externally before completing a step."""
HUNG = [("stopped", 30, 30), *[("hang", 45, 40, by())] * 3]
AT_START = [("hang", 0, None, by())] * 3


def marked() -> Starts:
    """A start after which somebody ran `bsl cancel`."""
    starts = Starts(("preempted", 19, 19))
    starts.starts = [starts.starts[0]._replace(is_cancelled=True)]
    return starts


@pytest.mark.parametrize(
    "reason", ["stopped", "preempted", "time_limit", "crashed", "hang", "left_early", "node_failure", "unknown", None]
)
def test_a_start_that_made_steps_is_followed_by_another(reason: str | None) -> None:
    found = Starts((reason, 19, 19)).decide()
    assert (found.action, found.progress, found.step) == ("continue", "made", 19)


def test_a_finished_run_is_not_started_again() -> None:
    assert Starts(("stopped", 19, 19), ("finished", 60, 60)).decide().action == "finished"
    # The batch host died after the last save: nobody wrote why the start ended.
    assert Starts(("stopped", 19, 19), (None, 60, 60)).decide().action == "finished"


def test_a_start_without_a_step_more_stops_the_chain() -> None:
    found = Starts(("stopped", 19, 15), ("crashed", 19, 15)).decide()
    assert (found.action, found.progress) == ("stop", "none")
    assert Starts(("crashed", 0, None)).decide().action == "stop"


def test_a_newer_checkpoint_is_progress_even_if_fewer_steps_were_reached() -> None:
    """The start before was killed at step 35 and had saved 30; this one was stopped at 33 and saved."""
    assert Starts(("crashed", 35, 30), ("stopped", 33, 33)).decide().action == "continue"


def test_one_step_more_without_a_checkpoint_is_tolerated_a_few_times_only() -> None:
    given = [("crashed", 21 + number, 20) for number in range(5)]
    assert Starts(*given[:3]).decide().action == "continue"
    stopped = Starts(*given[:4]).decide()
    assert (stopped.action, stopped.progress) == ("stop", "made")
    outside = [("node_failure", 21 + number, 20) for number in range(5)]
    assert Starts(*outside).decide().action == "continue"


def test_starts_that_were_ended_from_outside_too_early_are_tolerated_a_few_times() -> None:
    for number in (2, 3, 4):
        found = Starts(*EARLY[:number]).decide()
        assert (found.action, found.progress) == ("continue", "none")
    assert Starts(*EARLY).decide().action == "stop"
    assert Starts(*EARLY[:3], ("crashed", 0, 19)).decide().action == "stop"


def test_what_is_not_known_is_neither_progress_nor_its_absence() -> None:
    given = [("crashed", None, None)] * 3
    for number in (1, 2):
        found = Starts(*given[:number], total_steps=None).decide()
        assert (found.action, found.progress, found.step) == ("continue", "unknown", None)
    found = Starts(*given, total_steps=None).decide()
    assert (found.action, found.progress) == ("stop", "unknown")
    assert Starts(*given, ("crashed", None, 40), total_steps=None).decide().action == "continue"


def test_a_program_that_printed_steps_once_makes_none_when_it_prints_none() -> None:
    found = Starts(("crashed", 7, None, 100), ("crashed", None, None), total_steps=None).decide()
    assert (found.action, found.progress) == ("stop", "none")


def test_a_program_that_leaves_with_0_before_its_last_step_is_not_finished() -> None:
    assert Starts(("finished", 50, None, 100), total_steps=None).decide().action == "continue"
    assert Starts(("finished", 100, None, 100), total_steps=None).decide().action == "finished"
    assert Starts(("finished", None, None), total_steps=None).decide().action == "finished"


def test_a_program_that_could_not_be_launched_made_no_progress() -> None:
    found = Starts(("launch_failed", None, None), total_steps=None).decide()
    assert (found.action, found.progress) == ("stop", "none")


def test_count_and_time_bound_a_chain() -> None:
    given = (("stopped", 10, 10), ("stopped", 20, 20))
    assert Starts(*given, max_starts=3).decide().action == "continue"
    assert Starts(*given, max_starts=2).decide().action == "stop"
    assert Starts(*given, max_hours=1).decide(now=1000 + 3599).action == "continue"
    assert Starts(*given, max_hours=1).decide(now=1000 + 5400).action == "stop"


def test_what_somebody_cancelled_stays_ended() -> None:
    assert Starts(("cancelled", 19, 19)).decide().action == marked().decide().action == "stop"


@pytest.mark.parametrize(("act", "reason"), [("exit", "stopped"), ("exit", "cancelled"), ("kill", "cancelled")])
def test_nothing_follows_what_a_person_ended(act: str, reason: str) -> None:
    request = by(act=act, who="alice", why="the loss is NaN", continues=False)
    found = Starts((reason, 19, 19, request)).decide()
    assert found.action == "stop" and has_parts(found.sentence, "alice", act, "the loss is NaN")
    # It had made its last step all the same.
    assert Starts(("finished", 60, 60, request)).decide().action == "finished"


@pytest.mark.parametrize("reason", ["stopped", "cancelled", "crashed"])
def test_a_restart_that_a_person_asked_for_follows_without_progress_too(reason: str) -> None:
    given = [("stopped", 19, 19), (reason, 19, 19, by(act="restart", who="bob", why="new revision", step=120))]
    found = Starts(*given).decide()
    assert (found.action, found.progress) == ("continue", "none")
    assert has_parts(found.sentence, "bob", "restart", 120, "new revision")
    assert has_parts(Starts(*given, max_starts=2).decide().sentence, "max_starts")
    assert Starts(*given, ("crashed", 19, 19)).decide().action == "stop", "that one failed by itself"


def test_restarts_that_a_person_asked_for_do_not_count_as_starts_that_show_nothing() -> None:
    request = by(act="restart", who="bob", why="")
    silent, requested = ("crashed", None, None), ("stopped", None, None, request)
    assert Starts(requested, requested, requested, silent, total_steps=None).decide().action == "continue"
    assert Starts(silent, requested, silent, silent, total_steps=None).decide().action == "stop"


def test_a_hang_that_a_watcher_ended_is_tried_again_from_the_same_step_but_not_for_ever() -> None:
    found = Starts(*HUNG[:3]).decide()
    assert (found.action, found.progress) == ("continue", "none")
    assert Starts(*HUNG).decide().action == "stop"
    # A newer checkpoint in between is progress.
    assert Starts(*HUNG[:3], ("hang", 45, 45, by())).decide().action == "continue"
    # Nobody ended this hang: the program gave up by itself, and would do so again.
    assert Starts(*HUNG[:2], ("hang", 45, 40)).decide().action == "stop"


def test_other_failures_at_the_step_of_a_hang_count_and_planned_ends_do_not() -> None:
    hang = ("hang", 45, 40, by())
    assert Starts(("crashed", 45, 40), hang, hang).decide().action == "stop"
    assert Starts(("stopped", 45, 40), hang, ("preempted", 40, 40), hang).decide().action == "continue"
    assert Starts(*AT_START[:2]).decide().action == "continue"
    assert Starts(*AT_START).decide().action == "stop"


def test_each_decision_has_its_sentence(check_text: CheckText) -> None:
    tried, known = [("crashed", 21 + number, 20) for number in range(4)], [("crashed", None, None)] * 3
    given = (("stopped", 10, 10), ("stopped", 20, 20))
    hang = ("hang", 45, 40, by())
    cases = [Starts((reason, 19, 19)) for reason in ("stopped", "crashed", None, "cancelled")]
    cases += [Starts(("stopped", 19, 15), ("crashed", 19, 15)), Starts(("crashed", 0, None)), Starts(*tried)]
    cases += [Starts(*EARLY[:2]), Starts(*EARLY), Starts(("stopped", 60, 60)), marked()]
    cases += [Starts(*known[:number], total_steps=None) for number in (1, 3)]
    cases += [Starts(*given, max_starts=2), Starts(*given, max_hours=0.2)]
    cases += [*(Starts(*HUNG[:number]) for number in (2, 3, 4)), Starts(("crashed", 45, 40), hang, hang)]
    cases += [Starts(*AT_START[:2]), Starts(*AT_START)]
    found = [case.decide() for case in cases]
    check_text(*(f"{each.action}, {each.progress}: {each.sentence}" for each in found))


def test_a_program_that_a_person_stopped_at_its_last_step_is_finished() -> None:
    request = by(act="restart", who="bob", why="new revision")
    assert Starts(("stopped", 99, None, 100, request), total_steps=None).decide().action == "continue"
    assert Starts(("stopped", 100, None, 100, request), total_steps=None).decide().action == "finished"

"""Whether a run starts again: by what its starts made, by count and by time. The decision is pure."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DIAGNOSTICS = Path(__file__).parents[2] / "diagnostics"


@pytest.fixture(scope="module")
def chain() -> Iterator[Any]:
    """The module `chain_decision`, as the job script finds it."""
    sys.path.insert(0, str(DIAGNOSTICS))
    try:
        import chain_decision  # type: ignore[import-not-found]

        yield chain_decision
    finally:
        sys.path.remove(str(DIAGNOSTICS))


class Starts:
    """Starts of a run, each given as (reason, last step, step of the newest checkpoint after it)."""

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
                total_steps=more[0] if more else None,
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

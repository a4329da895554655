"""The results of phases from evidence: what is not seen is not checked, and never a failure or a success."""

from __future__ import annotations

import math
from typing import Any

import pytest

from bigsci_launch.rehearse.evidence import AttemptEvidence, StepSeen
from bigsci_launch.rehearse.judge import (
    judge_evaluation,
    judge_resume_after_kill,
    judge_resume_after_stop,
    judge_save,
    judge_steps,
    judge_stop,
    judge_survival,
    judge_teardown,
    with_left_over,
)
from bigsci_launch.rehearse.phases import Measured, PhaseResult, Played, decide
from bigsci_launch.runs.generations.read import parse_generations
from tests.support.texts import has_parts


def seen(*losses: float, first: int = 1, recorded: bool = True, **more: Any) -> AttemptEvidence:
    steps = tuple(StepSeen(first + at, loss, loss.hex(), 1.0) for at, loss in enumerate(losses))
    fields: dict[str, Any] = {"evaluations": {}, "saves": {}, "loaded": None, **more}
    return AttemptEvidence(ranks=(), steps=steps, is_recorded=recorded, **fields)


NOTHING = seen(recorded=False)
KILLED = {
    "reason": "crashed",
    "exit_code": 137,
    "first_failure": {"rank": 3, "node": "n1", "signal": "SIGKILL", "code": None, "error": None},
}


def test_what_is_not_printed_is_not_checked() -> None:
    assert judge_steps(NOTHING, 1.0).outcome == "not checked"
    assert judge_save(NOTHING, 1.0).outcome == "not checked"
    assert judge_evaluation(NOTHING, is_asked=True, seconds=1.0).outcome == "not checked"
    assert judge_resume_after_kill(NOTHING, NOTHING, 1.0, saved=2, tolerance=0).outcome == "not checked"
    assert judge_resume_after_stop(NOTHING, NOTHING, 1.0, saved=2).outcome == "not checked"
    stopped = {"reason": "stopped", "exit_code": 0}
    assert judge_stop(NOTHING, stopped, 1.0, 60.0, 0).outcome == "not checked"


def test_what_records_do_not_show_has_failed() -> None:
    assert judge_save(seen(1.0, 1.0), 1.0).outcome == "failed"
    assert judge_evaluation(seen(1.0), is_asked=True, seconds=1.0).outcome == "failed"
    assert judge_evaluation(seen(1.0), is_asked=False, seconds=1.0).outcome == "none"


@pytest.mark.parametrize(("loss", "outcome"), [(4.0, "ok"), (math.nan, "failed"), (math.inf, "failed")])
def test_losses_are_finite(loss: float, outcome: str) -> None:
    assert judge_steps(seen(5.0, loss, 3.0), 1.0).outcome == outcome


@pytest.mark.parametrize(
    ("after", "saved", "outcome", "words"),
    [
        (seen(2.0, 1.0, first=3, loaded=2), 2, "ok", "steps 3-4"),
        (seen(2.0, 1.1, first=3, loaded=2), 2, "failed", "10 %"),
        (seen(2.0, math.nextafter(1.0, 2.0), first=3, loaded=2), 2, "failed", "differ"),
        (seen(4.0, first=1), 2, "failed", "step 1, although step 2"),
        (seen(1.0, first=4, loaded=2), 2, "failed", "began with step 4"),
        (seen(2.0, first=3, loaded=1), 2, "failed", "loaded step 1"),
        (seen(0.5, first=5, loaded=4), 4, "not checked", "compared"),
        (seen(4.0, first=1), 0, "not checked", "save"),
    ],
)
def test_a_resume_repeats_the_steps_after_the_save(
    after: AttemptEvidence, saved: int, outcome: str, words: str
) -> None:
    before = seen(4.0, 3.0, 2.0, 1.0)
    found = judge_resume_after_kill(before, after, 1.0, saved=saved, tolerance=0.0)
    assert (found.outcome, words in "; ".join(found.evidence)) == (outcome, True), found


def test_losses_that_are_within_a_tolerance_are_not_called_equal() -> None:
    before, after = seen(4.0, 3.0, 2.0), seen(2.0001, first=3, loaded=2)
    found = judge_resume_after_kill(before, after, 1.0, saved=2, tolerance=1e-3)
    assert found.outcome == "ok"
    assert "differ" in found.evidence[-1] and "equal" not in found.evidence[-1]


def test_a_teardown_names_the_killed_rank_and_its_code() -> None:
    assert judge_teardown(3, KILLED, 2.0, 300.0).outcome == "ok"
    for wrong in (
        {**KILLED, "exit_code": 1},
        {**KILLED, "reason": "node_failure"},
        {**KILLED, "first_failure": {**KILLED["first_failure"], "rank": 0}},  # type: ignore[dict-item]
        {**KILLED, "first_failure": None},
        None,
    ):
        assert judge_teardown(3, wrong, 2.0, 300.0).outcome == "failed", wrong
    late = judge_teardown(3, None, None, 300.0)
    assert late.outcome == "failed" and has_parts(late.evidence[0], "300 s", "rank 3")
    stuck = judge_teardown(3, KILLED, None, 300.0)
    assert stuck.outcome == "failed" and stuck.evidence[0] != late.evidence[0]


def test_processes_that_are_left_fail_and_nodes_that_were_not_seen_are_named() -> None:
    killed = judge_teardown(3, KILLED, 2.0, 300.0)
    assert with_left_over(killed, ["pid 9 (python) on n0"], ["n0", "n1"], ["n0", "n1"]).outcome == "failed"
    clean = with_left_over(killed, [], ["n0"], ["n0", "n1"])
    assert clean.outcome == "ok"
    _, looked_at, unseen = clean.evidence
    assert "n1" in unseen and looked_at not in with_left_over(killed, [], [], ["n0"]).evidence


def test_a_stop_saves_within_the_margin() -> None:
    stopped = {"reason": "stopped", "exit_code": 0}
    assert judge_stop(seen(1.0, first=9, saves={9: 0.1}), stopped, 5.0, 60.0, 8).outcome == "ok"
    assert judge_stop(seen(1.0, 1.0, first=9, saves={}), stopped, 5.0, 60.0, 8).outcome == "failed"
    assert judge_stop(seen(1.0, saves={1: None}), None, None, 60.0, 0).outcome == "failed"
    assert judge_stop(seen(1.0, saves={1: None}), {**KILLED}, 5.0, 60.0, 0).outcome == "failed"


def test_the_verdict() -> None:
    def phase(outcome: Any) -> PhaseResult:
        return PhaseResult("save", outcome, None, ("because",))

    assert decide([phase("ok"), phase("not checked"), phase("none")], has_started=True) == "go"
    assert decide([phase("ok"), phase("failed")], has_started=True) == "no-go"
    assert decide([phase("not checked")], has_started=False) == "unknown"
    assert decide([phase("failed")], has_started=False) == "no-go"
    played = Played((phase("ok"), phase("none"), phase("not checked")), Measured(), ("dp 2 -> 1",))
    assert played.not_checked == ("save: because", "dp 2 -> 1")


LOST: list[dict[str, Any]] = [
    {"event": "began", "generation": 0, "time": 10.0, "world_size": 2},
    {"event": "phase", "phase": "first_step", "generation": 0, "time": 11.0, "seconds": 1.0, "step": 1},
    {"event": "failed", "generation": 0, "time": 20.0, "kind": "died", "rank": 1, "died": 19.9, "noticed": 20.0},
    {"event": "ended", "generation": 0, "time": 20.2, "step": 8, "seconds": 0.2},
    {"event": "began", "generation": 1, "time": 20.3, "world_size": 2},
]
BACK: list[dict[str, Any]] = [
    {"event": "phase", "phase": "restored", "generation": 1, "seconds": 0.1, "step": 8, "source": "replicas"},
    {"event": "phase", "phase": "first_step", "generation": 1, "seconds": 0.2, "step": 9},
]


def test_a_run_that_survives_is_back_when_all_ranks_have_done_a_step() -> None:
    back = judge_survival(1, parse_generations([*LOST, *BACK]), None, 3.0)
    assert back.outcome == "ok"
    assert has_parts("; ".join(back.evidence), "rank 1", "step 9", "same state")


@pytest.mark.parametrize(("records", "ending"), [([], None), (LOST[:2], None), (LOST, None), ([*LOST, *BACK], KILLED)])
def test_a_run_that_is_not_back_has_not_survived(records: list[dict[str, Any]], ending: dict[str, Any] | None) -> None:
    assert judge_survival(1, parse_generations(records), ending, 3.0).outcome == "failed"

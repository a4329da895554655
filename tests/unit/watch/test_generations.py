"""A run with `survive`: a recovery is a phase of its own, what is done again is no news, and a hang is fenced."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.runs.control.request import OF_CONTROLLER, read_requests
from bigsci_launch.runs.generations.read import read_generations
from bigsci_launch.runs.layout import AttemptDir, RunDir, write_json
from bigsci_launch.runs.watching.ledger import RunFinding, read_acts
from bigsci_launch.runs.watching.places import open_to_write
from bigsci_launch.scheduler.job import JobInfo, JobState, NodeInfo
from bigsci_launch.spy.taxonomy import State
from bigsci_launch.topology import Topology
from bigsci_launch.watch.act import fence
from bigsci_launch.watch.act.fence import ask_controller, follow_recovery, recovery_request
from bigsci_launch.watch.facts import standing as facts
from bigsci_launch.watch.facts.generations import GenerationWatch
from bigsci_launch.watch.facts.job import JobView
from bigsci_launch.watch.facts.look import Look
from bigsci_launch.watch.facts.stalls import StallWatch
from bigsci_launch.watch.judge.log_event import LogEvent
from bigsci_launch.watch.judge.silence import Pace, Silence
from bigsci_launch.watch.read.sources import AttemptTail
from tests.support.generation_records import GenerationRecords
from tests.support.texts import has_parts

PAIR, WHOLE = Topology(dp=2), Topology(dp=4)
HANG = RunFinding("hang", "stall:0001:45", "no step: rank 3 sleeps", 1.0, "0001", step=45, bundle="/spy/1")


def said(phase: str, **more: Any) -> LogEvent:
    return LogEvent("generation", phase=phase, **more)


def heartbeats(step: int, *ranks: int, phase: str = "step", time: float = 0.0) -> list[LogEvent]:
    return [LogEvent("phase", time, rank, step, phase) for rank in ranks]


@pytest.fixture
def training(watch: Callable[..., Any]) -> Any:
    """Four ranks in step 31 of generation 0; the last one reports steps of 100 s."""
    found = watch(eval_interval=0, save_interval=0)
    found.see(said("began", world_size=4), *(LogEvent("start", 0.0, rank) for rank in range(4)))
    found.see(said("joined"), said("restored", step=0), said("first_step", step=1))
    for step in range(1, 31):
        found.see(*heartbeats(step, 0, 1, 2, 3, time=100.0 * step), after=10.0)
        found.see(LogEvent("step", 100.0 * step, 3, step, seconds=100.0, loss=5.0 - step / 100), after=90.0)
    found.see(*heartbeats(31, 0, 1, 2, 3, time=3100.0))
    return found


def recover(training: Any, world_size: int, step: int, *ranks: int) -> None:
    training.see(said("failed"), said("ended", step=30), after=1.0)
    training.see(said("began", world_size=world_size), after=1.0)
    training.see(LogEvent("start", 3105.0, ranks[-1]), said("joined"), said("restored", step=step), after=1.0)
    training.see(*heartbeats(step + 1, *ranks, time=3110.0), after=0.5)


def test_a_recovery_is_a_phase_of_its_own_and_too_long_after_a_minute(training: Any) -> None:
    training.see(said("failed"), said("ended", step=30), after=1.0)
    assert training.tracker.recovers
    silent = training.silent(59)
    assert (silent.phase, silent.pace, silent.step) == ("recovery", Pace.USUAL, 30)
    assert (training.silent(61).phase, training.silent(61).pace) == ("recovery", Pace.TOO_LONG)
    training.see(said("began", world_size=4), after=50.0)
    assert training.silent(59).phase == "recovery", "each phase is a sign of life"
    training.see(said("joined"), said("restored", step=30), after=1.0)
    assert not training.tracker.recovers


def test_after_a_recovery_the_steps_are_judged_as_before_although_one_rank_started_again(training: Any) -> None:
    recover(training, 4, 29, 0, 1, 2, 3)
    silent = training.silent(150)
    assert (silent.phase, silent.pace, silent.step) == ("step", Pace.USUAL, 29)
    for step in range(31, 36):
        training.see(*heartbeats(step, 0, 1, 2, 3, time=3110 + 100.0 * (step - 30)), after=100.0)
    assert training.silent(250).pace is Pace.LONG
    assert training.silent(450).pace is Pace.TOO_LONG


def test_a_rank_that_starts_again_leaves_the_others_where_they_are(training: Any) -> None:
    training.see(said("failed"), said("ended"), said("began", world_size=4), said("joined"), said("restored", step=30))
    training.see(*heartbeats(31, 0, 1, 2), LogEvent("start", 3105.0, 3), *heartbeats(31, 3))
    training.see(*heartbeats(32, 3))
    assert "ranks 0-2 are behind" in training.silent(250).sentence


def test_steps_that_are_done_again_are_neither_a_spike_nor_slow(training: Any) -> None:
    recover(training, 4, 20, 0, 1, 2, 3)
    for step in range(21, 45):
        training.see(LogEvent("step", 3110 + 100.0 * (step - 20), 3, step, seconds=100.0, loss=5.0 - step / 100))
    assert training.noticed == []


def test_ranks_that_the_smaller_generation_does_not_have_are_not_behind_even_if_their_records_come_late(
    training: Any,
) -> None:
    recover(training, 2, 30, 0, 1)
    training.see(*heartbeats(31, 2, 3, time=3100.0))
    for step in range(32, 40):
        training.see(*heartbeats(step, 0, 1, time=3110 + 200.0 * (step - 31)), after=100.0)
        training.see(LogEvent("step", 3110 + 200.0 * (step - 31), 1, step, seconds=200.0, loss=4.7), after=100.0)
    silent = training.silent(300)
    assert (silent.step, silent.pace) == (38, Pace.USUAL), "with half the ranks, a step takes twice as long"
    assert "behind" not in silent.sentence
    for step in range(40, 70):
        training.see(LogEvent("step", 3110 + 200.0 * (step - 31), 1, step, seconds=200.0, loss=4.6), after=200.0)
    assert training.noticed == [], "and that is not slower than usual"


def test_programs_that_say_nothing_are_starting_when_the_next_generation_begins(watch: Callable[..., Any]) -> None:
    found = watch()
    found.see(said("began", world_size=4))
    for step in range(1, 31):
        found.see(LogEvent("step", None, 3, step, seconds=100.0), after=100.0)
    found.see(said("failed"), said("ended"), after=1.0)
    assert found.silent(5).phase == "recovery"
    found.see(said("began", world_size=4), after=1.0)
    assert found.silent(200).phase == "start"
    found.see(LogEvent("step", None, 2, 11, seconds=100.0), after=60.0)
    assert found.tracker.step == 11, "another rank may report the steps that are done again"


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    found = RunDir(tmp_path / "run").attempt("0001")
    found.make()
    return found


@pytest.fixture
def records(attempt: AttemptDir) -> GenerationRecords:
    found = GenerationRecords(attempt)
    found.begins(WHOLE, ["n0", "n0", "n1", "n1"])
    found.comes_back(0, "start", joined=1.0, restored=2.0, first=3.0)
    return found


def run_of(attempt: AttemptDir) -> RunDir:
    return RunDir(attempt.path.parent.parent)


def test_the_records_of_the_controller_are_sightings(attempt: AttemptDir, records: GenerationRecords) -> None:
    tail = AttemptTail(attempt)
    phases = [(each.phase, each.step, each.world_size) for each in tail.read()]
    assert phases == [("began", None, 4), ("joined", None, None), ("restored", 0, None), ("first_step", 1, None)]
    records.fails("died", 2, "n1", signal="SIGKILL")
    assert [each.phase for each in tail.read()] == ["failed"]


def test_a_recovery_is_told_once_and_one_that_lasts_is_a_finding(
    attempt: AttemptDir, records: GenerationRecords
) -> None:
    watching = GenerationWatch(attempt)
    watching.read(100.0)
    assert not list(watching.news())
    write_json(attempt.exit_file(2), {"rank": 2, "code": None, "signal": "SIGKILL"})
    assert watching.is_ending, "the controller records failures when all ranks have left"
    records.fails("died", 2, "n1", signal="SIGKILL")
    records.ends(12, 0.4)
    watching.read(101.0)
    assert not watching.is_ending and "recovering" in watching.remark
    assert not list(watching.long_recovery(150.0))
    (long,) = watching.long_recovery(165.0)
    assert has_parts(long.sentence, "rank 2", "SIGKILL", "have left")
    records.begins(WHOLE, ["n0", "n0", "n1", "n1"])
    records.comes_back(12, "buddies", joined=0.5, restored=0.8, first=1.4)
    watching.read(170.0)
    (told,) = watching.news()
    assert has_parts(told.sentence, "generation 1", "rank 2 (dp2 pp0 tp0) on n1", "SIGKILL", "step 13")
    assert told.cleared is not None, "it is over when it is told"
    assert not list(watching.news()) and not list(watching.long_recovery(400.0))


def test_a_node_whose_ranks_were_replaced_is_no_finding(attempt: AttemptDir, records: GenerationRecords) -> None:
    job = JobInfo("7", JobState.RUNNING, "RUNNING", "squeue", hostlist="n[0-2]", num_nodes=3)
    view = JobView(job=job, seen=0.0, silent_nodes=(NodeInfo("n1", "down*", "Not responding"),))
    assert len(facts.lost_nodes(attempt, view)[0]) == 1
    records.fails("lost_node", 2, "n1")
    records.ends(12, 0.4)
    records.begins(WHOLE, ["n0", "n0", "n2", "n2"])
    assert facts.lost_nodes(attempt, view) == ([], [])


def test_a_wish_is_written_down_first_and_only_once_in_a_generation(
    attempt: AttemptDir, records: GenerationRecords
) -> None:
    run = run_of(attempt)
    assert has_parts(ask(attempt), "fence rank 3", "generation 0")
    assert ask(attempt, "two") == ""
    (asked,) = read_requests(attempt, OF_CONTROLLER)
    assert (asked.verb, asked.rank, asked.failure, asked.generation) == ("fence", 3, "hung", 0)
    assert (asked.why, asked.who, asked.wrong) == ("rank 3 sleeps", "one", None)
    assert [(act.what, act.state, act.step) for act in read_acts(run)] == [("fence", "begun", 45)]


def test_nothing_is_asked_that_cannot_be_written_down(attempt: AttemptDir, records: GenerationRecords) -> None:
    run = run_of(attempt)
    run.watch.write_text("not a folder")
    with pytest.raises(OSError, match="Not a directory"):
        ask(attempt)
    assert not list(attempt.requests.iterdir())


def test_one_step_is_disturbed_three_times_at_most(attempt: AttemptDir, records: GenerationRecords) -> None:
    asked = [ask(attempt, generation=number) for number in range(4)]
    assert ["fence rank 3" in words for words in asked] == [True, True, True, False]
    assert "3 times" in asked[3]
    assert ask(attempt, generation=2) == "", "it was asked"
    later = RunFinding("hang", "stall:0001:46", "no step", 1.0, "0001", step=46)
    assert "fence rank 3" in ask(attempt, generation=3, finding=later)


def ask(attempt: AttemptDir, who: str = "one", generation: int = 0, finding: RunFinding = HANG) -> str:
    request = recovery_request(attempt, who, generation, [3], "rank 3 sleeps")
    return ask_controller(run_of(attempt), attempt, finding, request)


def settle(attempt: AttemptDir, after_s: float = 0.0) -> list[str]:
    found = read_generations(attempt)
    assert found is not None
    return list(follow_recovery(run_of(attempt), attempt, found, time.time() + after_s))


def test_what_came_of_a_fence_is_read_from_the_next_generation(attempt: AttemptDir, records: GenerationRecords) -> None:
    ask(attempt)
    write_json(attempt.answers / "fence.0001.0.json", {"granted": True, "refused": None})
    assert settle(attempt, 60.0) == []
    records.fails("hung", 3, "n1", signal="SIGKILL", words="rank 3 sleeps")
    records.ends(45, 0.1)
    assert settle(attempt, 60.0) == []
    records.begins(WHOLE, ["n0", "n0", "n1", "n1"])
    assert settle(attempt, 60.0) == []
    records.comes_back(45, "memory", joined=0.5, restored=0.8, first=1.4)
    (words,) = settle(attempt)
    assert has_parts(words, "fence: done: ", "generation 1", "step 46")
    assert settle(attempt) == []


@pytest.mark.parametrize(
    ("answer", "state"), [({"granted": False, "refused": "rank 3 does not run"}, "refused"), (None, "failed")]
)
def test_a_fence_that_is_refused_or_not_answered_is_said(
    attempt: AttemptDir, records: GenerationRecords, answer: dict[str, Any] | None, state: str
) -> None:
    ask(attempt)
    if answer is not None:
        write_json(attempt.answers / "fence.0001.0.json", answer)
    assert settle(attempt, fence.UNANSWERED_S - 5) == [] or answer is not None
    settle(attempt, fence.UNANSWERED_S + 5)
    assert read_acts(run_of(attempt))[-1].state == state
    if answer is None:
        assert not list(attempt.requests.glob("*.json")), "it must not be granted later, when nobody wants it"


@pytest.mark.parametrize(
    ("looks", "pace", "is_one"),
    [
        ([Look(State.HANG, "a circle", confidence=0.97)] * 2, Pace.LONG, True),
        ([Look(State.WAITING, "ranks wait")] * 2, Pace.TOO_LONG, True),
        ([Look(State.WAITING, "ranks wait")] * 2, Pace.LONG, False),
        ([Look(State.WAITING, "ranks wait")], Pace.TOO_LONG, False),
        ([Look(State.WAITING, "ranks wait"), Look(State.SLOW, "rank 3 is late")], Pace.TOO_LONG, False),
        ([Look(None, "no node answered")] * 2, Pace.TOO_LONG, False),
        ([Look(State.HANG, "rank 3 sleeps", (3,), confidence=0.97)] * 2, Pace.TOO_LONG, False),
    ],
)
def test_only_a_hang_that_two_looks_cannot_explain_is_unexplained(looks: list[Look], pace: Pace, is_one: bool) -> None:
    given = list(looks)
    stalls = StallWatch(lambda *_: given.pop(0), 10.0, 30.0)
    silence = Silence(pace, "step", 45, 500.0, 100.0, "nothing new")
    for at in range(len(looks)):
        stalls.look_now(silence, 1000.0 + 40 * at)
    assert stalls.is_unexplained(silence) is is_one


@pytest.mark.parametrize(
    "key", ["{0}/data:1", "fence:0001:x", "fence:../..:1", "abc", "fence:0002:1", "restart:0001:1"]
)
def test_no_path_is_made_of_what_the_ledger_says(attempt: AttemptDir, records: GenerationRecords, key: str) -> None:
    """Such a line once had a file deleted, `DIR/data.1.json`, wherever it was."""
    precious = attempt.path / "data.1.json"
    precious.write_text("[]")
    line = {
        "key": key.format(attempt.path),
        "what": "fence",
        "who": "x",
        "why": "",
        "state": "begun",
        "attempt": "0001",
    }
    with open_to_write(run_of(attempt)):
        run_of(attempt).acts.write_text(json.dumps(line) + "\n")
    assert settle(attempt, 1000.0) == [] and precious.exists()

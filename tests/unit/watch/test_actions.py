"""What a watcher that may act does: once, written down first, and carried on if the watcher dies in between."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from bigsci_launch.errors import SlurmRefused
from bigsci_launch.runs.layout import AttemptDir, RunDir, read_json
from bigsci_launch.runs.watching.ledger import RunFinding, read_acts
from bigsci_launch.watch.act import actions

HANG = RunFinding("hang", "stall:0001:45:step", "rank 3 sleeps", time.time(), "0001", step=45, bundle="/spy/1")


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    found = RunDir(tmp_path / "run").attempt("0001")
    found.make()
    return found


def run_of(attempt: AttemptDir) -> RunDir:
    return RunDir(attempt.path.parent.parent)


def end(attempt: AttemptDir, who: str, calls: list[str], nodes: tuple[str, ...] = ()) -> str:
    def end_ranks() -> str:
        assert read_json(attempt.ended_by)["act"] == "end_ranks", "why comes before the end"
        calls.append(who)
        return "told to end"

    return actions.end_hang(run_of(attempt), attempt, who, HANG, nodes, end_ranks)


def test_a_hang_is_ended_by_one_of_two_watchers(attempt: AttemptDir) -> None:
    calls: list[str] = []
    assert end(attempt, "one", calls, ("n1",)) == "told to end"
    assert end(attempt, "two", calls) == ""
    assert end(attempt, "one", calls) == ""
    assert calls == ["one"]
    said = read_json(attempt.ended_by)
    assert (said["continues"], said["nodes"], said["bundle"], said["step"]) == (True, ["n1"], "/spy/1", 45)
    assert [(act.what, act.state) for act in read_acts(run_of(attempt))] == [
        ("end_ranks", "begun"),
        ("end_ranks", "done"),
        ("leave_out", "done"),
    ]


def test_a_watcher_that_died_in_the_middle_is_followed_after_two_minutes(attempt: AttemptDir) -> None:
    calls: list[str] = []

    def dies() -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        actions.end_hang(run_of(attempt), attempt, "one", HANG, (), dies)
    assert end(attempt, "two", calls) == ""
    claimed = run_of(attempt).claim_file("end_ranks:0001:1")
    os.utime(claimed, (time.time() - actions.DIED_S - 1,) * 2)
    assert end(attempt, "two", calls) == "told to end"
    os.utime(claimed, (time.time() - actions.DIED_S - 1,) * 2)
    assert end(attempt, "three", calls) == ""
    assert calls == ["two"]


def test_an_end_that_slurm_refuses_leaves_no_reason_behind(attempt: AttemptDir) -> None:
    def refuse() -> str:
        raise SlurmRefused("scancel: not yours")

    said = actions.end_hang(run_of(attempt), attempt, "one", HANG, (), refuse)
    assert "scancel: not yours" in said
    assert not attempt.ended_by.exists(), "the attempt will end for another reason"
    assert [act.state for act in read_acts(run_of(attempt))] == ["begun", "failed"]


def test_ranks_that_stay_are_killed_once_also_by_a_watcher_that_was_started_since(attempt: AttemptDir) -> None:
    kills: list[str] = []

    def kill() -> str:
        kills.append("kill")
        return "ranks killed"

    run = run_of(attempt)
    assert actions.finish_end(run, attempt, kill, time.time()) == "", "nobody has told them to end"
    end(attempt, "one", [])
    assert actions.finish_end(run, attempt, kill, time.time()) == "", "they may be at it"
    assert actions.finish_end(run, attempt, kill, time.time() + 60) == "ranks killed"
    assert actions.finish_end(run, attempt, kill, time.time() + 90) == ""
    assert kills == ["kill"]


def test_checkpoints_around_a_spike_are_pinned_once(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    for step in (10, 20, 40):
        (run.checkpoints / f"global_step{step}").mkdir(parents=True)
    spike = RunFinding("loss_spike", "loss_spike:0001:25", "the loss is high", time.time(), "0001", step=25)
    assert len(actions.pin_around(run, "one", spike)) == 2
    assert actions.pin_around(run, "two", spike) == []
    pinned = sorted(path.parent.name for path in run.checkpoints.glob("*/pinned"))
    assert pinned == ["global_step20", "global_step40"]

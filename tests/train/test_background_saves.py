"""Saves in the background: the same files and losses as without, and a complete `latest` whatever happens."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.checkpoints.folder import CheckpointsDir
from bigsci_launch.checkpoints.verify import verify_checkpoint
from bigsci_launch.runs.control.request import Request, put_request

from .conftest import Attempt, Start, losses

pytestmark = pytest.mark.torch
SLOW = "slow_saves"
IN_BACKGROUND = {"save_interval": 2, "background": True}
RUN: dict[str, Any] = {"model": {"dropout": 0.1}, "training": {"steps": 6, "precision": "bf16"}}


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a checkpoint without its record, which has the time of the save and its settings."""
    own = ("checkpoint.json", "verified.json")
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in own]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def latest(attempt: Attempt) -> str:
    """Return the name of the newest checkpoint, which is as it was saved."""
    checkpoints = CheckpointsDir(attempt.run.checkpoints)
    tag = checkpoints.read_latest()
    assert verify_checkpoint(checkpoints.folder(tag)).problems == ()
    return tag


def waits(attempt: Attempt, rank: int = 0) -> dict[int, float | None]:
    """Return how long training has waited for each save; None for a save that was not in the background."""
    return {each["step"]: each.get("stalled_s") for each in attempt.events(rank, "save")}


@pytest.fixture
def late_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LATE_COPIES", "1")


@pytest.fixture
def slow_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WRITE_S", "2")


@pytest.fixture(scope="module")
def undisturbed(finish: Start, tmp_path_factory: pytest.TempPathFactory) -> Attempt:
    return finish(tmp_path_factory.mktemp("undisturbed"), "dp=2", **RUN, checkpoint={"save_interval": 2})


@pytest.mark.usefixtures("late_copies")
@pytest.mark.parametrize(
    ("topology", "precision"),
    [
        ("dp=2", "bf16"),
        *(pytest.param(*each, marks=pytest.mark.long) for each in (("tp=2,pp=2", "bf16"), ("dp=2", "fp32"))),
    ],
)
def test_the_files_are_those_of_a_save_that_training_waits_for(
    finish: Start, tmp_path: Path, topology: str, precision: str
) -> None:
    """The optimizer waits for the copies, so what it changes is not in them."""
    run = {**RUN, "training": {"steps": 4, "precision": precision}}
    found = [
        finish(tmp_path / str(each), topology, SLOW, **run, checkpoint={"save_interval": 1, "background": each})
        for each in (False, True)
    ]
    assert losses(found[0]) == losses(found[1])
    plain, background = (CheckpointsDir(each.run.checkpoints) for each in found)
    assert plain.tags() == background.tags() == [f"global_step{step}" for step in range(1, 5)]
    for tag in plain.tags():
        assert contents(plain.folder(tag)) == contents(background.folder(tag))
    assert latest(found[1]) == "global_step4"
    assert [seconds is None for seconds in waits(found[1], rank=1).values()] == [False, False, False, True]


@pytest.mark.usefixtures("slow_writes")
def test_a_save_that_is_due_waits_for_the_one_before(finish: Start, tmp_path: Path, undisturbed: Attempt) -> None:
    attempt = finish(tmp_path, "dp=2", SLOW, **RUN, checkpoint={**IN_BACKGROUND, "keep_last": 2})
    assert losses(attempt) == losses(undisturbed)
    found = [waits(attempt, rank) for rank in range(2)]
    assert list(found[0]) == list(found[1]) == [2, 4, 6]
    assert found[0][6] is None and (found[0][4] or 0) > 0.5 > (found[0][2] or 0)
    assert CheckpointsDir(attempt.run.checkpoints).tags() == ["global_step4", "global_step6"]
    assert latest(attempt) == "global_step6"


@pytest.mark.usefixtures("slow_writes")
def test_a_killed_rank_costs_the_save_in_the_background(
    start: Start, finish: Start, tmp_path: Path, undisturbed: Attempt
) -> None:
    attempt = start(tmp_path, "dp=2", SLOW, **RUN, checkpoint=IN_BACKGROUND)
    attempt.until(lambda: waits(attempt).keys() == {2} and 4 in attempt.steps())
    attempt.processes[1].send_signal(signal.SIGKILL)
    assert attempt.wait()[0] not in (0, None)
    assert latest(attempt) == "global_step2"
    resumed = finish(tmp_path, "dp=2", **RUN, checkpoint=IN_BACKGROUND)
    assert resumed.events(0, "load")[0]["checkpoint_step"] == 2
    assert {**losses(attempt), **losses(resumed)} == losses(undisturbed)
    assert not CheckpointsDir(resumed.run.checkpoints).stagings()


def test_a_run_that_fails_completes_the_save_in_the_background(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WRITE_S", "1")
    monkeypatch.setenv("FAIL_AT", "3")
    attempt = start(tmp_path, "dp=2", SLOW, **RUN, checkpoint=IN_BACKGROUND)
    assert attempt.wait() == [1, 1], attempt.logs()
    assert [error and error["type"] for error in map(attempt.error, range(2))] == ["RuntimeError"] * 2
    assert not attempt.events(0, "save")
    assert latest(attempt) == "global_step2"


@pytest.mark.usefixtures("slow_writes")
def test_a_requested_save_is_reported_once_it_is_committed(start: Start, tmp_path: Path) -> None:
    slow = {"kind": "slow", "rank": 1, "step": 1, "seconds": 0.1}
    run = {**RUN, "training": {"steps": 2000}}
    attempt = start(tmp_path, "dp=2", SLOW, **run, faults=[slow], checkpoint={"background": True})
    attempt.until(lambda: bool(attempt.steps()))
    step = max(attempt.steps()) + 10
    put_request(attempt.folder, Request("save-a", "save", "alice", "a look", step, attempt.folder.name))
    attempt.until(lambda: bool(attempt.events(0, "save")))
    saved = attempt.events(0, "save")[0]
    assert (saved["request"], saved["stalled_s"] < 1 < saved["seconds"]) == ("save-a", True)
    assert saved["step"] >= step, "a busy machine reads the request late"
    assert max(attempt.steps()) > saved["step"] + 3
    assert latest(attempt) == f"global_step{saved['step']}"
    os.kill(attempt.processes[0].pid, signal.SIGTERM)
    assert attempt.wait() == [0, 0], attempt.logs()
    assert latest(attempt) == f"global_step{max(attempt.steps())}"

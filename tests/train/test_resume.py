"""Stop, save, resume: the loss goes on as if nothing had happened, to the last bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.runs.checkpoints import CheckpointsDir, find_checkpoint, read_record, require_complete

pytestmark = pytest.mark.torch

STEPS = 8
BF16 = {"steps": STEPS, "precision": "bf16"}


def losses(attempt: Any) -> dict[int, str]:
    return {step: record["loss_hex"] for step, record in attempt.steps().items()}


@pytest.fixture(scope="module")
def undisturbed(finish: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return finish(
        tmp_path_factory.mktemp("undisturbed"), "tp=2,pp=2,dp=2", training=BF16, monitor={"dump_weights_steps": [2]}
    )


@pytest.fixture(scope="module")
def stopped(start: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Eight ranks, of which one gets SIGUSR2 after step 2."""
    attempt = start(tmp_path_factory.mktemp("stopped"), "tp=2,pp=2,dp=2", training={**BF16, "stop_after_steps": 6})
    attempt.until(lambda: 2 in attempt.steps())
    os.kill(attempt.processes[3].pid, signal.SIGUSR2)
    attempt.wait()
    return attempt


@pytest.fixture(scope="module")
def resumed(stopped: Any, finish: Any) -> Any:
    return finish(stopped.run.path, "tp=2,pp=2,dp=2", training=BF16)


def test_a_signal_to_one_rank_stops_all_at_one_step(stopped: Any) -> None:
    ends = [stopped.events(rank)[-1] for rank in range(8)]
    assert {end["reason"] for end in ends} == {"signal"}
    (step,) = {end["step"] for end in ends}
    assert 2 <= step < 6
    assert [process.returncode for process in stopped.processes] == [0] * 8
    folder = find_checkpoint("auto", CheckpointsDir(stopped.run.checkpoints))
    assert folder is not None
    assert folder.name == f"global_step{step}"
    require_complete(folder, read_record(folder))
    assert (stopped.run.checkpoints / "latest_checkpointed_iteration.txt").read_text() == f"{step}\n"


def test_the_resumed_run_is_the_undisturbed_one_to_the_last_bit(undisturbed: Any, stopped: Any, resumed: Any) -> None:
    first = losses(stopped)
    assert resumed.events(4, "load")[0]["checkpoint_step"] == max(first)
    assert sorted(losses(resumed)) == list(range(max(first) + 1, STEPS + 1))
    assert {**first, **losses(resumed)} == losses(undisturbed)


def test_weights_are_dumped_per_rank(undisturbed: Any) -> None:
    safetensors = pytest.importorskip("safetensors")
    path = undisturbed.run.dump_file(2, "after", 5)
    with safetensors.safe_open(path, "np") as dump:
        assert dump.metadata() == {"rank": "5", "dp": "0", "pp": "1", "tp": "1", "step": "2", "when": "after"}
        assert "tied_modules.embedding.weight" in dump.keys()  # noqa: SIM118
        assert dump.get_slice("tied_modules.embedding.weight").get_shape() == [256, 32]
    before = undisturbed.run.dump_file(2, "before", 5).read_bytes()
    assert before != path.read_bytes()


def test_dropout_and_a_slow_rank_resume_exactly(finish: Any, tmp_path: Path) -> None:
    """Random states are part of a checkpoint; and a fault that only delays changes nothing."""
    run = {"model": {"dropout": 0.1}, "training": {"steps": 6, "precision": "bf16", "activation_checkpointing": True}}
    slow = [{"kind": "slow", "rank": 1, "step": 5, "seconds": 0.6}]
    whole = finish(tmp_path / "whole", "pp=2", faults=slow, **run)
    halves = {**run, "training": {**run["training"], "stop_after_steps": 3}}
    first = finish(tmp_path / "halves", "pp=2", **halves)
    assert first.events(0)[-1]["reason"] == "stop_after_steps"
    second = finish(tmp_path / "halves", "pp=2", **halves)
    assert {**losses(first), **losses(second)} == losses(whole)
    seconds = [record["seconds"] for record in whole.steps().values()]
    assert min(seconds[4:]) > 0.6 > max(seconds[1:4])
    assert [record["fault"] for record in whole.events(1, "fault")] == ["slow"]


def test_dropout_drops(finish: Any, tmp_path: Path) -> None:
    runs = [finish(tmp_path / str(p), model={"dropout": p}, training={"steps": 2}) for p in (0.0, 0.1)]
    assert losses(runs[0])[1] != losses(runs[1])[1]


def test_a_run_killed_while_it_saves_goes_on(start: Any, finish: Any, tmp_path: Path) -> None:
    """All ranks are killed during the save after step 3; the run resumes from step 2 or 3, exactly."""
    whole = finish(tmp_path / "whole", "dp=2", training={"steps": 6})
    run = {"training": {"steps": 6}, "checkpoint": {"save_interval": 1, "keep_last": 2}}
    killed = start(tmp_path / "killed", "dp=2", **run)
    killed.until(
        lambda: any(record.get("phase") == "save" and record["step"] == 3 for record in killed.events(0, "heartbeat"))
    )
    killed.kill()
    resumed = finish(tmp_path / "killed", "dp=2", **run)
    assert resumed.events(0, "load")[0]["checkpoint_step"] >= 2
    assert losses(resumed) == {step: loss for step, loss in losses(whole).items() if step in losses(resumed)}
    assert max(losses(resumed)) == 6
    assert not list(resumed.run.checkpoints.glob(".saving-*"))
    assert CheckpointsDir(resumed.run.checkpoints).tags() == ["global_step5", "global_step6"]

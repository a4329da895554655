"""Injected faults and genuine errors: each leaves a record on every rank that knows of it."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.checkpoints.folder import CheckpointsDir, find_checkpoint
from tests.support.texts import has_parts

pytestmark = pytest.mark.torch


def faults_of(attempt: Any, rank: int) -> list[tuple[str, int]]:
    return [(record["fault"], record["step"]) for record in attempt.events(rank, "fault")]


def test_a_rank_that_dies_is_told_from_those_that_lost_it(start: Any, tmp_path: Path) -> None:
    attempt = start(tmp_path, "pp=2", faults=[{"kind": "die", "rank": 1, "step": 2}])
    codes = attempt.wait(180)
    assert codes == [1, -signal.SIGKILL]
    assert faults_of(attempt, 1) == [("die", 2)]
    error = attempt.error(0)
    assert error["lost_peer"] is True
    assert error["coordinate"] == {"pp": 0, "tp": 0, "dp": 0}
    assert error["step"] == 2
    assert "Traceback" in error["traceback"]
    assert attempt.error(1) is None


@pytest.mark.parametrize("kind", ["hang", "skip"])
def test_a_rank_that_hangs_or_skips_stops_the_others(kind: str, start: Any, tmp_path: Path) -> None:
    # With checks in that step, the ranks would be in collectives of different sizes, which gloo does not wait out.
    attempt = start(tmp_path, "tp=2", faults=[{"kind": kind, "rank": 1, "step": 3}], guards={"interval": "off"})
    attempt.until(lambda: bool(faults_of(attempt, 1)))
    time.sleep(2.0)
    assert faults_of(attempt, 1) == [(kind, 3)]
    assert [process.poll() for process in attempt.processes] == [None, None]
    assert max(attempt.steps()) == 2
    assert attempt.events(0)[-1]["phase"] == "step"
    attempt.kill()


@pytest.mark.long
def test_skip_without_tensor_parallelism_leaves_out_the_data_parallel_collective(start: Any, tmp_path: Path) -> None:
    attempt = start(tmp_path, "dp=2", faults=[{"kind": "skip", "rank": 1, "step": 2}])
    attempt.until(lambda: bool(faults_of(attempt, 1)))
    time.sleep(2.0)
    assert [process.poll() for process in attempt.processes] == [None, None]
    assert max(attempt.steps()) == 1
    attempt.kill()


def refused(start: Any, folder: Path, topology: str = "tp=1", **sections: Any) -> Any:
    """Run an attempt that must fail on every rank, and return rank 0's error record."""
    attempt = start(folder, topology, **sections)
    codes = attempt.wait(180)
    assert all(code > 0 for code in codes), attempt.logs()
    return attempt, codes[0], attempt.error(0)


def test_another_model_or_topology_cannot_load_a_checkpoint(start: Any, finish: Any, tmp_path: Path) -> None:
    saved = finish(tmp_path / "run", training={"steps": 2}, optimizer={"warmup_steps": 0})
    attempt, code, error = refused(start, tmp_path / "run", "tp=2", model={"hidden_size": 64})
    assert code == 4
    assert error["type"] == "CheckpointError"
    assert has_parts(error["message"], "tp is 1 in ", "hidden_size is 32 in ", " 64 in ")
    assert attempt.error(1)["message"] == error["message"]
    assert attempt.log(1).startswith("error: ")

    folder = find_checkpoint("auto", CheckpointsDir(saved.run.checkpoints))
    states = folder / "mp_rank_00_model_states.pt"
    content = states.read_bytes()
    states.write_bytes(content[: len(content) // 2])
    _, code, error = refused(start, tmp_path / "run")
    assert (code, error["type"]) == (4, "CheckpointError")
    assert f"{states}: {len(content) // 2} bytes, but {len(content)} were saved" in error["message"]

    states.write_bytes(bytes(len(content)))
    _, code, error = refused(start, tmp_path / "run", checkpoint={"load": str(folder)})
    assert (code, error["type"]) == (4, "CheckpointError")
    assert f"{folder}: cannot be loaded" in error["message"]


def test_data_that_cannot_be_used_is_one_error(start: Any, tmp_path: Path) -> None:
    _, code, error = refused(start, tmp_path / "missing", data={"prefix": str(tmp_path / "nothing")})
    assert (code, error["type"]) == (2, "DataError")
    assert "nothing.idx: no such file" in error["message"]
    _, code, error = refused(start, tmp_path / "vocabulary", model={"vocab_size": 290})
    assert (code, error["type"]) == (2, "DataError")
    assert "model.vocab_size is 290" in error["message"]
    _, code, error = refused(start, tmp_path / "short", model={"sequence_length": 60_000})
    assert (code, error["type"]) == (2, "DataError")
    assert has_parts(error["message"], "60000 tokens", "model.sequence_length 60000", 60001)


def test_a_stage_that_would_hang_is_refused(start: Any, tmp_path: Path) -> None:
    """With only the tied embedding on the last stage, DeepSpeed's gradient norm would wait for ever."""
    attempt, code, error = refused(start, tmp_path, "pp=4")
    assert (code, error["type"]) == (2, "ConfigError")
    assert has_parts(error["message"], "preflight: ", "stage 3 ", "VocabularyEmbedding: ")
    assert "parallelism.pipeline_parallel_size to 3" in error["hint"]
    assert {attempt.error(rank)["message"] for rank in range(4)} == {error["message"]}


@pytest.mark.long  # a run that warns and trains on is in test_guards.py
def test_forced_it_hangs(start: Any, tmp_path: Path) -> None:
    """The prequel's hang, DeepSpeed#1522: three stages are in the norm of the second group, the last at the loss."""
    forced = {"guards": {"preflight": "warn"}, "training": {"steps": 2, "precision": "fp32"}}
    attempt = start(tmp_path, "pp=4", **forced)
    attempt.until(lambda: [attempt.phase(rank) for rank in range(4)] == ["step"] * 4, 150)
    time.sleep(4.0)
    assert [process.poll() for process in attempt.processes] == [None] * 4
    assert attempt.steps() == {}
    assert "preflight: " in attempt.log(0)
    attempt.kill()

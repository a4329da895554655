"""Pipelines of 2 and 3 stages side by side train as one process does, and their checkpoints are those of all runs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bigsci_launch.checkpoints.folder import read_record
from bigsci_launch.cli.main import bsl
from bigsci_launch.runs.generations.read import read_layouts, uneven_topology

from .uneven_settings import OFF, UNEVEN

pytestmark = pytest.mark.torch

STEPS, SAVED = 6, 3
TOLERANCE = 1e-6
REST = range(SAVED + 1, STEPS + 1)


def settings(**training: Any) -> dict[str, Any]:
    return {"training": {"steps": STEPS, **training}, "checkpoint": {"save_interval": SAVED}, **OFF}


@pytest.fixture(scope="module")
def alone(finish: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One process, on DeepSpeed."""
    return finish(tmp_path_factory.mktemp("alone"), **settings())


@pytest.fixture(scope="module")
def five(finish: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Pipelines of 2 and 3 stages, with ZeRO-1: no rank has the whole state. They stop after `SAVED` steps."""
    parallelism = {**UNEVEN, "zero_stage": 1}
    return finish(tmp_path_factory.mktemp("five"), "dp=5", parallelism=parallelism, **settings(stop_after_steps=SAVED))


def assert_same(one: Any, other: Any, steps: Iterable[int]) -> None:
    mine, theirs = one.steps(), other.steps()
    assert sorted(theirs) == list(steps)
    for step in theirs:
        for key in ("loss", "grad_norm"):
            assert theirs[step][key] == pytest.approx(mine[step][key], rel=TOLERANCE), (step, key)
        assert theirs[step]["consumed_samples"] == mine[step]["consumed_samples"]


def checkpoint(attempt: Any, step: int = SAVED) -> Path:
    folder: Path = attempt.run.checkpoints / f"global_step{step}"
    return folder


def call(*arguments: object) -> Any:
    return CliRunner().invoke(bsl, list(map(str, arguments)))


def test_two_and_three_stages_train_as_one_process(alone: Any, five: Any) -> None:
    assert_same(alone, five, range(1, SAVED + 1))
    pipelines = {rank: five.events(rank, "pipeline")[0] for rank in range(5)}
    assert [(each["pipeline"], each["stage"]) for each in pipelines.values()] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (1, 2),
    ]
    # Nothing asks for a second copy of a shard.
    assert pipelines[0]["failures"] == 0
    assert five.steps()[1]["planned_s"] == pipelines[0]["planned_s"] > 0


@pytest.mark.parametrize(
    "topology", ["tp=2,dp=2", *(pytest.param(each, marks=pytest.mark.long) for each in ("dp=4", "tp=2,dp=4"))]
)
def test_another_composition_resumes(alone: Any, five: Any, finish: Any, tmp_path: Path, topology: str) -> None:
    """Pipelines of two stages continue what 2 + 3 have saved, also where two ranks share each stage."""
    sections = settings()
    sections["checkpoint"]["load"] = str(checkpoint(five))
    other = finish(tmp_path, topology, parallelism={**UNEVEN, "zero_stage": 1}, **sections)
    assert_same(alone, other, REST)
    assert call("diff-weights", checkpoint(alone, STEPS), checkpoint(other, STEPS), "--tolerance", 1e-5).exit_code == 0
    assert read_record(checkpoint(other, STEPS)).topology == {"tp": 1 + ("tp" in topology), "pp": 2, "dp": 1}


@pytest.mark.long
def test_deepspeed_resumes_what_tensor_parallel_ranks_have_saved(alone: Any, finish: Any, tmp_path: Path) -> None:
    saved = finish(tmp_path / "saved", "tp=2,dp=4", parallelism=UNEVEN, **settings(stop_after_steps=SAVED))
    cut = {"partition_method": read_record(checkpoint(saved)).model["partition_method"]}
    sections = settings()
    sections["checkpoint"] = {"load": str(checkpoint(saved))}
    assert_same(alone, finish(tmp_path / "resumed", "tp=2,pp=2", parallelism=cut, **sections), REST)


def test_deepspeed_resumes(alone: Any, five: Any, finish: Any, tmp_path: Path) -> None:
    """Where the stages are those that were saved, DeepSpeed loads the files as they are."""
    record = read_record(checkpoint(five))
    assert record.topology == {"tp": 1, "pp": 2, "dp": 1}
    cut = {"partition_method": record.model["partition_method"]}
    sections = settings()
    sections["checkpoint"] = {"load": str(checkpoint(five))}
    assert_same(alone, finish(tmp_path, "pp=2", parallelism=cut, **sections), REST)


def test_deepspeed_is_resumed(alone: Any, finish: Any, tmp_path: Path) -> None:
    """One pipeline of three stages continues what one process has saved; f is lowered, and printed."""
    sections = settings()
    sections["checkpoint"] = {"load": str(checkpoint(alone))}
    three = finish(tmp_path, "dp=3", parallelism=UNEVEN, **sections)
    assert_same(alone, three, REST)
    assert three.events(0, "pipeline")[0]["failures"] == 0
    assert "f = 1 cannot be kept" in three.log(0)


@pytest.mark.parametrize("is_deterministic", [False, pytest.param(True, marks=pytest.mark.long)])
def test_micro_batches_follow_the_speed_of_a_pipeline(
    alone: Any, start: Any, tmp_path: Path, is_deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pipelines of two stages begin with 4 micro batches each; the second one is slower by a multiple."""
    monkeypatch.setenv("SLOW_S", "0.25")
    sections = settings(deterministic=is_deterministic)
    attempt = start(tmp_path, "dp=4", "slow_pipeline", parallelism=UNEVEN, **sections)
    assert set(attempt.wait()) == {0}, attempt.logs()
    assert_same(alone, attempt, range(1, STEPS + 1))
    layouts = read_layouts(attempt.folder)
    assert [each["means"] for each in layouts] == ["composed"] if is_deterministic else ["composed", "balanced"]
    first, last = (uneven_topology(layouts[at]) for at in (0, -1))
    assert first is not None and last is not None
    assert [each.micro_batches for each in first.pipelines] == [4, 4]
    fast, slow = (each.micro_batches for each in last.pipelines)
    assert fast + slow == 8 and (slow < fast) != is_deterministic
    assert attempt.steps()[STEPS]["planned_s"] == layouts[-1]["planned_s"]


def test_a_conversion_keeps_every_bit(five: Any, tmp_path: Path) -> None:
    assert call("checkpoint", "convert", checkpoint(five), "--pp", 1, "-o", tmp_path / "one").exit_code == 0
    converted = tmp_path / "one" / checkpoint(five).name
    assert call("diff-weights", checkpoint(five), converted).exit_code == 0
    assert read_record(converted).config["parallelism"]["engine"] == "deepspeed"


def test_a_loss_that_is_not_finite_stops_the_run(start: Any, tmp_path: Path) -> None:
    attempt = start(tmp_path, "dp=3", parallelism=UNEVEN, **settings(), optimizer={"learning_rate": 1e30})
    attempt.wait()
    step, _ = attempt.stopped()
    assert step < STEPS

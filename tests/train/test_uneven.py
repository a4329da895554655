"""Pipelines of 2 and 3 stages side by side train as one process does, and their checkpoints are those of all runs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bigsci_launch.checkpoints.folder import read_record
from bigsci_launch.cli.main import bsl

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


def test_another_composition_resumes(alone: Any, five: Any, finish: Any) -> None:
    """Two pipelines of two stages continue what 2 + 3 have saved."""
    four = finish(five.run.path, "dp=4", parallelism=UNEVEN, **settings())
    assert_same(alone, four, REST)
    assert call("diff-weights", checkpoint(alone, STEPS), checkpoint(four, STEPS), "--tolerance", 1e-5).exit_code == 0


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

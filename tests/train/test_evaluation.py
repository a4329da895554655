"""Evaluation on held-out samples: all ranks agree, and training is not affected."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.texts import has_parts

pytestmark = pytest.mark.torch

STEPS = {"steps": 6, "stop_after_steps": 6}
HELD_OUT = {"held_out": 0.2}
DROPOUT = {"model": {"dropout": 0.1}, "training": STEPS}


@pytest.fixture(scope="module")
def runs(train_several: Any, dataset: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    held_out = {**DROPOUT, "data": {"prefix": str(dataset), **HELD_OUT}}
    return train_several(
        tmp_path_factory.mktemp("evaluation"),
        "pp=2",
        [
            ("plain", held_out),
            ("evaluated", {**held_out, "monitor": {"eval_interval": 2}, "checkpoint": {"save_interval": 4}}),
            ("more", {**held_out, "monitor": {"eval_interval": 4, "eval_batches": 9}}),
            ("fp16", {**held_out, "training": {**STEPS, "precision": "fp16"}}),
            # These are not about evaluation; refused runs share these ranks to save a start.
            ("tied_norm", {**held_out, "faults": [{"kind": "tied_norm", "step": 1}]}),
        ],
    )


def evaluations(attempt: Any, rank: int) -> dict[int, str]:
    return {record["step"]: record["loss_hex"] for record in attempt.events(rank, "evaluation")}


def test_training_does_not_notice(runs: Any) -> None:
    """Bitwise, dropout included: neither the random states nor the position in the data have moved."""
    plain, evaluated = runs["plain"].steps(), runs["evaluated"].steps()
    assert sorted(evaluated) == [1, 2, 3, 4, 5, 6]
    for step in plain:
        assert (evaluated[step]["loss_hex"], evaluated[step]["grad_norm"]) == (
            plain[step]["loss_hex"],
            plain[step]["grad_norm"],
        )
    assert evaluations(runs["plain"], 0) == {}


def test_every_rank_knows_the_same_loss(runs: Any) -> None:
    first, last = (evaluations(runs["evaluated"], rank) for rank in (0, 1))
    assert first == last
    assert sorted(first) == [2, 4]
    losses = [float.fromhex(loss) for loss in first.values()]
    # An untrained model would have log 300 = 5.70.
    assert 5.0 < losses[1] < losses[0] < 5.8


def test_the_samples_are_the_same_each_time_and_as_many_as_asked_for(runs: Any) -> None:
    (record,) = runs["more"].events(1, "evaluation")
    assert (record["step"], record["samples"]) == (4, 9 * 16)
    (four,) = [record for record in runs["evaluated"].events(1, "evaluation") if record["step"] == 4]
    assert four["samples"] == 4 * 16
    assert four["loss"] == pytest.approx(record["loss"], abs=0.05)
    assert four["loss_hex"] != record["loss_hex"]


def test_a_save_comes_before_the_evaluation_of_its_step(runs: Any) -> None:
    records = [record for record in runs["evaluated"].events(0) if record["step"] == 4]
    kinds = [record["kind"] for record in records if record["kind"] in ("save", "evaluation")]
    assert kinds == ["save", "evaluation"]
    phases = [record["phase"] for record in records if record["kind"] == "heartbeat"]
    assert phases == ["step", "save", "eval"]


def test_the_log_has_megatrons_line(runs: Any) -> None:
    # All runs share one set of ranks, whose log is that of the launch, next to the runs.
    log = (runs["plain"].run.path.parent / "ranks" / "attempts" / "0001" / "logs" / "rank-0001.log").read_text()
    lines = re.findall(
        r"(?m)^ validation loss at iteration (\d+) \| lm loss value: (\S+) \| lm loss PPL: (\S+) \|$", log
    )
    assert [int(step) for step, _, _ in lines] == [2, 4, 4]


def test_fp16_is_refused_where_the_device_cannot(runs: Any) -> None:
    """The CPU here refuses it; on a device that supports fp16 the run trains."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available() or runs["fp16"].error(0) is None:
        assert sorted(runs["fp16"].steps()) == [1, 2, 3, 4, 5, 6]
        return
    for rank in (0, 1):
        error = runs["fp16"].error(rank)
        assert error["type"] == "ConfigError"
        assert has_parts(error["message"], "training.precision: fp16: ", "cpu") and "bf16" in error["hint"]


def test_a_tied_attribute_without_gradient_is_refused(runs: Any) -> None:
    for rank in (0, 1):
        error = runs["tied_norm"].error(rank)
        assert (error["type"], error["step"]) == ("ConfigError", 0)
        assert has_parts(error["message"], "preflight: tied gradients", "stage 1 ", "norm.weight")
        assert "only the weight" in error["hint"]


def test_weights_in_another_format_than_the_runs_are_refused() -> None:
    """A layer keeps its norm in fp32 through DeepSpeed's cast, so DeepSpeed stores its group in fp32."""
    pytest.importorskip("deepspeed")
    torch = pytest.importorskip("torch")
    from bigsci_launch.config.schema.run import RunConfig
    from bigsci_launch.errors import ConfigError
    from bigsci_launch.train.parallel.pipeline import require_one_format

    module = torch.nn.Sequential(torch.nn.Linear(2, 2).bfloat16(), torch.nn.LayerNorm(2))
    config = RunConfig.model_construct(training=SimpleNamespace(precision="bf16", weight_format="bf16"))
    with pytest.raises(ConfigError, match=r"training.precision: bf16, .*1.weight and 1 more") as info:
        require_one_format(module, config)
    assert "float32" in info.value.message
    assert info.value.hint
    require_one_format(module.bfloat16(), config)

"""Guards of the optimizer's state and of numbers that are not finite: found in their step, named, and never saved.

All runs of this module are trained in turn on the same two replicas, and broken from outside before step 4.
"""

from __future__ import annotations

from typing import Any

import pytest

from bigsci_launch.checkpoints.folder import CheckpointsDir, read_record
from tests.support.texts import has_parts
from tests.support.tiers import with_long

pytestmark = pytest.mark.torch

Runs = dict[str, Any]
BROKEN = 4


def scenario(name: str, interval: int | str = 1, **sections: Any) -> tuple[str, dict[str, Any]]:
    base: dict[str, Any] = {
        "training": {"steps": 7, "precision": "bf16", **sections.pop("training", {})},
        "optimizer": {"clip_grad": 0.5, "warmup_steps": 0, "learning_rate": 1e-2, "weight_decay": 0.1},
        "checkpoint": {"save_interval": 3, "keep_last": 2},
        "guards": {"interval": interval, **sections.pop("guards", {})},
    }
    return name, {**base, **sections}


# Moments of the old settings are not impossible under the new ones.
RETUNED = {"betas": [0.5, 0.6], "clip_grad": 0.01, "learning_rate": 1e-3, "warmup_steps": 0}
NAMES = (
    *("zeroed", "zeroed-all", "scaled", "flipped", "count", "masters"),
    *("rate", "rate-all", "padding", "weight", "decay", "left-out"),
)
UNCHECKED = tuple(f"{name}.unchecked" for name in ("zeroed", "scaled", "masters", "rate"))
IN_FP32 = tuple(f"{name}.fp32" for name in ("healthy", "zeroed", "scaled", "rate", "for-ever", "zeroed.resumed"))
FURTHER = (
    "healthy.auto",
    *IN_FP32,
    *UNCHECKED[1:],
    "zeroed-all",
    "rate-all",
    "stopped.100",
    "for-ever.unguarded",
    "fp16",
)
"""Other precisions and intervals, and states that are wrong on all ranks."""


@pytest.fixture(scope="module")
def runs(train_several: Any, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    found: Runs = train_several(
        tmp_path_factory.mktemp("state"),
        "dp=2",
        [
            scenario("healthy"),
            scenario("healthy.fp32", training={"precision": "fp32"}),
            scenario("healthy.auto", "auto"),
            *(scenario(name) for name in NAMES),
            # Step 4 is not checked: only what is looked at in every step can find these.
            *(scenario(name, 100) for name in UNCHECKED),
            *(scenario(f"{name}.fp32", training={"precision": "fp32"}) for name in ("zeroed", "scaled", "rate")),
            scenario("zeroed.warned", guards={"action": "warn"}),
            scenario("weight.unguarded", "off"),
            *(scenario(f"stopped.{interval}", interval, checkpoint={}) for interval in (1, 100)),
            scenario("once"),
            scenario("for-ever", guards={"max_skipped_steps": 3}),
            scenario("for-ever.fp32", guards={"max_skipped_steps": 3}, training={"precision": "fp32"}),
            scenario("for-ever.unguarded", "off", guards={"max_skipped_steps": 2}),
            *(
                scenario(f"zeroed.resumed.{precision}", training={"precision": precision, **stops})
                for precision in ("bf16", "fp32")
                for stops in ({"stop_after_steps": 3}, {})
            ),
            scenario("retuned", training={"stop_after_steps": 3}),
            scenario("retuned", optimizer=RETUNED),
            scenario("fp16", training={"precision": "fp16", "steps": 30}),
            scenario("rate-inside"),
        ],
        "broken_state",
        further=FURTHER,
    )
    return found


@pytest.mark.parametrize("name", with_long(["healthy", "healthy.fp32", "healthy.auto", "retuned+"], FURTHER))
def test_a_healthy_run_passes_and_its_checkpoints_say_so(runs: Runs, name: str) -> None:
    assert runs[name].error(0) is None
    assert runs[name].events(0, "guard") == runs[name].events(0, "skipped") == []
    for step in (6, 7):
        record = read_record(runs[name].run.checkpoints / f"global_step{step}")
        assert record.health == {"passed": True, "step": step, "findings": []}


ONE = "on rank 1 (dp1 pp0 tp0)"
# By run: the check and the parts of its message. All are found in the step in which they begin.
PARTS = {
    "zeroed": ("memory", "first moment of ", ONE, "it is zero"),
    "zeroed-all": ("memory", "first moment of ", "on rank 0 (dp0 pp0 tp0)", "it is zero", "(and 3 more)"),
    "scaled": ("memory", "second moment of ", ONE),
    "flipped": ("memory", "first moment of ", ONE),
    "count": ("memory", "step count of ", "on ranks 0-1", "3 after step 3", " 0"),
    "masters": ("memory", "fp32 master of ", ONE),
    "rate": ("learning rate", "group decay", ONE, "the schedule gives"),
    "rate-all": ("learning rate", "group decay", "on ranks 0-1", "the schedule gives"),
    "rate-inside": ("optimizer update", "fp32 master of ", ONE, "3 times"),
    "decay": ("optimizer update", "fp32 master of "),
    "left-out": ("optimizer update", "all tensors", ONE, "AdamW was not run"),
    "padding": ("memory", "fp32 master of tied_modules.embedding.weight"),
    "zeroed.unchecked": ("memory", "first moment of ", ONE, "it is zero"),
    "scaled.unchecked": ("memory", "second moment of ", ONE, "100 times"),
    "masters.unchecked": ("memory", "fp32 master of ", ONE),
    "rate.unchecked": ("learning rate", "group decay", ONE),
    "zeroed.fp32": ("memory", "first moment of ", ONE, "it is zero"),
    "scaled.fp32": ("memory", "second moment of ", ONE),
    "rate.fp32": ("learning rate", "group decay", ONE, "the schedule gives"),
    "zeroed.resumed.bf16+": ("memory", "first moment of ", ONE, "it is zero"),
    "zeroed.resumed.fp32+": ("memory", "first moment of ", ONE, "it is zero"),
    "weight": ("memory", "weight of ", "on rank 0"),
    "weight.unguarded": ("not finite", "weight ", "1 of "),
}


@pytest.mark.parametrize("name", with_long(PARTS, (*FURTHER, "zeroed.resumed.fp32+")))
def test_a_wrong_state_stops_the_run_in_its_step(runs: Runs, name: str) -> None:
    step, message = runs[name].stopped()
    assert step == BROKEN
    check, *parts = PARTS[name]
    assert message.startswith(f"step {BROKEN}: {check}: ") and has_parts(message, *parts), message
    checkpoints = CheckpointsDir(runs[name].run.checkpoints)
    assert checkpoints.latest.read_text() == "global_step3"
    assert ("global_step3" if "unguarded" in name else "step 3") in runs[name].error(0)["hint"]


def test_a_warned_run_continues_but_its_checkpoints_are_not_the_latest(runs: Runs) -> None:
    assert runs["zeroed.warned"].error(0) is None
    checkpoints = CheckpointsDir(runs["zeroed.warned"].run.checkpoints)
    assert checkpoints.latest.read_text() == "global_step3"
    record = read_record(checkpoints.folder("global_step6"))
    assert record.health is not None
    assert record.health["passed"] is False
    assert record.health["findings"][0].startswith("step 4: memory: ")
    assert read_record(checkpoints.folder("global_step3")).health["passed"] is True


@pytest.mark.parametrize(("interval", "step"), [(1, 4), pytest.param(100, 5, marks=pytest.mark.long)])
def test_a_stop_signal_is_followed_by_a_checked_step(runs: Runs, interval: int, step: int) -> None:
    attempt = runs[f"stopped.{interval}"]
    assert [attempt.events(rank)[-1]["reason"] for rank in (0, 1)] == ["signal", "signal"]
    assert sorted(attempt.steps()) == list(range(1, step + 1))
    assert read_record(attempt.run.checkpoints / f"global_step{step}").health["passed"] is True


def test_one_skipped_step_is_recorded_and_the_run_continues(runs: Runs) -> None:
    assert runs["once"].error(0) is None
    (skipped,) = runs["once"].events(0, "skipped")
    assert (skipped["skipped_step"], skipped["in_a_row"], skipped["first"]) == (4, 1, 4)
    assert skipped["began"][0].startswith("not finite: gradient")
    record = read_record(runs["once"].run.checkpoints / "global_step7")
    assert record.health == {"passed": True, "step": 7, "findings": []}


@pytest.mark.parametrize("name", with_long(["for-ever", "for-ever.fp32"], FURTHER))
def test_steps_skipped_in_a_row_stop_the_run_and_name_the_rank(runs: Runs, name: str) -> None:
    step, message = runs[name].stopped()
    assert step == 6
    assert has_parts(message, "step 6: not finite: ", f"weight {ONE}: ", "1 of 32", "3 steps", "step 4")
    assert [record["in_a_row"] for record in runs[name].events(0, "skipped")] == [1, 2, 3]


@pytest.mark.long
def test_the_ordinary_overflows_of_fp16_are_recorded_and_nothing_else(runs: Runs) -> None:
    error = runs["fp16"].error(0)
    if error and error["type"] == "ConfigError":
        pytest.skip(error["message"])
    assert error is None
    skipped = runs["fp16"].events(0, "skipped")
    assert 1 <= len(skipped) < 20
    assert skipped[0]["loss_scale"] > 0
    assert runs["fp16"].events(0, "guard") == []
    assert read_record(runs["fp16"].run.checkpoints / "global_step30").health["passed"] is True


@pytest.mark.long
def test_skipped_steps_stop_an_unguarded_run_too(runs: Runs) -> None:
    step, message = runs["for-ever.unguarded"].stopped()
    assert step == 5
    assert "2 steps" in message

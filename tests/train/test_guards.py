"""Guards: a defect of parallel training stops the run at the step where it begins, and is named.

All runs of this module are trained in turn on the same ranks.
"""

from __future__ import annotations

from typing import Any

import pytest

from bigsci_launch.checkpoints.folder import digests_path, read_record
from bigsci_launch.checkpoints.verify import find_damage
from bigsci_launch.runs.layout import read_json
from bigsci_launch.train.guards.interval import MOST_STEPS, interval_for
from tests.support.texts import has_parts
from tests.support.tiers import with_long

pytestmark = pytest.mark.torch

# Half as many micro-batches as elsewhere: their calls are what takes time.
BF16 = {"steps": 5, "precision": "bf16", "micro_batch_size": 4}
TIED = "tied_modules.embedding.weight"
Runs = dict[str, Any]
FURTHER = ("healthy fp32", "B5 fp32", "random unguarded", "counted unguarded")
"""test_guards_state.py has a defect of each precision, and "unguarded" is one that nothing stops."""


def scenario(name: str, kind: str | None = None, step: int = 3, **sections: Any) -> tuple[str, dict[str, Any]]:
    base: dict[str, Any] = {
        "training": BF16,
        "optimizer": {"clip_grad": 0.2, "warmup_steps": 0, "learning_rate": 1e-2},
        "guards": {"interval": 1},
    }
    rank = {"rank": 1} if kind == "flipped_byte" else {}
    faults = [{"kind": kind, "step": step, **rank}] if kind else []
    return name, {**base, "faults": faults, **sections}


@pytest.fixture(scope="module")
def runs(train_several: Any, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs on four ranks (tp 2 x pp 2) with defects in a step."""
    found: Runs = train_several(
        tmp_path_factory.mktemp("steps"),
        "tp=2,pp=2",
        [
            scenario("healthy", guards={"interval": "auto"}, model={"embedding_norm": True}),
            scenario("healthy fp32", training={"steps": 5}, model={"embedding_norm": True}),
            scenario("B1", "unreduced_tied_gradients"),
            scenario("B2", "passenger_norm", 1),
            scenario("B3", "decayed_norm", 1),
            scenario("B4", "unclipped_tied_copy"),
            scenario("B5", "unreduced_tp_gradients"),
            scenario("B5 fp32", "unreduced_tp_gradients", training={"steps": 5}),
            scenario("scaled", "scaled_gradients"),
            scenario("warned", "unreduced_tied_gradients", guards={"interval": 1, "action": "warn"}),
            scenario("unguarded", "unreduced_tied_gradients", guards={"interval": "off"}),
        ],
        further=FURTHER,
    )
    return found


@pytest.mark.parametrize("name", with_long(["healthy", "healthy fp32"], FURTHER))
def test_a_healthy_run_passes(runs: Runs, name: str) -> None:
    assert runs[name].error(0) is None
    assert runs[name].events(0)[-1]["reason"] == "finished"
    assert runs[name].events(2, "guard") == []


def test_a_healthy_run_says_what_it_costs(runs: Runs) -> None:
    # Three checks are timed, from the second step on. Later choices are recorded and printed too.
    chosen = runs["healthy"].events(2, "guards")
    assert chosen[0]["step"] == 4
    for each in chosen:
        assert each["interval"] == interval_for(each["seconds"], each["step_seconds"], 0.0015) <= MOST_STEPS
        assert each["share"] == pytest.approx(each["seconds"] / (each["interval"] * each["step_seconds"]))


# By defect: the step, and the parts of the message.
PARTS = {
    "B1": (3, ("tied gradients", f"gradient of {TIED}", "on ranks 0-3: ")),
    "B2": (1, ("tied gradients", "tied_modules.embedding.norm.weight", "on ranks 0-3: ")),
    "B3": (0, ("optimizer groups", "tied_modules.embedding.norm.weight", "decay 0.1, not 0")),
    "B4": (3, ("clipping", TIED, "on ranks 2-3 (pp1)", "by 1; ", " 0.")),
    "B5": (3, ("replicated gradients", "2.attention_norm.bias")),
    "B5 fp32": (3, ("replicated gradients", "2.attention_norm.bias")),
    # Sums in 16 bits: how close to a half the factor comes depends on the processor.
    "scaled": (3, ("replicated gradients", "2.attention_norm.bias", " times ", "50%")),
}


@pytest.mark.parametrize("name", with_long(PARTS, FURTHER))
def test_a_defect_stops_the_run_at_its_step(runs: Runs, name: str) -> None:
    step, parts = PARTS[name]
    found, message = runs[name].stopped()
    assert found == step and max(runs[name].steps(), default=0) < max(step, 1)
    assert message.startswith(f"step {step}: ") and has_parts(message, *parts), message


def test_effects_are_told_too(runs: Runs) -> None:
    def tensors(name: str, check: str) -> dict[str, list[int]]:
        records = [record for record in runs[name].events(2, "guard") if record["check"] == check]
        return {record["tensor"]: [at["pp"] for at in record["coordinates"]] for record in records}

    # Of two copies, the evidence accuses neither.
    assert tensors("B1", "tied copies") == tensors("B4", "tied copies") == {TIED: [0, 0, 1, 1]}
    assert all(record["accused"] == [] for record in runs["B1"].events(2, "guard") if record["check"] == "tied copies")
    # Norms and row biases of four layers drift apart between the tp ranks, and the positions.
    drifting = tensors("B5", "tensor-parallel copies")
    assert {"1.weight", "2.attention_norm.weight", "5.mlp_norm.bias"} <= drifting.keys()
    assert not any(name.endswith(("qkv.weight", "up.weight")) for name in drifting)


def test_a_warning_goes_on_and_nothing_stops_an_unguarded_run(runs: Runs) -> None:
    assert sorted(runs["warned"].steps()) == sorted(runs["unguarded"].steps()) == [1, 2, 3, 4, 5]
    assert {record["step"] for record in runs["warned"].events(2, "guard")} >= {3, 4, 5}
    assert runs["unguarded"].events(2, "guard") == []
    assert runs["unguarded"].events(3, "fault")[0]["fault"] == "unreduced_tied_gradients"


@pytest.fixture(scope="module")
def resumed(train_several: Any, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs on four ranks (pp 2 x dp 2) with dropout and defects in save and load. `NAME+` resumes after step 3."""
    folder = tmp_path_factory.mktemp("loads")
    load = {"load": str(folder / "healthy" / "checkpoints" / "global_step3")}
    sections: dict[str, Any] = {"model": {"dropout": 0.1}, "training": {**BF16, "steps": 6}}
    first = {**sections, "training": {**BF16, "steps": 6, "stop_after_steps": 3}}
    off = {**sections, "checkpoint": load, "guards": {"interval": "off"}}
    found: Runs = train_several(
        folder,
        "pp=2,dp=2",
        [
            scenario("healthy", **first),
            scenario("healthy", **sections),
            scenario("random", "lost_random_states", 1, checkpoint=load, **sections),
            scenario("counted", "lost_optimizer_step", 1, checkpoint=load, **sections),
            scenario("random unguarded", "lost_random_states", 1, **off),
            scenario("counted unguarded", "lost_optimizer_step", 1, **off),
            scenario("byte", "flipped_byte", 3, **first),
            scenario("byte", **sections),
        ],
        further=FURTHER,
    )
    return found


def test_a_healthy_resume_passes(resumed: Runs) -> None:
    assert resumed["healthy+"].error(0) is None
    assert sorted(resumed["healthy+"].steps()) == [4, 5, 6]
    assert resumed["healthy+"].events(2, "guard") == []


def test_a_load_that_loses_something_is_refused(resumed: Runs) -> None:
    step, message = resumed["random"].stopped()
    assert step == 3 and message.startswith("step 3: load: random") and "ranks 0-3" in message
    step, message = resumed["counted"].stopped()
    assert step == 3 and has_parts(message, "load: optimizer state decay.step", "is 0, but 3")


def test_a_wrong_byte_in_a_shard_is_refused(resumed: Runs) -> None:
    assert resumed["byte"].error(0) is None
    error = resumed["byte+"].error(1)
    assert resumed["byte+"].steps() == {}
    assert error["type"] == "GuardError"
    assert has_parts(error["message"], "step 3: load: ", "decay.", "on rank 1 (dp1 pp0 tp0): ")


def test_the_wrong_byte_is_found_without_a_rank(resumed: Runs) -> None:
    """Its digest shows it before a job is queued; the manifest holds the other facts."""
    folders = {name: resumed[name].run.checkpoints / "global_step3" for name in ("healthy", "byte")}
    assert find_damage(folders["healthy"]) == []
    (problem,) = find_damage(folders["byte"])
    assert "optim_states.pt: " in problem
    record = read_record(folders["healthy"])
    assert record.config["model"]["dropout"] == 0.1
    assert (record.step, record.consumed_samples) == (3, 48)
    document = read_json(digests_path(folders["healthy"], 3))
    assert document["coordinate"] == {"pp": 1, "tp": 0, "dp": 1}
    assert document["tensors"][TIED][:2] == ["BF16", [384, 32]]
    assert document["optimizer"]["decay.step"] == 3
    assert "rng_rank_0003.pt" in document["files"]


@pytest.mark.parametrize("name", with_long(["random unguarded", "counted unguarded"], FURTHER))
def test_without_guards_the_loss_drifts(resumed: Runs, name: str) -> None:
    healthy, wrong = resumed["healthy+"].steps(), resumed[name].steps()
    assert sorted(wrong) == [4, 5, 6]
    assert wrong[6]["loss_hex"] != healthy[6]["loss_hex"]

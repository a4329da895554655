"""What has changed since a checkpoint was saved, and how much it matters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.checkpoints.changes import (
    NOTHING_ACCEPTED,
    Acceptance,
    DataLikeness,
    RunChange,
    change_lines,
    find_changes,
    read_accepted,
    read_run_id,
    require_accepted,
    write_accepted,
)
from bigsci_launch.checkpoints.folder import CheckpointRecord
from bigsci_launch.checkpoints.resume import describe_run
from bigsci_launch.config.load import load_run
from bigsci_launch.errors import CheckpointError, RunDirError
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.topology import Topology
from tests.support.texts import CheckText, has_parts

DEMO = Path(__file__).parents[3] / "configs/demo.yaml"
SHAPE = Topology(tp=2, pp=2, dp=2)
HEALTHY = {"passed": True, "step": 20, "findings": []}


def record(*overrides: str, **fields: Any) -> CheckpointRecord:
    described = describe_run(load_run(DEMO, overrides).config, SHAPE, step=20, run_id="a")
    return replace(described, **{"health": HEALTHY, "data": {"num_tokens": 1}, **fields})


def changes(
    saved: CheckpointRecord, run: CheckpointRecord, *, is_own: bool = True, likeness: DataLikeness | None = "same"
) -> list[RunChange]:
    return find_changes(saved, run, is_own=is_own, likeness=likeness)


def short(found: list[RunChange]) -> list[tuple[str, str]]:
    return [(change.severity, change.key) for change in found]


def test_nothing_is_said_of_the_same_run() -> None:
    assert changes(record(), record()) == []
    assert changes(record(), record("training.stop_after_steps=3", "monitor.exit_margin_s=77")) == []


@pytest.mark.parametrize(
    ("override", "expected", "text"),
    [
        ("run.seed=7", ("stop", "run.seed"), "run.seed: 1234 -> 7 ("),
        ("model.layernorm_epsilon=0.1", ("stop", "model.layernorm_epsilon"), "model.layernorm_epsilon: "),
        ("data.held_out=0.3", ("stop", "data.held_out"), "data.held_out: "),
        ("model.dropout=0.2", ("name", "model.dropout"), "model.dropout: 0.0 -> 0.2"),
        ("optimizer.learning_rate=0.5", ("name", "optimizer.learning_rate"), "-> 0.5"),
        ("optimizer.min_learning_rate=1e-6", ("name", "optimizer.min_learning_rate"), "-> 1e-06"),
        ("optimizer.warmup_steps=19", ("name", "optimizer.warmup_steps"), "-> 19"),
        ("optimizer.betas=[0.9, 0.5]", ("name", "optimizer.betas"), "[0.9, 0.95] -> [0.9, 0.5]"),
        ("optimizer.epsilon=1e-5", ("name", "optimizer.epsilon"), "1e-08 -> 1e-05"),
        ("optimizer.weight_decay=0.3", ("name", "optimizer.weight_decay"), "0.1 -> 0.3"),
        ("optimizer.clip_grad=0.5", ("name", "optimizer.clip_grad"), "1.0 -> 0.5"),
        ("training.global_batch_size=64", ("name", "training.global_batch_size"), "-> 64"),
        ("training.steps=999", ("name", "optimizer.decay_steps"), "-> 999"),
        (
            "training.rampup={start: 8, increment: 8, samples: 64}",
            ("name", "training.rampup"),
            "none -> start 8 increment 8 samples 64",
        ),
    ],
)
def test_each_setting_has_a_severity(override: str, expected: tuple[str, str], text: str) -> None:
    (found,) = changes(record(), record(override))
    assert (found.severity, found.key) == expected
    assert text in found.text


def test_longer_training_changes_nothing_if_the_decay_keeps_its_end() -> None:
    kept = "optimizer.decay_steps=15"
    assert changes(record(kept), record(kept, "training.steps=999")) == []


@pytest.mark.parametrize(
    ("fields", "is_own", "expected"),
    [
        ({"run_id": "b"}, True, [("stop", "run_id")]),
        ({"run_id": "b"}, False, [("name", "run_id")]),
        ({"run_id": "b", "converted_from": {"path": "x"}}, True, [("name", "run_id")]),
        ({"run_id": None}, True, [("unknown", "run_id")]),
        ({"health": None}, True, [("unknown", "health")]),
        ({"health": {"passed": None}}, True, [("unknown", "health")]),
        ({"health": {"passed": False, "findings": ["a weight is NaN"]}}, True, [("stop", "health")]),
        ({"config": {}}, True, [("unknown", "settings")]),
        ({"data": None}, True, [("unknown", "data")]),
    ],
)
def test_what_a_checkpoint_does_not_hold_is_not_taken_for_equal(
    fields: dict[str, Any], is_own: bool, expected: list[tuple[str, str]]
) -> None:
    likeness: DataLikeness = "same" if fields.get("data", 1) else "unknown"
    assert short(changes(record(**fields), record(), is_own=is_own, likeness=likeness)) == expected


def test_a_key_that_the_older_version_did_not_have_is_not_known() -> None:
    saved = record()
    del saved.config["optimizer"]["clip_grad"]
    (found,) = changes(saved, record())
    assert found.severity == "unknown" and has_parts(found.text, "optimizer.clip_grad", "1.0")


@pytest.mark.parametrize(
    ("likeness", "override", "expected"),
    [
        ("other", None, [("stop", "data")]),
        ("grown", None, [("name", "data")]),
        ("same", "data.prefix=elsewhere", [("name", "data")]),
        ("unknown", None, [("unknown", "data")]),
        ("unknown", "data.prefix=elsewhere", [("stop", "data")]),
        # Nobody could look: the ranks will.
        (None, None, []),
        (None, "data.prefix=elsewhere", [("name", "data")]),
    ],
)
def test_data_is_told_by_what_it_holds_not_by_its_name(
    likeness: DataLikeness | None, override: str | None, expected: list[tuple[str, str]]
) -> None:
    run = record(*([override] if override else []))
    assert short(changes(record(), run, likeness=likeness)) == expected


def test_only_what_stops_needs_to_be_accepted(check_text: CheckText) -> None:
    found = changes(record(run_id=None), record("run.seed=7", "optimizer.weight_decay=0.3"))
    assert short(found) == [("stop", "run.seed"), ("name", "optimizer.weight_decay"), ("unknown", "run_id")]
    with pytest.raises(CheckpointError, match=r"run.seed: 1234 -> 7") as no:
        require_accepted("global_step20", found, NOTHING_ACCEPTED)
    assert "weight_decay" not in str(no.value)
    assert no.value.hint and "--force" in no.value.hint
    accepted = Acceptance(("run.seed",))
    require_accepted("global_step20", found, accepted)
    require_accepted("global_step20", found[1:], NOTHING_ACCEPTED)
    require_accepted("global_step20", found, Acceptance(everything=True))
    check_text(*change_lines("global_step20", found, accepted))


def test_requeues_share_what_was_accepted(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert read_accepted(run.attempt("0002.r1")) == NOTHING_ACCEPTED
    write_accepted(run.attempt("0002"), Acceptance(("run.seed",)))
    assert read_accepted(run.attempt("0002.r1")) == Acceptance(("run.seed",))
    assert read_accepted(run.attempt("0003")) == NOTHING_ACCEPTED
    run.attempt("0002").accepted.write_text("[]")
    with pytest.raises(RunDirError, match=str(run.attempt("0002").accepted)):
        read_accepted(run.attempt("0002"))


def test_a_run_without_an_id_has_none(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert read_run_id(run) is None
    run.record.write_text('{"run_id": "abc"}')
    assert read_run_id(run) == "abc"
    run.record.write_text("[]")
    assert read_run_id(run) is None


def test_an_order_of_the_data_that_no_setting_explains_stops_the_run() -> None:
    def found(saved: CheckpointRecord, run: CheckpointRecord, is_kept: bool | None) -> list[tuple[str, str]]:
        return short(find_changes(saved, run, is_own=True, likeness="same", is_order_kept=is_kept))

    assert found(record(), record(), True) == found(record(), record(), None) == []
    assert found(record(), record(), False) == [("stop", "data.order")]
    assert found(record(), record("run.seed=7"), False) == [("stop", "run.seed")]


def test_a_record_names_only_what_differs_from_the_models_of_before() -> None:
    """A checkpoint that was saved before there was a choice has none of these keys, and must stay loadable."""

    def model(*overrides: str) -> dict[str, Any]:
        return describe_run(load_run(DEMO, list(overrides)).config, SHAPE).model

    choices = {"positions", "norm", "activation", "num_key_value_heads", "biases"}
    assert not choices & model().keys()
    assert not choices & model("model.num_key_value_heads=4", "model.biases=true", "model.norm=layernorm").keys()
    chosen = model("model.num_key_value_heads=2", "model.biases=false", "model.norm=rmsnorm", "model.activation=swiglu")
    assert {key: chosen[key] for key in choices & chosen.keys()} == {
        "norm": "rmsnorm",
        "activation": "swiglu",
        "num_key_value_heads": 2,
        "biases": False,
    }

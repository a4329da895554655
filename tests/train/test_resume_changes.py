"""A resume from a checkpoint that was changed, or by a run that was: refused, or named in the log and the events.

All runs of this module are trained on two pipeline stages with untied embeddings, so that no copy of a tensor could
show that the stages are of two steps.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from bigsci_launch.checkpoints.folder import CheckpointsDir, digests_path, list_files, read_record, record_path
from bigsci_launch.checkpoints.verify import find_damage
from bigsci_launch.cli.main import bsl
from bigsci_launch.data.indexed import IndexedWriter, open_dataset
from bigsci_launch.runs.layout import RunDir, read_json
from tests.support.texts import has_parts

pytestmark = pytest.mark.torch

UNTIED: dict[str, Any] = {"model": {"tied_embeddings": False}, "training": {"steps": 6}}
SAVING = {**UNTIED, "checkpoint": {"save_interval": 3}}
Runs = dict[str, Any]
Tampering = Callable[[Path], None]


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def mix_steps(folder: Path) -> None:
    """Take all files of the last stage, and their digests, from the checkpoint after step 6."""
    later = folder.with_name("global_step6")
    for name in read_json(digests_path(later, 1))["files"]:
        shutil.copyfile(later / name, folder / name)
    shutil.copyfile(digests_path(later, 1), digests_path(folder, 1))
    edit(record_path(folder), files=list_files(folder))


def mix_steps_and_hide_it(folder: Path) -> None:
    """As before, but the documents say step 3 throughout, and the record has no digest."""
    mix_steps(folder)
    document = digests_path(folder, 1)
    steps = {key: 3 if key.endswith(".step") else value for key, value in read_json(document)["optimizer"].items()}
    edit(document, step=3, optimizer=steps)
    edit(record_path(folder), files=list_files(folder), digest=None)


def forget_new_fields(folder: Path) -> None:
    """Make the record one of an older version."""
    document = read_json(record_path(folder))
    for key in ("digest", "health", "run_id", "data"):
        del document[key]
    record_path(folder).write_text(json.dumps(document))


TAMPERED: dict[str, Tampering] = {
    "mixed": mix_steps,
    "mixed and hidden": mix_steps_and_hide_it,
    "samples": lambda folder: edit(record_path(folder), consumed_samples=0),
    "samples of an older version": lambda folder: edit(record_path(folder), consumed_samples=0, digest=None, data=None),
    "failed": lambda folder: edit(
        record_path(folder), health={"passed": False, "step": 3, "findings": ["a moment is 1e34"]}, digest=None
    ),
    "older": forget_new_fields,
}


def write_tokens(prefix: Path, tokens: np.ndarray[Any, Any]) -> None:
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for first in range(0, len(tokens), 2000):
            writer.add_document(tokens[first : first + 2000])


@pytest.fixture(scope="module")
def origin(train_several: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run that was saved after steps 3 and 6."""
    folder = tmp_path_factory.mktemp("origin")
    (folder / "origin").mkdir()
    (folder / "origin/run.json").write_text(json.dumps({"run_id": "a"}))
    return train_several(folder, "pp=2", [("origin", SAVING)])["origin"]


@pytest.fixture(scope="module")
def resumed(origin: Any, train_several: Any, tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Runs:
    """Runs that resume from a copy of its checkpoint after step 3."""
    folder = tmp_path_factory.mktemp("resumed")
    moved, other, grown = (folder / name for name in ("moved.tokens", "other.tokens", "grown.tokens"))
    tokens = np.asarray(open_dataset(dataset).tokens)
    write_tokens(moved, tokens)
    write_tokens(other, np.where(np.arange(len(tokens)) == 40_000, (tokens + 1) % 300, tokens))
    write_tokens(grown, np.concatenate([tokens, tokens[:5000]]))
    scenarios: list[tuple[str, dict[str, Any]]] = [
        ("same", {}),
        ("named", {"optimizer": {"learning_rate": 3e-3, "weight_decay": 0.3}, "model": {"dropout": 0.1}}),
        ("seed", {"run": {"name": "test", "seed": 7}}),
        ("accepted", {"run": {"name": "test", "seed": 7}}),
        ("stranger", {}),
        ("moved", {"data": {"prefix": str(moved)}}),
        ("other data", {"data": {"prefix": str(other)}}),
        ("grown", {"data": {"prefix": str(grown)}}),
        *(
            (name, {"guards": {"interval": "off"}} if "hidden" in name or "samples" in name else {})
            for name in TAMPERED
        ),
    ]
    for name, _ in scenarios:
        run = RunDir(folder / name)
        shutil.copytree(origin.run.checkpoints, run.checkpoints)
        made = CheckpointsDir(run.checkpoints)
        made.latest.write_text("global_step3")
        run.record.write_text(json.dumps({"run_id": "b" if name == "stranger" else "a"}))
        if name in TAMPERED:
            TAMPERED[name](made.folder("global_step3"))
    combined = [(name, {**UNTIED, **sections, "model": {**UNTIED["model"], **sections.get("model", {})}})
                for name, sections in scenarios]  # fmt: skip
    found: Runs = train_several(folder, "pp=2", combined, accepting=["accepted"])
    return found


def changed(attempt: Any) -> list[tuple[str, str]]:
    return [(event["severity"], event["key"]) for event in attempt.events(1, "changed")]


def refusal(attempt: Any) -> str:
    """Return why all ranks refused to resume."""
    errors = [attempt.error(rank) for rank in range(2)]
    assert [error and error["type"] for error in errors] == ["CheckpointError"] * 2, errors
    assert errors[0]["message"] == errors[1]["message"]
    assert attempt.steps() == {}
    return str(errors[0]["message"])


def test_the_same_run_goes_through_to_the_last_bit(origin: Any, resumed: Runs) -> None:
    assert changed(resumed["same"]) == []
    losses = {step: record["loss_hex"] for step, record in resumed["same"].steps().items()}
    assert losses == {step: origin.steps()[step]["loss_hex"] for step in (4, 5, 6)}


def test_a_record_says_whose_it_is_and_has_a_digest(origin: Any) -> None:
    folder = origin.run.checkpoints / "global_step3"
    record = read_record(folder)
    assert record.run_id == "a"
    assert record.passed is True
    assert record.data is not None and record.data["cursor"]["consumed_samples"] == 48
    assert record.digest is not None
    assert find_damage(folder) == []


def test_changed_settings_are_named_and_the_run_continues(resumed: Runs) -> None:
    attempt = resumed["named"]
    keys = ["model.dropout", "optimizer.learning_rate", "optimizer.weight_decay"]
    assert changed(attempt) == [("name", key) for key in keys]
    assert sorted(attempt.steps()) == [4, 5, 6]
    (event,) = [event for event in attempt.events(1, "changed") if event["key"] == "optimizer.learning_rate"]
    assert (event["saved"], event["now"], event["checkpoint_step"]) == (1e-3, 3e-3, 3)


def test_what_makes_it_another_run_stops_it_unless_it_was_accepted(resumed: Runs) -> None:
    assert "run.seed: 1234 -> 7" in refusal(resumed["seed"])
    assert changed(resumed["accepted"]) == [("stop", "run.seed")]
    assert [event["accepted"] for event in resumed["accepted"].events(1, "changed") if event["key"] == "run.seed"] == [
        True
    ]
    assert sorted(resumed["accepted"].steps()) == [4, 5, 6]


def test_data_is_compared_by_what_it_holds(resumed: Runs, origin: Any) -> None:
    assert changed(resumed["moved"]) == [("name", "data")]
    assert resumed["moved"].steps()[6]["loss_hex"] == origin.steps()[6]["loss_hex"]
    assert changed(resumed["grown"]) == [("name", "data")]
    assert "other.tokens: " in refusal(resumed["other data"])


def test_weights_of_another_run_in_the_own_folder_are_refused(resumed: Runs) -> None:
    assert "run_id: " in refusal(resumed["stranger"])


def test_stages_of_two_steps_are_refused_by_name(resumed: Runs) -> None:
    for how, saved, recorded in (("mixed", "step 6", "step 3"), ("mixed and hidden", "is 6", "3 in checkpoint.json")):
        assert has_parts(refusal(resumed[how]), "rank 1 (dp0 pp1 tp0)", saved, recorded)


@pytest.mark.parametrize(("name", "code"), [("samples of an older version", 1), ("mixed and hidden", 1), ("same", 0)])
def test_the_command_compares_the_counters_in_the_files(resumed: Runs, check_text: Any, name: str, code: int) -> None:
    folder = resumed[name].run.checkpoints / "global_step3"
    done = CliRunner().invoke(bsl, ["checkpoint", "verify", str(folder)])
    assert done.exit_code == code
    check_text(done.stdout.replace(f"{folder}/", ""))


def test_edited_counters_are_refused(resumed: Runs) -> None:
    assert "digest" in refusal(resumed["samples"])
    assert "consumed_train_samples is 48" in refusal(resumed["samples of an older version"])


def test_one_that_failed_its_guards_is_refused(resumed: Runs) -> None:
    message = refusal(resumed["failed"])
    assert "health: " in message and message.endswith(": a moment is 1e34")


def test_one_of_an_older_version_resumes_and_what_is_not_known_is_said(resumed: Runs, origin: Any) -> None:
    attempt = resumed["older"]
    assert changed(attempt) == [("unknown", key) for key in ("run_id", "health", "data")]
    assert sorted(attempt.steps()) == [4, 5, 6]
    assert attempt.steps()[6]["loss_hex"] == origin.steps()[6]["loss_hex"]

"""What `bsl submit` checks in a checkpoint before it queues a job."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bigsci_launch.checkpoints.folder import (
    CheckpointsDir,
    begin_checkpoint,
    commit_checkpoint,
    digests_path,
    list_files,
    record_path,
    write_record,
)
from bigsci_launch.checkpoints.resume import describe_run, require_not_lost, verify_resume
from bigsci_launch.checkpoints.verify import file_digest, is_verified
from bigsci_launch.config.load import load_run
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.errors import CheckpointError
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.topology import Topology
from tests.support.texts import CheckText, has_parts

DEMO = Path(__file__).parents[3] / "configs/demo.yaml"
SHAPE = Topology(tp=2, pp=2, dp=2)
SHARD = "mp_rank_00_model_states.pt"


def config(*overrides: str) -> RunConfig:
    return load_run(DEMO, overrides).config


@pytest.fixture
def checkpoints(tmp_path: Path) -> CheckpointsDir:
    """A checkpoint of the demo after step 20."""
    made = CheckpointsDir(tmp_path)
    staged = begin_checkpoint(made, "global_step20") / "global_step20"
    (staged / SHARD).write_bytes(b"weights" * 100)
    for rank in range(SHAPE.world_size):
        path = digests_path(staged, rank)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"files": {SHARD: file_digest(staged / SHARD)} if rank == 0 else {}}))
    write_record(staged, replace(describe_run(config(), SHAPE, step=20), files=list_files(staged)))
    commit_checkpoint(made, "global_step20", 20)
    return made


def test_a_sound_one_is_verified_once(checkpoints: CheckpointsDir, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = verify_resume(config(), SHAPE, checkpoints)
    assert folder == checkpoints.folder("global_step20")
    assert is_verified(folder)
    read: list[str] = []
    assert verify_resume(config(), SHAPE, checkpoints, lambda number, name: read.append(name)) == folder
    assert read == []


def test_a_damaged_one_is_refused_even_if_it_was_sound(checkpoints: CheckpointsDir) -> None:
    verify_resume(config(), SHAPE, checkpoints)
    (checkpoints.folder("global_step20") / SHARD).write_bytes(b"weighty" * 100)
    with pytest.raises(CheckpointError, match=SHARD):
        verify_resume(config(), SHAPE, checkpoints)


def shard_of(made: CheckpointsDir) -> Path:
    return made.folder("global_step20") / SHARD


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[333] ^= 4
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[CheckpointsDir], object]] = {
    "no shard": lambda made: shard_of(made).unlink(),
    "short": lambda made: os.truncate(shard_of(made), 5),
    "flipped bit": lambda made: flip(shard_of(made)),
    "no digests": lambda made: digests_path(made.folder("global_step20"), 3).unlink(),
    "no latest": lambda made: made.latest.unlink(),
    "empty latest": lambda made: made.latest.write_text(""),
    "wrong latest": lambda made: made.latest.write_text("global_step99"),
    "no folder": lambda made: shutil.rmtree(made.folder("global_step20")),
    "empty record": lambda made: record_path(made.folder("global_step20")).write_text("{}"),
    "no record": lambda made: record_path(made.folder("global_step20")).unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_nothing_begins_from_a_damaged_one(
    checkpoints: CheckpointsDir, damage: Callable[[CheckpointsDir], object], check_text: CheckText
) -> None:
    damage(checkpoints)
    with pytest.raises(CheckpointError) as refused:
        verify_resume(config(), SHAPE, checkpoints)
    assert refused.value.exit_code == 4
    check_text(refused.value.message)


@pytest.mark.parametrize(
    ("overrides", "topology", "parts"),
    [
        (["model.hidden_size=128"], SHAPE, ("hidden_size", 64, 128)),
        (["model.embedding_norm=true"], SHAPE, ("embedding_norm", False, True)),
        ([], Topology(tp=2, pp=2, dp=1), ("dp is 2", 1)),
    ],
)
def test_one_of_another_run_is_refused(
    checkpoints: CheckpointsDir, overrides: list[str], topology: Topology, parts: tuple[object, ...]
) -> None:
    with pytest.raises(CheckpointError) as refused:
        verify_resume(config(*overrides), topology, checkpoints)
    assert has_parts(refused.value.message, *parts)


def test_none_is_needed_to_start(checkpoints: CheckpointsDir, tmp_path: Path) -> None:
    assert verify_resume(config("checkpoint.load=none"), SHAPE, checkpoints) is None
    assert verify_resume(config(), SHAPE, CheckpointsDir(tmp_path / "nothing")) is None


def test_what_a_conversion_cures_says_how(checkpoints: CheckpointsDir) -> None:
    with pytest.raises(CheckpointError) as refused:
        verify_resume(config(), Topology(tp=1, pp=2, dp=4), checkpoints)
    folder = checkpoints.folder("global_step20")
    command = f"bsl checkpoint convert {folder} --tp 1 --pp 2 --dp 4 -o FOLDER"
    assert has_parts(refused.value.hint or "", command, "checkpoint.load: FOLDER")
    with pytest.raises(CheckpointError) as refused:
        verify_resume(config("model.hidden_size=128"), Topology(tp=1, pp=2, dp=4), checkpoints)
    assert refused.value.hint and "convert" not in refused.value.hint


def test_a_run_that_saved_never_begins_again_unasked(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for name, kinds in (("0001", ("start", "save")), ("0002", ("start",))):
        attempt = run.attempt(name)
        attempt.make()
        lines = [json.dumps({"kind": kind, "step": 20}) for kind in kinds]
        attempt.event_file(0).write_text("\n".join(lines) + "\n")
    with pytest.raises(CheckpointError, match=r"0001 .*step 20"):
        require_not_lost(run)
    run.attempt("0001").event_file(0).unlink()
    require_not_lost(run)

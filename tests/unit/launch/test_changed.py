"""`bsl submit` of a run that has changed since its checkpoint was saved."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from bigsci_launch.checkpoints.changes import Acceptance, read_accepted
from bigsci_launch.checkpoints.folder import (
    CheckpointsDir,
    begin_checkpoint,
    commit_checkpoint,
    list_files,
    write_digests,
    write_record,
)
from bigsci_launch.checkpoints.resume import describe_run
from bigsci_launch.checkpoints.verify import with_digest
from bigsci_launch.cli.main import bsl
from bigsci_launch.config.load import load_run
from bigsci_launch.data.fingerprint import fingerprint
from bigsci_launch.data.indexed import IndexedWriter, open_dataset
from bigsci_launch.runs.attempts import JobRecord, write_job
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.scheduler.local import Launcher
from bigsci_launch.topology import Topology
from tests.support.texts import CheckText, has_parts

pytestmark = pytest.mark.slow

RunFile = Callable[..., Path]
SHAPE = Topology(tp=2, pp=1, dp=2)
SITE = {"ranks_per_node": 2}


def write_tokens(prefix: Path, seed: int = 0) -> None:
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        writer.add_document(np.random.default_rng(seed).integers(0, 60, 2000))


def save(run: RunDir, path: Path, **fields: Any) -> Path:
    """Leave a checkpoint after step 5 of the run in the file `path`."""
    checkpoints = CheckpointsDir(run.checkpoints)
    staged = begin_checkpoint(checkpoints, "global_step5") / "global_step5"
    for rank in range(SHAPE.world_size):
        write_digests(staged, rank, {"step": 5, "optimizer": {"decay.step": 5}, "files": {}})
    described = describe_run(load_run(path).config, SHAPE, step=5, consumed_samples=10, run_id="a")
    data = fingerprint(open_dataset(Path("tokens"))).document
    known = {"health": {"passed": True, "step": 5, "findings": []}, "data": data, **fields}
    write_record(staged, with_digest(staged, replace(described, files=list_files(staged), **known)))
    commit_checkpoint(checkpoints, "global_step5", 5)
    return checkpoints.folder("global_step5")


@pytest.fixture
def saved(run_file: RunFile, fake_slurm: Callable[..., Any]) -> tuple[RunDir, Path]:
    """A run with one ended attempt, which saved after step 5; and its run file."""
    fake = fake_slurm("sbatch", "squeue", "sinfo", "scontrol")
    fake.answer("sbatch", "77\n")
    path = run_file(run={"name": "trial"}, data={"prefix": "tokens"})
    write_tokens(Path("tokens"))
    run = RunDir(Path("runs/trial").resolve())
    first = run.attempt("0001")
    first.make()
    write_job(first, JobRecord("local", 0.0, launcher=Launcher(2**22 + 1, 1, socket.gethostname())))
    run.record.write_text(json.dumps(run_document(path)))
    save(run, path)
    return run, path


def run_document(path: Path) -> dict[str, Any]:
    from bigsci_launch.launch.claim import identity

    return {"schema_version": 1, "name": "trial", "run_id": "a", **identity(load_run(path).config, SHAPE)}


def submit(path: Path, *words: str) -> Result:
    return CliRunner().invoke(bsl, ["submit", str(path), *words])


def accepted(run: RunDir) -> Acceptance:
    return read_accepted(run.attempts()[-1])


def test_an_unchanged_run_says_nothing_of_changes(saved: tuple[RunDir, Path], check_text: CheckText) -> None:
    run, path = saved
    done = submit(path)
    assert done.exit_code == 0, done.output
    check_text(done.stderr)
    assert not run.attempts()[-1].accepted.exists()


def test_a_setting_is_named_and_the_job_is_submitted(saved: tuple[RunDir, Path]) -> None:
    done = submit(saved[1], "--set", "optimizer.learning_rate=0.5")
    assert done.exit_code == 0, done.output
    assert has_parts(done.stderr, "global_step5: optimizer.learning_rate: 0.0003 -> 0.5\n")


def test_another_seed_needs_force_which_is_recorded(saved: tuple[RunDir, Path]) -> None:
    run, path = saved
    refused = submit(path, "--set", "run.seed=7")
    assert refused.exit_code == 4
    assert "run.seed: 1234 -> 7" in refused.stderr and "--force" in refused.stderr
    assert [attempt.name for attempt in run.attempts()] == ["0001"]
    forced = submit(path, "--set", "run.seed=7", "--force")
    assert forced.exit_code == 0, forced.output
    assert has_parts(forced.stderr, "global_step5", "--force: run.seed: 1234 -> 7")
    assert accepted(run) == Acceptance(("data", "data.order", "run.seed"))


def test_other_data_is_seen_before_the_job_waits(saved: tuple[RunDir, Path], check_text: CheckText) -> None:
    path = saved[1]
    write_tokens(Path("tokens"), seed=1)
    refused = submit(path)
    assert refused.exit_code == 4
    texts = [refused.stderr]
    write_tokens(Path("moved"))
    moved = submit(path, "--set", "data.prefix=moved")
    assert moved.exit_code == 0, moved.output
    check_text(*texts, moved.stderr)


def test_data_that_this_machine_does_not_see_is_left_to_the_ranks(saved: tuple[RunDir, Path]) -> None:
    done = submit(saved[1], "--set", "data.prefix=/on-the-nodes/tokens")
    assert done.exit_code == 0, done.output
    assert "data.prefix: tokens -> /on-the-nodes/tokens: " in done.stderr


def test_weights_of_another_run_are_refused_unless_the_run_file_names_them(
    saved: tuple[RunDir, Path], check_text: CheckText
) -> None:
    run, path = saved
    elsewhere = save(RunDir(Path("runs/other").resolve()), path, run_id="b")
    done = submit(path, "--set", f"checkpoint.load={elsewhere}", "--set", "run.name=branch")
    assert done.exit_code == 0, done.output
    texts = [done.stderr]
    own = run.checkpoints / "global_step5"
    shutil.rmtree(own)
    shutil.copytree(elsewhere, own)
    refused = submit(path)
    assert refused.exit_code == 4
    check_text(*texts, refused.stderr)


def test_one_of_an_older_version_says_what_is_not_known(saved: tuple[RunDir, Path]) -> None:
    run, path = saved
    save(run, path, run_id=None, health=None, data=None)
    done = submit(path)
    assert done.exit_code == 0, done.output
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("unknown about global_step5: ")]
    assert all(word in line for word in ("run_id: ", "health: ", "data.prefix: tokens: "))

"""Stop, save, resume: the loss continues as if nothing had happened, bit for bit."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bigsci_launch.checkpoints.folder import (
    CheckpointsDir,
    digests_path,
    find_checkpoint,
    list_files,
    read_record,
    require_complete,
    write_digests,
    write_record,
)
from bigsci_launch.checkpoints.verify import file_digest, with_digest
from bigsci_launch.cli.main import bsl
from bigsci_launch.errors import CheckpointError
from tests.support.texts import has_parts

from .conftest import losses

pytestmark = pytest.mark.torch

STEPS = 8
BF16 = {"steps": STEPS, "precision": "bf16"}


@pytest.fixture(scope="module")
def undisturbed(finish: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return finish(
        tmp_path_factory.mktemp("undisturbed"), "tp=2,pp=2,dp=2", training=BF16, monitor={"dump_weights_steps": [2]}
    )


@pytest.fixture(scope="module")
def stopped(start: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Eight ranks, one of which gets SIGUSR2 after step 2."""
    attempt = start(tmp_path_factory.mktemp("stopped"), "tp=2,pp=2,dp=2", training={**BF16, "stop_after_steps": 6})
    attempt.until(lambda: 2 in attempt.steps())
    os.kill(attempt.processes[3].pid, signal.SIGUSR2)
    attempt.wait()
    return attempt


@pytest.fixture(scope="module")
def saved(stopped: Any) -> Path:
    """The checkpoint that the stopped run left."""
    folder: Path = CheckpointsDir(stopped.run.checkpoints).folder(f"global_step{stopped.events(0)[-1]['step']}")
    return folder


@pytest.fixture(scope="module")
def killed(saved: Path, stopped: Any, start: Any) -> Any:
    """The stopped run resumes and saves every step; then one of its ranks is killed."""
    attempt = start(stopped.run.path, "tp=2,pp=2,dp=2", training=BF16, checkpoint={"save_interval": 1})
    attempt.until(lambda: attempt.steps())
    attempt.processes[5].kill()
    attempt.wait()
    return attempt


@pytest.fixture(scope="module")
def resumed(killed: Any, finish: Any) -> Any:
    return finish(killed.run.path, "tp=2,pp=2,dp=2", training=BF16)


def test_a_signal_to_one_rank_stops_all_at_one_step(stopped: Any) -> None:
    ends = [stopped.events(rank)[-1] for rank in range(8)]
    assert {end["reason"] for end in ends} == {"signal"}
    (step,) = {end["step"] for end in ends}
    assert 2 <= step < 7
    assert [process.returncode for process in stopped.processes] == [0] * 8
    folder = find_checkpoint("auto", CheckpointsDir(stopped.run.checkpoints))
    assert folder is not None
    assert folder.name == f"global_step{step}"
    require_complete(folder, read_record(folder))
    assert (stopped.run.checkpoints / "latest_checkpointed_iteration.txt").read_text() == f"{step}\n"


def test_a_killed_rank_takes_all_with_it_and_costs_one_interval(stopped: Any, killed: Any, resumed: Any) -> None:
    codes = [process.returncode for process in killed.processes]
    assert codes[5] == -signal.SIGKILL
    assert 0 not in codes
    done = max(losses(killed))
    assert killed.events(4, "load")[0]["checkpoint_step"] == max(losses(stopped))
    assert resumed.events(4, "load")[0]["checkpoint_step"] in (done - 1, done)


def test_the_resumed_run_is_the_undisturbed_one_to_the_last_bit(
    undisturbed: Any, stopped: Any, killed: Any, resumed: Any
) -> None:
    attempts = [losses(attempt) for attempt in (stopped, killed, resumed)]
    for found in attempts:
        assert found.items() <= losses(undisturbed).items()
    assert sorted({step for found in attempts for step in found}) == list(range(1, STEPS + 1))


def test_weights_are_dumped_per_rank(undisturbed: Any) -> None:
    safetensors = pytest.importorskip("safetensors")
    path = undisturbed.run.dump_file(2, "after", 5)
    with safetensors.safe_open(path, "np") as dump:
        assert dump.metadata() == {"rank": "5", "dp": "0", "pp": "1", "tp": "1", "step": "2", "when": "after"}
        assert "tied_modules.embedding.weight" in dump.keys()  # noqa: SIM118
        assert dump.get_slice("tied_modules.embedding.weight").get_shape() == [256, 32]
    before = undisturbed.run.dump_file(2, "before", 5).read_bytes()
    assert before != path.read_bytes()


def test_nobody_else_may_write_what_ranks_save(undisturbed: Any) -> None:
    """They run under umask 002, as where a project shares its files."""
    folders = (undisturbed.run.checkpoints, undisturbed.run.dumps)
    saved = [path for folder in folders for path in (folder, *folder.rglob("*")) if not path.is_symlink()]
    assert len(saved) > 40 and not [path for path in saved if path.stat().st_mode & 0o022]


def test_dropout_and_a_slow_rank_resume_exactly(finish: Any, tmp_path: Path) -> None:
    """Random states are part of a checkpoint, and a fault that only delays changes nothing."""
    run = {"model": {"dropout": 0.1}, "training": {"steps": 6, "precision": "bf16", "activation_checkpointing": True}}
    slow = [{"kind": "slow", "rank": 1, "step": 5, "seconds": 0.6}]
    whole = finish(tmp_path / "whole", "pp=2", faults=slow, **run)
    halves = {**run, "training": {**run["training"], "stop_after_steps": 3}}
    first = finish(tmp_path / "halves", "pp=2", **halves)
    assert first.events(0)[-1]["reason"] == "stop_after_steps"
    second = finish(tmp_path / "halves", "pp=2", **halves)
    assert {**losses(first), **losses(second)} == losses(whole)
    seconds = [record["seconds"] for record in whole.steps().values()]
    assert min(seconds[4:]) > 0.6
    assert [record["fault"] for record in whole.events(1, "fault")] == ["slow"]


def test_dropout_drops(finish: Any, tmp_path: Path) -> None:
    runs = [finish(tmp_path / str(p), model={"dropout": p}, training={"steps": 2}) for p in (0.0, 0.1)]
    assert losses(runs[0])[1] != losses(runs[1])[1]


def convert(folder: Path, out: Path, *sizes: str) -> Result:
    return CliRunner().invoke(bsl, ["checkpoint", "convert", str(folder), "-o", str(out), *sizes])


def diff_weights(a: Path, b: Path, *options: str) -> Result:
    return CliRunner().invoke(bsl, ["diff-weights", str(a), str(b), *options])


@pytest.fixture(scope="module")
def on_one_rank(saved: Path, finish: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run of eight ranks, resumed on one."""
    folder = tmp_path_factory.mktemp("on-one-rank")
    done = convert(saved, folder / "checkpoints", "--tp", "1", "--pp", "1", "--dp", "1")
    assert done.exit_code == 0, done.output
    return finish(folder, "tp=1", training=BF16)


def test_a_run_goes_on_at_another_topology(saved: Path, undisturbed: Any, on_one_rank: Any) -> None:
    assert on_one_rank.events(0, "load")[0]["checkpoint_step"] == read_record(saved).step
    whole = undisturbed.steps()
    for step, record in on_one_rank.steps().items():
        assert record["loss"] == pytest.approx(whole[step]["loss"], rel=1e-4)
        assert record["grad_norm"] == pytest.approx(whole[step]["grad_norm"], rel=2e-3)
        kept = ("consumed_samples", "learning_rate", "global_batch_size")
        assert {key: record[key] for key in kept} == {key: whole[step][key] for key in kept}


def test_a_conversion_keeps_every_bit_there_and_back(saved: Path, on_one_rank: Any, tmp_path: Path) -> None:
    (converted,) = (on_one_rank.run.checkpoints / saved.name,)
    assert diff_weights(saved, converted).exit_code == 0
    back = convert(converted, tmp_path, "--tp", "2", "--pp", "2", "--dp", "2")
    assert back.exit_code == 0, back.output
    assert "padded vocabulary 384 -> 512 rows" in back.stderr
    compared = diff_weights(saved, tmp_path, "--exclude", "rng_*")  # random states of other ranks do not matter here
    assert (compared.exit_code, "438 tensors compared" in compared.stdout) == (0, True), compared.output
    assert CliRunner().invoke(bsl, ["checkpoint", "verify", str(tmp_path / saved.name)]).exit_code == 0


def test_deepspeeds_own_converter_finds_the_same_parameters(saved: Path, on_one_rank: Any, tmp_path: Path) -> None:
    """The checkpoint's declarations suffice: each pattern is used, and the tied embedding is read once."""
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--num_extract_workers", "1"]
    command += [
        "--num_merge_workers",
        "1",
        "--input_folder",
        str(saved),
        "--output_folder",
        str(tmp_path / "universal"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    compared = diff_weights(on_one_rank.run.checkpoints / saved.name, tmp_path / "universal")
    assert compared.exit_code == 0, compared.output


def test_another_topology_is_refused_with_what_to_type(saved: Path, start: Any, tmp_path: Path) -> None:
    refused = start(tmp_path, "tp=1", training=BF16, checkpoint={"load": str(saved)})
    assert refused.wait() == [4]
    assert has_parts(refused.error(0)["message"], "tp is 2 in ", " 1 in ")
    hint = refused.error(0)["hint"]
    assert hint == f"bsl checkpoint convert {saved} --tp 1 --pp 1 --dp 1 -o FOLDER, then set checkpoint.load: FOLDER"


def test_a_copy_with_a_program_in_it_is_refused_and_nothing_runs(on_one_rank: Any, start: Any, tmp_path: Path) -> None:
    """Sizes and digests are made new, as by somebody who wants it to be loaded: they are no signature."""
    import torch

    saved = on_one_rank.run.checkpoints / f"global_step{STEPS}"
    copy = shutil.copytree(saved, tmp_path / "theirs" / saved.name)
    path = copy / "mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=False)
    torch.save({**state, "zz": Runs(f"touch {tmp_path}/PWNED")}, path)
    document = json.loads(digests_path(copy, 0).read_text())
    write_digests(copy, 0, {**document, "files": {**document["files"], path.name: file_digest(path)}})
    write_record(copy, with_digest(copy, replace(read_record(copy), files=list_files(copy))))
    refused = start(tmp_path / "own", "tp=1", training=BF16, checkpoint={"load": str(copy)})
    assert refused.wait() == [4]
    assert has_parts(refused.error(0)["message"], f"{path}: ", "posix.system")
    assert not (tmp_path / "PWNED").exists()


class Runs:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def test_no_conversion_picks_one_of_copies_that_differ(saved: Path, tmp_path: Path) -> None:
    import torch

    from bigsci_launch.plan.choose.conversion import saved_topology
    from bigsci_launch.train.state.reshard import SavedShards

    shutil.copytree(saved, tmp_path / "apart")
    shard = tmp_path / "apart" / "bf16_zero_pp_rank_0_mp_rank_02_optim_states.pt"
    state = torch.load(shard, weights_only=False)
    with torch.no_grad():
        state["optimizer_state_dict"]["single_partition_of_fp32_groups"][0][5] += 1e-6
    torch.save(state, shard)
    with pytest.raises(CheckpointError, match=r"tied_modules.embedding.weight \(master\): .* pp0 tp0 and on pp1 tp0"):
        SavedShards(tmp_path / "apart", saved_topology(read_record(saved))).require_equal_copies(lambda text: None)


@pytest.mark.long
@pytest.mark.parametrize("numbers", [(1, 6), (5, 8)])
def test_kills_during_saves_cost_one_interval_and_no_bit(
    numbers: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moments of the benchmark: a file half written, half pointed to; named, an old checkpoint half deleted.

    tests/process/test_checkpoint_kill.py kills before every call of a save, without training; `killed` is a run whose
    rank is killed at some moment.
    """
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    program = importlib.import_module("kill_during_save")
    moments = program.draw_moments(9, seed=2)
    kills, problems, compared = program.run_kills(tmp_path, [moments[number] for number in numbers], background=False)
    assert problems == []
    assert [kill.lost for kill in kills if kill.lost > program.INTERVAL] == []
    assert compared >= kills[-1].done + program.INTERVAL

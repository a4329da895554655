"""Every documented input of `--bundle`, of healthy and of hung jobs. Each is one look, which accuses nobody."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bigsci_launch.cli.main import bsl
from bigsci_launch.spy.inputs.gather import open_evidence
from bigsci_launch.spy.judge.conclusion import Conclusion, Strength
from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.taxonomy import State

RECORDED = Path(__file__).parents[1] / "recordings" / "one-look"
HEALTHY = ("healthy", "ddp-steps", "ddp-saves")
HUNG = {"loader-2": 2, "async-3": 3}
BEHIND = {**HUNG, "ddp-saves": 0}
ALL_REDUCE = "all_reduce (torch/distributed/distributed_c10d.py:2501)"


def text_of(*ranks: Sequence[str]) -> str:
    """Text of py-spy in which each rank is in these frames, innermost first."""
    parts = []
    for pid, frames in enumerate(ranks, 100):
        lines = "".join(f"    {frame}\n" for frame in (*frames, "<module> (train.py:120)"))
        parts.append(f'Process {pid}: python train.py\nPython v3.11.7 (python)\n\nThread {pid} (idle): "MainThread"\n')
        parts.append(lines)
    return "".join(parts)


def text_in_one_file(name: str, folder: Path) -> Path:
    shutil.copy(RECORDED / name / "trace-n0.out", folder / "all.out")
    return folder / "all.out"


def text_of_two_nodes(name: str, folder: Path) -> Path:
    """Two ranks in each file, as if they were two nodes."""
    processes = ["Process " + part for part in (RECORDED / name / "trace-n0.out").read_text().split("Process ")[1:]]
    (folder / "trace-n0.out").write_text("".join(processes[:-2]))
    (folder / "trace-n1.out").write_text("".join(processes[-2:]))
    return folder


def pickles(name: str, folder: Path) -> Path:
    for path in (RECORDED / name).glob("nccl_trace_rank_*"):
        shutil.copy(path, folder)
    return folder


def recorder_json(name: str, folder: Path) -> Path:
    """The same in the other format of torch's recorder, which has no frames."""
    for path in (RECORDED / name).glob("nccl_trace_rank_*"):
        document = pickle.loads(path.read_bytes())
        for entry in document["entries"]:
            del entry["frames"]
        (folder / f"{path.name}.json").write_text(json.dumps(document))
    return folder


def everything(name: str, folder: Path) -> Path:
    return Path(shutil.copytree(RECORDED / name, folder / "both"))


def ras_report(name: str, folder: Path) -> Path:
    """A report of NCCL's RAS on such a job, in which the rank that the others wait for has begun one call less."""
    ranks = [member_of_world(rank, 218 if rank == BEHIND.get(name) else 219) for rank in range(4)]
    world = {"hash": "0xa", "secondary_hash": "0x1:0x2", "size": 4, "ranks_count": 4, "missing_ranks_count": 0,
             "ranks": ranks, "missing_ranks": []}  # fmt: skip
    document = {"nccl_version": "2.28.9", "communicators": [world], "ras": {"timeouts_count": 0}}
    (folder / "ras.json").write_text(json.dumps(document, indent=2))
    return folder / "ras.json"


def member_of_world(rank: int, all_reduces: int) -> dict[str, Any]:
    running = {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False}
    counts = {"Broadcast": 1, "Reduce": 0, "AllGather": 0, "ReduceScatter": 0, "AllReduce": all_reduces}
    return {"rank": rank, "host": f"10.0.0.{rank // 2 + 1}", "pid": 100 + rank, "cuda_dev": rank % 2,
            "nvml_dev": 0, "status": running, "collective_counts": counts}  # fmt: skip


Input = Callable[[str, Path], Path]
TEXTS: tuple[Input, ...] = (text_in_one_file, text_of_two_nodes)
RECORDERS: tuple[Input, ...] = (pickles, recorder_json)
INPUTS: tuple[Input, ...] = (*TEXTS, *RECORDERS, everything, ras_report)


def has_it(name: str, given: Input) -> bool:
    return given not in RECORDERS or (RECORDED / name / "nccl_trace_rank_0").exists()


@pytest.mark.parametrize(("name", "given"), [(name, each) for name in HEALTHY for each in INPUTS if has_it(name, each)])
def test_a_healthy_job_is_never_called_hung(tmp_path: Path, name: str, given: Input) -> None:
    conclusion = conclusion_of(given(name, tmp_path))
    assert_accuses_nobody(conclusion)
    assert conclusion.state in (State.UNKNOWN, State.PROGRESSING)


@pytest.mark.parametrize(("name", "given"), [(name, each) for name in HUNG for each in INPUTS])
def test_a_hung_job_is_called_one_only_on_condition(tmp_path: Path, name: str, given: Input) -> None:
    conclusion = conclusion_of(given(name, tmp_path))
    assert_accuses_nobody(conclusion)
    assert conclusion.if_hang is not None


@pytest.mark.parametrize("given", INPUTS)
def test_the_rank_that_the_others_wait_for_comes_first(tmp_path: Path, given: Input) -> None:
    assert first_of(conclusion_of(given("loader-2", tmp_path))) == 2


@pytest.mark.parametrize("given", RECORDERS)
def test_the_recorder_shows_who_left_out_an_asynchronous_collective(tmp_path: Path, given: Input) -> None:
    """Rank 1 waits for the end of a collective in which rank 3 has no part; all but rank 1 have reached a barrier."""
    assert first_of(conclusion_of(given("async-3", tmp_path))) == 3


@pytest.mark.parametrize("given", [*TEXTS, everything])
def test_a_rank_that_waits_for_an_asynchronous_collective_is_not_accused(tmp_path: Path, given: Input) -> None:
    """A stack shows that rank 1 is outside any call of torch, and not that it waits for a collective."""
    conclusion = conclusion_of(given("async-3", tmp_path))
    assert conclusion.if_hang is not None
    assert conclusion.if_hang.suspects == ()


def test_an_optimizer_that_is_still_at_work_is_no_hang(tmp_path: Path) -> None:
    """Three ranks are in all_reduce, and one is still in the optimizer: was called H31 with 0.80."""
    at_work = ("step (torch/optim/adam.py:51)", "train_step (train.py:91)")
    (tmp_path / "healthy.out").write_text(text_of(*[(ALL_REDUCE, "train_step (train.py:88)")] * 3, at_work))
    conclusion = conclusion_of(tmp_path / "healthy.out")
    assert_accuses_nobody(conclusion)
    assert conclusion.if_hang is not None
    assert conclusion.strength is Strength.GUESS


def test_the_victim_of_an_asynchronous_collective_is_not_accused(tmp_path: Path) -> None:
    """Rank 3 has left for a barrier; rank 1 is in `Work.wait()`, which has no frame. It was accused with 0.80."""
    reduces, waits = (ALL_REDUCE, "train_step (train.py:88)"), ("wait_for_gradients (train.py:90)",)
    left = ("barrier (torch/distributed/distributed_c10d.py:4012)",)
    (tmp_path / "async.out").write_text(text_of(reduces, waits, reduces, left))
    conclusion = conclusion_of(tmp_path / "async.out")
    assert_accuses_nobody(conclusion)
    assert conclusion.if_hang is None or conclusion.if_hang.suspects == ()
    assert {1, 3} <= {pointer.rank for pointer in conclusion.look_first[:2]}


@pytest.mark.parametrize("given", INPUTS)
@pytest.mark.parametrize(("name", "first"), [("healthy", None), ("loader-2", 2)])
def test_the_command_says_the_same(tmp_path: Path, name: str, given: Input, first: int | None) -> None:
    path = str(given(name, tmp_path))
    done = CliRunner().invoke(bsl, ["spy", "--bundle", path, "--json", "--why", "--exit-code"])
    assert done.exit_code == 0, "neither a hang nor a crash is found by one look"
    document = json.loads(done.stdout)
    assert (document["verdict"]["state"], document["verdict"]["suspects"]) == ("unknown", [])
    assert sum(rule["decides"] for rule in document["rules"]) <= 1
    assert len(document["rules"]) > 20
    if first is not None:
        assert document["verdict"]["look_first"][0]["rank"] == first
    shown = CliRunner().invoke(bsl, ["spy", "--bundle", path, "--why"])
    assert shown.exit_code == 0
    assert document["verdict"]["claim"] in " ".join(shown.stdout.split())
    assert " rules match" in shown.stdout


def conclusion_of(path: Path) -> Conclusion:
    return judge(open_evidence([path]).evidence())


def first_of(conclusion: Conclusion) -> int:
    return conclusion.look_first[0].rank


def assert_accuses_nobody(conclusion: Conclusion) -> None:
    assert not conclusion.state.is_failure
    assert conclusion.state is not State.SLOW
    assert conclusion.suspects == ()

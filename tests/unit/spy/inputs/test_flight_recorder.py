"""Dumps of torch's flight recorder: both formats, file names, and pickles that would run code."""

from __future__ import annotations

import json
import os
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.errors import EvidenceError
from bigsci_launch.spy.inputs.flight_recorder import rank_of
from bigsci_launch.spy.inputs.gather import open_evidence, read_file
from bigsci_launch.spy.inputs.reading import Found
from bigsci_launch.spy.judge.conclusion import Reason
from bigsci_launch.spy.judge.verdict import judge


def entry(number: int, *, retired: bool = True, operation: str = "all_reduce", **more: Any) -> dict[str, Any]:
    """An entry with the keys of torch 2.13."""
    return {
        "frames": [
            {"name": operation, "filename": "/venv/torch/distributed/distributed_c10d.py", "line": 3145},
            {"name": "step", "filename": "/src/train.py", "line": 7},
        ],
        "record_id": number, "pg_id": 0, "process_group": ("0", "default_pg"), "thread_name": "python",
        "thread_id": "139783901330304", "collective_seq_id": number + 1, "p2p_seq_id": 0, "op_id": number,
        "profiling_name": f"gloo:{operation}", "time_created_ns": 1, "input_sizes": [[8]], "input_dtypes": ["Float"],
        "output_sizes": [[8]], "output_dtypes": ["Float"], "state": "scheduled", "retired": retired,
        "timeout_ms": 1800000, "is_p2p": False, **more,
    }  # fmt: skip


def dump(*entries: dict[str, Any], ranks: str = "[0, 1]") -> dict[str, Any]:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}
    return {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": list(entries)}


def test_a_pickle_and_a_json_document_of_one_job(tmp_path: Path) -> None:
    waiting = dump(entry(1), entry(0), entry(2, retired=False))
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(waiting, protocol=2))
    away = json.loads(json.dumps(dump(entry(0), entry(1))))
    for each in away["entries"]:
        del each["frames"]
    (tmp_path / "nccl_trace_rank_1.json").write_text(json.dumps(away))
    evidence = open_evidence([tmp_path]).evidence()
    first, second = (seen.recorder for seen in evidence.ranks)
    assert first is not None
    assert second is not None
    assert [str(call) for call in first.open_calls] == ["all_reduce number 3"]
    assert (second.open_calls, dict(second.last_sequence)) == ((), {"0": 2})
    assert first.members == {"0": (0, 1)}
    assert evidence.ranks[0].thread is not None
    assert evidence.ranks[0].thread.operation == "all_reduce", "the stack at which it was begun"


def test_what_nccl_has_completed_is_not_open_and_pairs_are_left_out(tmp_path: Path) -> None:
    pair = entry(1, retired=False, operation="send 0->1", is_p2p=True)
    document = dump(entry(0, retired=False, state="completed"), pair)
    (tmp_path / "rank0").write_bytes(pickle.dumps(document))
    recorder = open_evidence([tmp_path]).evidence().ranks[0].recorder
    assert recorder is not None
    assert recorder.open_calls == ()
    assert len(recorder.stream) == 1


@pytest.mark.parametrize("absent", [2, 3])
def test_a_rank_whose_file_is_missing_is_not_accused_for_that(tmp_path: Path, absent: int) -> None:
    """Rank 2 has not reached the third collective; its file is missing, or that of a rank that waits."""
    for rank in set(range(4)) - {absent}:
        entries = [entry(0), entry(1), *([] if rank == 2 else [entry(2, retired=False)])]
        document = {**dump(*entries), "pg_config": {}}
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(document, protocol=2))
    evidence = open_evidence([tmp_path]).evidence("dp=4")
    conclusion = judge(evidence)
    assert evidence.world_size == 4 and evidence.ranks[absent].unreached
    assert (conclusion.state.value, conclusion.suspects) == ("unknown", ()), "a dump is one look"
    assert absent not in [pointer.rank for pointer in conclusion.look_first if pointer.reason is Reason.ACCUSED]


def test_a_rank_without_a_file_is_known_of_by_its_group(tmp_path: Path) -> None:
    (tmp_path / "rank_0.pkl").write_bytes(pickle.dumps(dump(entry(0), ranks="[0, 1, 2]")))
    assert [seen.rank for seen in open_evidence([tmp_path]).evidence().ranks] == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "rank"),
    [("nccl_trace_rank_12", 12), ("host7_rank3.pkl", 3), ("rank-0004.json", 4), ("trace_17", 17), ("dump.pkl", None)],
)
def test_the_rank_in_the_name(name: str, rank: int | None) -> None:
    assert rank_of(Path(name)) == rank


class Harm:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_never_runs_anything(tmp_path: Path, protocol: int) -> None:
    hostile = {**dump(entry(0)), "version": Harm(tmp_path / "harmed")}
    (tmp_path / "rank0.pkl").write_bytes(pickle.dumps(hostile, protocol=protocol))
    with pytest.raises(EvidenceError, match=r"(posix|nt)\.system"):
        open_evidence([tmp_path / "rank0.pkl"])
    assert not (tmp_path / "harmed").exists()


def damaged(change: str) -> bytes:
    document = dump(entry(0))
    if change == "no entries":
        del document["entries"]
    if change == "entry without a number":
        del document["entries"][0]["record_id"]
    if change == "entries of text":
        document["entries"] = ["all_reduce"]
    data = pickle.dumps(document, protocol=2)
    return data[: len(data) // 2] if change == "torn" else data


@pytest.mark.parametrize("damage", [None, "torn"])
def test_much_is_read_by_several_processes_to_the_same_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str | None
) -> None:
    for rank in range(9):
        (tmp_path / f"rank{rank}.pkl").write_bytes(pickle.dumps(dump(entry(0), entry(1, retired=rank == 4))))
    if damage:
        (tmp_path / "rank7.pkl").write_bytes(damaged(damage))
    alone = outcome(tmp_path)
    monkeypatch.setattr("bigsci_launch.spy.inputs.gather.PARALLEL_BYTES", 0)
    monkeypatch.setattr("bigsci_launch.spy.inputs.gather.read_file", partial(in_another_process, os.getpid()))
    assert outcome(tmp_path) == alone


def in_another_process(pid: int, path: Path) -> Found | None:
    assert os.getpid() != pid
    return read_file(path)


def outcome(folder: Path) -> object:
    """Return the bundle of a folder, or the error."""
    try:
        return open_evidence([folder])
    except EvidenceError as error:
        return error.message, error.hint


@pytest.mark.parametrize("change", ["torn", "no entries", "entry without a number", "entries of text"])
def test_a_damaged_pickle_is_one_clear_error(tmp_path: Path, change: str) -> None:
    (tmp_path / "rank0.pkl").write_bytes(damaged(change))
    with pytest.raises(EvidenceError, match=r"rank0\.pkl: it (is|starts)") as caught:
        open_evidence([tmp_path])
    assert caught.value.exit_code == 2


def test_a_file_without_a_rank_in_its_name(tmp_path: Path) -> None:
    (tmp_path / "dump.pkl").write_bytes(pickle.dumps(dump(entry(0))))
    with pytest.raises(EvidenceError, match=r"dump\.pkl"):
        open_evidence([tmp_path])

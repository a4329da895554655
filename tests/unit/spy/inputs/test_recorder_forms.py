"""Dumps that are not as torch writes them today: torch 2.2, 2.3, torchcomms, messages of NCCL, damage."""

from __future__ import annotations

import json
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.errors import EvidenceError
from bigsci_launch.spy.evidence.calls.flight_recorder import Recorder
from bigsci_launch.spy.inputs.flight_recorder import read_recorder_json, read_recorder_pickle
from bigsci_launch.spy.inputs.gather import open_evidence
from bigsci_launch.spy.inputs.reading import Damaged, NotThis
from bigsci_launch.spy.judge.verdict import judge

Document = dict[str, Any]


def of_torch_2_2(number: int, *, operation: str = "all_reduce", **more: Any) -> Document:
    """An entry as torch 2.2 wrote it: no record number, no name of the group, no types."""
    return {
        "seq_id": number, "pg_id": 0, "profiling_name": f"nccl:{operation}", "time_created_us": number,
        "input_sizes": [[8]], "output_sizes": [[8]], "state": "completed", "frames": [], **more,
    }  # fmt: skip


def of_torchcomms(number: int, group: str, operation: str = "all_reduce", **more: Any) -> Document:
    """An entry of torchcomms' hook: one number for the calls of all groups, and no mark on a message."""
    return {
        "record_id": number, "pg_id": 0, "process_group": [group, "nccl"], "collective_seq_id": number,
        "p2p_seq_id": 0, "op_id": number, "profiling_name": f"nccl:{operation}", "input_sizes": [[8]],
        "input_dtypes": ["Float"], "output_sizes": [[8]], "output_dtypes": ["Float"], "state": "scheduled",
        "retired": True, "is_p2p": False, "thread_name": "python", "thread_id": "7", **more,
    }  # fmt: skip


def dump_of_torchcomms(*entries: Document, **groups: str) -> Document:
    config = {name: {"name": name, "desc": "nccl", "ranks": ranks} for name, ranks in groups.items()}
    return {"version": "2.10", "comm_lib_version": "", "pg_config": config, "pg_status": {}, "entries": list(entries)}


def recorders(folder: Path) -> list[Recorder | None]:
    return [seen.recorder for seen in open_evidence([folder]).evidence().ranks]


def test_a_list_of_entries_is_a_dump_of_torch_2_2(tmp_path: Path) -> None:
    for rank in range(3):
        entries = [of_torch_2_2(1), of_torch_2_2(2, operation=f"send {rank}->0"), of_torch_2_2(2)]
        waiting = [] if rank == 1 else [of_torch_2_2(3, state="started")]
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps([*entries, *waiting], protocol=2))
    first, behind, _ = recorders(tmp_path)
    assert first is not None and behind is not None
    assert [str(call) for call in first.open_calls] == ["all_reduce number 3"]
    assert (len(first.stream), behind.open_calls) == (3, ())
    assert judge(open_evidence([tmp_path]).evidence()).look_first[0].rank == 1


@pytest.mark.parametrize("version", ["1.1", "1.4"])
def test_a_dump_of_torch_2_3_has_a_version_and_the_entries_of_torch_2_2(tmp_path: Path, version: str) -> None:
    for rank in range(3):
        entries = [{**of_torch_2_2(number), "record_id": number, "op_id": number} for number in (1, 2)]
        waiting = [] if rank == 2 else [{**of_torch_2_2(3, state="started"), "record_id": 3, "op_id": 3}]
        config = {"pg_config": {0: [0, 1, 2], 1: [0, 1]}} if version == "1.4" else {}
        document = {"entries": [*entries, *waiting], "version": version, **config}
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(document, protocol=2))
    first, _, behind = recorders(tmp_path)
    assert first is not None and behind is not None
    assert [str(call) for call in first.open_calls] == ["all_reduce number 3"]
    assert dict(first.members) == ({"0": (0, 1, 2), "1": (0, 1)} if version == "1.4" else {})
    assert judge(open_evidence([tmp_path]).evidence()).look_first[0].rank == 2


@pytest.mark.parametrize("document", [[], [1, 2], [{"a": 1}], [{"profiling_name": "nccl:all_reduce"}]])
def test_another_list_is_one_clear_error(tmp_path: Path, document: list[Any]) -> None:
    (tmp_path / "rank_0.pkl").write_bytes(pickle.dumps(document, protocol=2))
    with pytest.raises(EvidenceError, match=r"rank_0\.pkl: it is"):
        open_evidence([tmp_path / "rank_0.pkl"])


def test_calls_of_torchcomms_are_numbered_in_their_group(tmp_path: Path) -> None:
    """Rank 1 has sent a message, which shifts the numbers of all calls after it."""
    told = [
        [of_torchcomms(0, "world"), of_torchcomms(1, "tp"), of_torchcomms(2, "world", retired=False)],
        [of_torchcomms(0, "world"), of_torchcomms(1, "tp", "send"), of_torchcomms(2, "tp"), of_torchcomms(3, "tp")],
    ]
    for rank, entries in enumerate(told):
        document = dump_of_torchcomms(*entries, world="0,1,2,3", tp="0,1")
        (tmp_path / f"comm_lib_trace_rank_{rank}.json").write_text(json.dumps(document))
    first, second = recorders(tmp_path)[:2]
    assert first is not None and second is not None
    assert [str(call) for call in first.open_calls] == ["all_reduce number 2"]
    assert (dict(first.last_sequence), dict(second.last_sequence)) == ({"world": 2, "tp": 1}, {"world": 1, "tp": 2})
    assert first.members == {"world": (0, 1, 2, 3)}, "of a smaller group, places and no ranks are listed"


def test_torchcomms_without_its_first_calls_cannot_be_compared(tmp_path: Path) -> None:
    document = dump_of_torchcomms(of_torchcomms(7, "world"), of_torchcomms(8, "tp"), world="0,1,2,3", tp="0,1")
    (tmp_path / "rank_0.json").write_text(json.dumps(document))
    with pytest.raises(EvidenceError, match="max_entries"):
        open_evidence([tmp_path])
    document["entries"] = [of_torchcomms(7, "world", retired=False)]
    (tmp_path / "rank_0.json").write_text(json.dumps(document))
    found = recorders(tmp_path)[0]
    assert found is not None and found.open_calls[0].sequence == 7, "one group alone needs no other number"


def test_torchcomms_leaves_out_the_entries_where_there_is_none(tmp_path: Path) -> None:
    document = dump_of_torchcomms(world="0,1")
    del document["entries"]
    (tmp_path / "rank_0.json").write_text(json.dumps(document))
    found = recorders(tmp_path)[0]
    assert found is not None and found.stream == ()


@pytest.mark.parametrize(
    ("backend", "unfinished", "known"), [("nccl", True, 1), ("nccl", False, 0), ("gloo", True, None)]
)
def test_messages_are_known_where_the_backend_records_them(
    tmp_path: Path, backend: str, unfinished: bool, known: int | None
) -> None:
    entries = [
        {**of_torchcomms(0, "0"), "profiling_name": f"{backend}:all_reduce"},
        {**of_torchcomms(1, "0", retired=not unfinished), "profiling_name": f"{backend}:recv 0<-1", "is_p2p": True},
    ]
    (tmp_path / "rank_0.json").write_text(json.dumps({"version": "2.10", "pg_config": {}, "entries": entries}))
    found = recorders(tmp_path)[0]
    assert found is not None and found.open_messages == known


@given(st.lists(st.tuples(st.integers(0, 1 << 12), st.binary(max_size=9)), max_size=6), st.booleans())
def test_damage_is_no_traceback(changes: list[tuple[int, bytes]], is_list: bool) -> None:
    entries = [of_torchcomms(0, "world"), of_torchcomms(1, "tp", "send"), of_torchcomms(2, "world", retired=False)]
    data = pickle.dumps(entries if is_list else dump_of_torchcomms(*entries, world="0,1", tp="0"), protocol=2)
    for at, piece in changes:
        at %= len(data)
        data = data[:at] + piece + data[at + len(piece) :]
    with suppress(NotThis, Damaged):
        assert read_recorder_pickle(Path("rank_0"), data).readings


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(["entries", "pg_config", "process_group", "collective_seq_id", "record_id", "ranks"]), JSON)
def test_any_value_of_a_key_is_no_traceback(key: str, value: Any) -> None:
    entries = [of_torchcomms(0, "world"), of_torchcomms(1, "tp")]
    document = dump_of_torchcomms(*entries, world="0,1", tp="0")
    for holder in (document, *entries, *document["pg_config"].values()):
        if key in holder:
            holder[key] = value
    with suppress(NotThis, Damaged):
        assert read_recorder_json(Path("rank_0"), document).readings


@pytest.mark.parametrize("number", [float("inf"), float("nan"), 1e308, "9" * 5000])
def test_a_number_that_is_none_is_damage(tmp_path: Path, number: object) -> None:
    entries = [{**of_torchcomms(1, "w"), "record_id": number}, of_torchcomms(2, "w")]
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(dump_of_torchcomms(*entries, w="0,1"), protocol=2))
    with suppress(EvidenceError):
        judge(open_evidence([tmp_path]).evidence())

"""Dumps of NCCL: sizes that may differ, a collective that some have finished and others not, and words about both."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.spy.evidence.ranks import Evidence
from bigsci_launch.spy.inputs.gather import open_evidence
from bigsci_launch.spy.judge.conclusion import Conclusion
from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.known.library import name_hang, read_library
from bigsci_launch.spy.taxonomy import HangClass

Document = dict[str, Any]
GROUPS = {"40": [0, 1], "41": [2, 3], "70": [0, 1, 2, 3]}
OF_RANK = ("40", "40", "41", "41")


def call(number: int, group: str, operation: str, size: int = 64, *, done: bool = True, **more: Any) -> Document:
    return {
        "process_group": [group, ""], "collective_seq_id": number, "p2p_seq_id": 0, "is_p2p": False,
        "profiling_name": f"nccl:{operation}", "input_sizes": [[size, 8]], "input_dtypes": ["BFloat16"],
        "state": "completed" if done else "scheduled", "retired": done, **more,
    }  # fmt: skip


def evidence_of(folder: Path, told: Sequence[Sequence[Document]], lists: bool = True) -> Evidence:
    config = {name: {"name": name, "desc": "", "ranks": str(ranks)} for name, ranks in GROUPS.items()}
    for rank, entries in enumerate(told):
        numbered = [{"record_id": number, **entry} for number, entry in enumerate(entries)]
        document = {"version": "2.9", "pg_config": config if lists else {}, "entries": numbered}
        (folder / f"nccl_trace_rank_{rank}.json").write_text(json.dumps(document))
    return open_evidence([folder]).evidence()


def one_behind(sizes: Sequence[int] = (64, 64, 64, 64), operation: str = "all_to_all") -> list[list[Document]]:
    """Rank 0 does not return from an all-gather that rank 1 has finished. All have begun what comes after it."""
    told = []
    for rank, size in enumerate(sizes):
        gathers = [call(number, OF_RANK[rank], "_all_gather_base", done=rank != 0 or number < 7) for number in (6, 7)]
        told.append([*gathers, call(31, "70", operation, size, done=False)])
    return told


def hang_of(evidence: Evidence) -> Conclusion:
    conclusion = judge(evidence)
    return conclusion.if_hang or conclusion


@pytest.mark.parametrize(
    ("sizes", "operation"),
    [((64, 64, 64, 64), "all_to_all"), ((64, 31, 30, 57), "all_to_all"), ((64, 31, 31, 64), "all_reduce")],
    ids=["even", "uneven", "sizes that must not differ"],
)
def test_what_a_peer_has_finished_names_the_rank_that_has_not(
    tmp_path: Path, sizes: Sequence[int], operation: str
) -> None:
    evidence = evidence_of(tmp_path, one_behind(sizes, operation))
    found = judge(evidence)
    assert "rank 0 does not return from _all_gather_base number 7" in found.claim
    assert "rank 1 has finished" in found.claim
    assert found.look_first[0].rank == 0
    assert found.look_first[0].hit_rate is None
    assert (hang_of(evidence).hang_class, name_hang(evidence, found, read_library()).signature) == (None, None)


def test_the_stacks_of_newer_calls_do_not_hide_it(tmp_path: Path) -> None:
    """Pickles hold the stack of each call, and that of the newest one is where the rank is."""
    frames = [{"name": "all_to_all", "filename": "/venv/torch/distributed/distributed_c10d.py", "line": 3}]
    told = [[{**entry, "frames": frames, "thread_id": "7"} for entry in entries] for entries in one_behind()]
    found = judge(evidence_of(tmp_path, told))
    assert "rank 0 does not return from _all_gather_base number 7" in found.claim
    assert found.look_first[0].hit_rate is None, "no process was looked at"


def test_several_groups_are_named(tmp_path: Path) -> None:
    told = one_behind((64, 31, 30, 57))
    told[2] = [call(6, "41", "_all_gather_base"), call(7, "41", "_all_gather_base", done=False), told[2][-1]]
    found = judge(evidence_of(tmp_path, told))
    assert "rank 0 does not return" in found.claim and "rank 2 does not return" in found.claim
    assert [pointer.rank for pointer in found.look_first[:2]] == [0, 2]


def test_a_collective_with_a_root_may_be_left_early(tmp_path: Path) -> None:
    told = [[{**entry, "profiling_name": entry["profiling_name"].replace("_all_gather_base", "_broadcast_oop")}
             for entry in entries] for entries in one_behind()]  # fmt: skip
    assert "does not return from _broadcast_oop" not in judge(evidence_of(tmp_path, told)).claim


@pytest.mark.parametrize("operation", ["all_to_all", "all_gather", "reduce_scatter", "gather", "scatter"])
def test_sizes_that_may_differ_are_no_disagreement(tmp_path: Path, operation: str) -> None:
    told = [[call(30, "70", operation, size), call(31, "70", operation, size + 1, done=False)] for size in (3, 4, 5, 6)]
    assert hang_of(evidence_of(tmp_path, told)).hang_class is not HangClass.OPERATION_DIFFERS


@pytest.mark.parametrize("differed_before", [False, True])
def test_sizes_may_differ_if_collectives_with_other_sizes_have_ended(tmp_path: Path, differed_before: bool) -> None:
    """The operation is not known: what has ended in the same dumps tells."""
    before = (3, 3, 5, 5) if differed_before else (4, 4, 4, 4)
    told = [
        [call(30, "70", "all_reduce_sparse", size), call(31, "70", "all_reduce_sparse", newest, done=False)]
        for size, newest in zip(before, (7, 7, 9, 9), strict=True)
    ]
    disagree = hang_of(evidence_of(tmp_path, told)).hang_class is HangClass.OPERATION_DIFFERS
    assert disagree is not differed_before


@pytest.mark.parametrize(("lists", "words"), [(True, "coordinates: give"), (False, "which ranks form a group")])
def test_groups_that_dumps_list_are_not_missing(tmp_path: Path, lists: bool, words: str) -> None:
    missing = judge(evidence_of(tmp_path, one_behind(), lists)).missing
    assert any(words in line for line in missing)


@pytest.mark.parametrize("is_open", [False, True])
def test_messages_that_dumps_list_are_not_called_unlisted(tmp_path: Path, is_open: bool) -> None:
    message = call(0, "70", "recv 0<-1", is_p2p=True, done=not is_open)
    told = [[call(30, "70", "all_reduce"), *([message] if rank < 2 else [call(31, "70", "all_reduce", done=False)])]
            for rank in range(4)]  # fmt: skip
    found = judge(evidence_of(tmp_path, told))
    assert {pointer.rank for pointer in found.look_first[:2]} == {0, 1}
    assert not any("do not list" in line for line in found.missing)
    assert any(("list messages" if is_open else "neither") in line for line in found.missing)

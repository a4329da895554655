"""Reports of NCCL's RAS, as `ncclras -f json` prints them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.errors import EvidenceError
from bigsci_launch.spy.inputs.gather import open_evidence
from bigsci_launch.spy.judge.verdict import judge

RUNNING = {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False}


def member(rank: int, process: int, **counts: int) -> dict[str, Any]:
    """Rank `rank` of a communicator: process number `process` of the job, two to a host."""
    zero = dict.fromkeys(("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce"), 0)
    place = {"host": f"10.0.0.{process // 2 + 1}", "pid": 100 + process, "cuda_dev": process % 2}
    return {"rank": rank, **place, "nvml_dev": 0, "status": RUNNING, "collective_counts": {**zero, **counts}}


def missing(rank: int, process: int, *, dead: bool = False) -> dict[str, Any]:
    found = {key: value for key, value in member(rank, process).items() if key != "collective_counts"}
    return {**found, "status": {"unresponsive": True, "considered_dead": dead}}


def communicator(name: str, ranks: list[dict[str, Any]], gone: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    gone = gone or []
    return {
        "hash": name, "secondary_hash": "0x1:0x2", "size": len(ranks) + len(gone), "ranks_count": len(ranks),
        "missing_ranks_count": len(gone), "ranks": ranks, "missing_ranks": gone,
    }  # fmt: skip


def report(*communicators: dict[str, Any]) -> str:
    document = {"nccl_version": "2.28.9", "communicators": list(communicators), "ras": {"timeouts_count": 0}}
    return json.dumps(document, indent=2)


@pytest.mark.parametrize("culprit", [0, 2, 3])
def test_the_rank_that_is_behind_is_the_one_the_others_wait_for(tmp_path: Path, culprit: int) -> None:
    """Ranks of a communicator are numbered within it; the largest communicator gives the ranks of the job."""
    world = [member(rank, rank, AllReduce=8 if rank == culprit else 9, Broadcast=1) for rank in range(4)]
    groups = [communicator(f"0xb{host}", [member(each, 2 * host + each, AllReduce=30) for each in (0, 1)])
              for host in (0, 1)]  # fmt: skip
    (tmp_path / "ras.json").write_text(report(*groups, communicator("0xa", world)))
    evidence = open_evidence([tmp_path / "ras.json"]).evidence()
    assert [(seen.rank, seen.node, seen.pid) for seen in evidence.ranks][2] == (2, "10.0.0.2", 102)
    waiting = {seen.rank: seen.recorder.open_calls for seen in evidence.ranks if seen.recorder}
    assert waiting.pop(culprit) == ()
    assert {str(calls[0]) for calls in waiting.values()} == {"all_reduce number 10"}
    conclusion = judge(evidence)
    assert (conclusion.state.value, conclusion.suspects) == ("unknown", ()), "a report is one look"
    assert conclusion.if_hang is not None
    assert conclusion.look_first[0].rank == culprit


def test_nobody_is_behind_and_nobody_is_accused(tmp_path: Path) -> None:
    (tmp_path / "ras.json").write_text(
        report(communicator("0xa", [member(rank, rank, AllReduce=9) for rank in (0, 1)]))
    )
    evidence = open_evidence([tmp_path]).evidence()
    assert all(seen.recorder and not seen.recorder.open_calls for seen in evidence.ranks)
    assert judge(evidence).suspects == ()


def test_a_rank_that_does_not_answer_is_known_of(tmp_path: Path) -> None:
    ranks = [member(0, 0, AllReduce=4)]
    gone = [missing(1, 1), missing(2, 2, dead=True)]
    (tmp_path / "ras.json").write_text(report(communicator("0xa", ranks, gone)))
    evidence = open_evidence([tmp_path]).evidence()
    assert "does not answer" in (evidence.ranks[1].why_unreadable or "")
    assert "dead" in (evidence.ranks[2].why_unreadable or "")
    assert not any(seen.is_gone for seen in evidence.ranks), "a process that cannot be reached may live"
    assert [pointer.rank for pointer in judge(evidence).look_first] == [1, 2]


def test_the_comma_that_nccl_forgets(tmp_path: Path) -> None:
    text = report(communicator("0xa", [member(0, 0, AllReduce=4)], [missing(1, 1)]))
    torn = text.replace('"nvml_dev": 0,\n          "status": {\n            "unresponsive"',
                        '"nvml_dev": 0\n          "status": {\n            "unresponsive"')  # fmt: skip
    assert torn != text
    (tmp_path / "ras.json").write_text(torn)
    assert [seen.rank for seen in open_evidence([tmp_path]).evidence().ranks] == [0, 1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"communicators": [{}]}', "RAS, but damaged"),
        ('{"communicators": [', "JSON"),
        ('{"entries": ' * 100000, "JSON"),
        ('{"a": 1}\n{"a": 2}\n', "not evidence"),
        ('{"communicators": []}', "no rank"),
        ('{"something": "else"}', "not evidence"),
        ("", "not evidence"),
    ],
)
def test_other_and_damaged_documents(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "ras.json").write_text(text)
    with pytest.raises(EvidenceError, match=words) as caught:
        open_evidence([tmp_path / "ras.json"])
    assert caught.value.exit_code == 2


def test_a_bundle_stands_alone(tmp_path: Path) -> None:
    (tmp_path / "collection.json").write_text('{"schema_version": 1}')
    with pytest.raises(EvidenceError, match="together"):
        open_evidence([tmp_path, tmp_path])

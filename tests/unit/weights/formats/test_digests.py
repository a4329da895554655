"""Digests are written as documented, and compared with each other and with the tensors."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from bigsci_launch.file_names import digests_name
from bigsci_launch.topology import Topology
from bigsci_launch.weights.files.tensors import Place
from bigsci_launch.weights.formats.digests import digest_document, digest_entry, read_digests

TOPOLOGY = Topology(tp=2, pp=2, dp=2)
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}


def write(folder: Path, values: dict[int, dict[str, torch.Tensor]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for rank, tensors in values.items():
        entries = {
            name: digest_entry(DTYPES[value.dtype], value.shape, value.contiguous().view(torch.uint8).numpy().tobytes())
            for name, value in tensors.items()
        }
        document = digest_document(entries, rank=rank, coordinate=TOPOLOGY.coordinate(rank), step=20)
        (folder / digests_name(rank)).write_text(json.dumps(document))
    return folder


def model(seed: int = 0) -> dict[int, dict[str, torch.Tensor]]:
    return {
        rank: {
            "w": torch.randn(4, 6, generator=torch.Generator().manual_seed(seed + TOPOLOGY.coordinate(rank).tp_rank)),
            "norm.weight": torch.ones(8).bfloat16(),
        }
        for rank in range(8)
    }


def test_a_digest_is_xxh3_of_the_elements_bytes(tmp_path: Path) -> None:
    folder = write(tmp_path, model())
    document = json.loads((folder / "rank-0003.digests.json").read_text())
    assert document["tensors"]["norm.weight"] == ["BF16", [8], xxhash.xxh3_128(b"\x80\x3f" * 8).hexdigest()]
    assert (document["algorithm"], document["coordinate"]) == ("xxh3-128", {"pp": 0, "tp": 1, "dp": 1})
    found = read_digests(folder / "rank-0003.digests.json")
    assert (found.place, found.step, found.when) == (Place(pp=0, tp=1, dp=1), 20, "after")
    assert found.entries == document["tensors"]


def test_digests_find_the_rank_that_differs(tmp_path: Path, diff: Any) -> None:
    write(tmp_path / "a", model())
    changed = model()
    changed[5]["w"][0, 0] += 1e-6
    del changed[7]["norm.weight"]
    write(tmp_path / "b", changed)
    same = diff(tmp_path / "a", tmp_path / "a", "--json").document
    assert (same["equal"], same["compared"], same["bytes"]["read"]) == (True, 16, 0)
    document = diff(tmp_path / "a", tmp_path / "b", "--json").document
    found = {(entry["tensor"], entry["kind"], tuple(entry["coordinate"].values())) for entry in document["different"]}
    assert found == {("w", "value", (1, 1, 0)), ("norm.weight", "missing", (1, 1, 1))}
    assert (document["compared"], document["different"][0]["max_abs"]) == (15, None)
    rows = [line.split() for line in diff(tmp_path / "a", tmp_path / "b").text.splitlines()]
    for tensor, kind in (("w", "value"), ("norm.weight", "missing")):
        assert any(row[at : at + 2] == [tensor, kind] for row in rows for at in range(len(row))), rows


def test_digests_do_not_say_how_far_two_tensors_are_apart(tmp_path: Path, diff: Any, check_text: Any) -> None:
    write(tmp_path / "a", model())
    changed = model()
    for tensors in changed.values():
        tensors["w"] += 1e-3
    write(tmp_path / "b", changed)
    check_text(diff(tmp_path / "a", tmp_path / "b").text)


def test_shards_that_changed_places_show_in_digests(tmp_path: Path, diff: Any) -> None:
    write(tmp_path / "a", model())
    swapped = model()
    write(tmp_path / "b", {rank: swapped[rank ^ 1] for rank in range(8)})
    document = diff(tmp_path / "a", tmp_path / "b", "--json").document
    assert {entry["likely"] for entry in document["different"]} == {"permuted shards"}


def test_digests_against_the_dumps_they_stand_for(tmp_path: Path, diff: Any, save_arrays: Any) -> None:
    values = model()
    write(tmp_path / "a", values)
    for rank in range(8):
        at = {axis: str(index) for axis, index in TOPOLOGY.coordinate(rank).as_dict().items()}
        save_arrays(tmp_path / f"b/rank-{rank:04d}.safetensors", values[rank], at)
    assert diff(tmp_path / "a", tmp_path / "b").code == 0
    values[6]["w"][1, 1] += 1
    save_arrays(
        tmp_path / "b/rank-0006.safetensors",
        values[6],
        {axis: str(index) for axis, index in TOPOLOGY.coordinate(6).as_dict().items()},
    )
    (entry,) = diff(tmp_path / "a", tmp_path / "b", "--json").document["different"]
    assert entry["coordinate"] == TOPOLOGY.coordinate(6).as_dict()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "not a digest file"),
        ("[]", "not a digest file"),
        ('{"algorithm": "md5", "coordinate": {"pp": 0, "tp": 0, "dp": 0}, "tensors": {}}', "contains md5 digests"),
        (
            '{"algorithm": "xxh3-128", "coordinate": {"pp": 0, "tp": 0, "dp": 0}, "tensors": {"w": 5}}',
            "an entry is not",
        ),
    ],
)
def test_a_broken_file_of_digests_is_named(tmp_path: Path, diff: Any, content: str, why: str) -> None:
    write(tmp_path / "a", model())
    write(tmp_path / "b", model())
    (tmp_path / "b/rank-0002.digests.json").write_text(content)
    answer = diff(tmp_path / "a", tmp_path / "b")
    assert answer.code == 4
    assert f"rank-0002.digests.json: {why}" in answer.text


@pytest.mark.slow
def test_a_large_job_compares_in_a_second_of_cpu(tmp_path: Path, diff: Any) -> None:
    """384 ranks x 300 tensors a side. The bound is CPU time with room for a busy machine; the benchmark measures."""
    topology = Topology(tp=4, pp=12, dp=8)
    names = [f"{number}.mlp.dense_h_to_4h.weight" for number in range(300)]
    random = np.random.default_rng(0)
    for rank in range(384):
        tensors = {name: ["BF16", [3584, 14336], random.bytes(16).hex()] for name in names}
        for side in "ab":
            if side == "b" and rank == 200:
                tensors = {**tensors, names[7]: ["BF16", [3584, 14336], "00" * 16]}
            path = tmp_path / side / digests_name(rank)
            path.parent.mkdir(exist_ok=True)
            document = digest_document(tensors, rank=rank, coordinate=topology.coordinate(rank), step=20)
            path.write_text(json.dumps(document))
    began = time.process_time()
    document = diff(tmp_path / "a", tmp_path / "b", "--json").document
    assert time.process_time() - began < 2
    assert document["compared"] == 384 * 300
    assert [entry["coordinate"] for entry in document["different"]] == [topology.coordinate(200).as_dict()]


@pytest.mark.parametrize(
    "change, named",
    [
        ({"rank": 3}, "rank"),
        ({"coordinate": {"pp": 0, "tp": 0, "dp": 0}}, "coordinate"),
        ({"checked_by": "x"}, "checked_by"),
    ],
)
def test_another_rank_is_a_difference(change: Any, named: str, tmp_path: Path, diff: Callable[..., Any]) -> None:
    entries = {"w": digest_entry("F32", [1], b"abcd")}
    document, last = (digest_document(entries, rank=r, coordinate=TOPOLOGY.coordinate(r), step=20) for r in (2, 7))
    for side, held in (("a", document), ("b", {**document, **change})):
        (tmp_path / side).mkdir()
        (tmp_path / side / "rank-0002.digests.json").write_text(json.dumps(held))
        (tmp_path / side / "rank-0007.digests.json").write_text(json.dumps(last))
    answer = diff(tmp_path / "a", tmp_path / "b")
    assert answer.code == 1
    assert named in answer.text
    assert diff(tmp_path / "a", tmp_path / "a").code == 0


def test_an_unknown_schema_is_not_read(tmp_path: Path, diff: Callable[..., Any]) -> None:
    document = digest_document({}, rank=2, coordinate=TOPOLOGY.coordinate(2), step=20)
    (tmp_path / "rank-0002.digests.json").write_text(json.dumps({**document, "schema_version": 2}))
    answer = diff(tmp_path, tmp_path)
    assert answer.code == 4
    assert "schema version 2" in answer.text


@pytest.mark.parametrize("index", [-1, "0", None, True])
def test_an_impossible_coordinate_is_not_read(index: Any, tmp_path: Path, diff: Callable[..., Any]) -> None:
    document = digest_document({}, rank=2, coordinate=TOPOLOGY.coordinate(2), step=20)
    document["coordinate"]["dp"] = index
    (tmp_path / "rank-0002.digests.json").write_text(json.dumps(document))
    answer = diff(tmp_path, tmp_path)
    assert answer.code == 4
    assert "impossible coordinate" in answer.text

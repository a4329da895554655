"""The index of a sharded checkpoint is checked against its shards, and leads nowhere else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.texts import has_parts

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
Write = Callable[..., Path]


@pytest.fixture
def sharded(tmp_path: Path, save_arrays: Callable[..., Path]) -> Write:
    """Writes two shards with `v` and `w`, and an index of the given places and size."""

    def write(name: str, places: dict[str, Any] | None = None, size: Any = 48, index: str | None = None) -> Path:
        folder = tmp_path / name
        for shard, tensor, length in zip(SHARDS, ("v", "w"), (2, 4), strict=True):
            save_arrays(folder / shard, {tensor: np.zeros(length)})
        document = {"metadata": {"total_size": size}, "weight_map": places or {"v": SHARDS[0], "w": SHARDS[1]}}
        (folder / INDEX).write_text(index or json.dumps(document))
        return folder

    return write


def test_an_index_may_be_named_itself(sharded: Write, diff: Any) -> None:
    a, b = sharded("a"), sharded("b")
    assert diff(a / INDEX, b).code == diff(a / INDEX, b / INDEX).code == diff(a, b).code == 0
    (b / SHARDS[1]).unlink()
    answer = diff(a / INDEX, b / INDEX, "--json")
    (lost,) = answer.document["unreadable"]
    assert (answer.code, lost["file"], INDEX in lost["why"]) == (4, str(b / SHARDS[1]), True)


@pytest.mark.parametrize(
    "places",
    [
        {"v": SHARDS[1], "w": SHARDS[1]},
        {"v": SHARDS[1], "w": SHARDS[0]},
        {"v": SHARDS[0], "x": SHARDS[1], "w": SHARDS[1]},
        {"v": SHARDS[0], "x": SHARDS[1]},
    ],
    ids=["one elsewhere", "both swapped", "one too many", "another"],
)
def test_tensors_that_are_elsewhere_than_the_index_says_are_named(
    places: dict[str, str], sharded: Write, diff: Any, check_text: Any
) -> None:
    answer = diff(sharded("a"), sharded("b", places), "--json")
    assert answer.code == 4
    check_text(*sorted(f"{item['entry']}: {item['why']}" for item in answer.document["not_read"]))


def test_a_shard_that_the_index_does_not_list_is_named(sharded: Write, save_arrays: Any, diff: Any) -> None:
    a, b = sharded("a"), sharded("b")
    for folder in (a, b):
        save_arrays(folder / "model-00003-of-00003.safetensors", {"old": np.zeros(2)})
    answer = diff(a, b, "--json")
    assert answer.code == 4
    assert {Path(item["file"]).name for item in answer.document["unreadable"]} == {"model-00003-of-00003.safetensors"}
    places = {"v": SHARDS[0]}
    assert diff(sharded("c", places, 16), sharded("d", places, 16)).code == 4


def test_without_an_index_the_names_of_the_shards_count_them(sharded: Write, diff: Any) -> None:
    a, b = sharded("a"), sharded("b")
    for folder in (a, b):
        (folder / INDEX).unlink()
    assert diff(a, b).code == 0
    (b / SHARDS[0]).unlink()
    answer = diff(a, b, "--json")
    assert answer.code == 4
    assert {item["file"] for item in answer.document["unreadable"]} == {str(b / SHARDS[0])}


def test_a_stated_size_that_does_not_fit_is_noted(sharded: Write, diff: Any) -> None:
    answer = diff(sharded("a"), sharded("b", size=56), "--json")
    (note,) = answer.document["notes"]
    assert (answer.code, has_parts(note, INDEX, " 56 ", " 48")) == (0, True)


@pytest.mark.parametrize(
    "index",
    [
        "[]",
        "{}",
        "7",
        "no JSON",
        '{"weight_map": ["v"]}',
        '{"weight_map": {"v": 7}}',
        '{"weight_map": {"v": ["x"]}}',
        '{"weight_map": {"v": {"x": 1}}}',
        '{"weight_map": {"v": null}}',
        '{"weight_map": {"v": ""}}',
        '{"weight_map": {"v": "."}}',
        '{"weight_map": {"v": "../secret.safetensors"}}',
        '{"weight_map": {"v": "/etc/passwd"}}',
        '{"weight_map": {"v": "sub/model.safetensors"}}',
        '{"weight_map": {"v": "a\\u0000b"}}',
        '{"weight_map": {"v": SHARD", "v": "SHARD"}}',
        '{"weight_map": {}, "weight_map": {}}',
        '{"weight_map": ' * 50_000,
        "[" * 200_000,
        '{"weight_map": {"v": ' + "9" * 10_000 + "}}",
    ],
)
def test_a_hostile_index_is_one_line(index: str, sharded: Write, diff: Any, tmp_path: Path) -> None:
    (tmp_path / "secret.safetensors").write_bytes(b"not to be opened")
    good, bad = sharded("a"), sharded("b", index=index)
    answer = diff(good, bad, "--json")
    (unread,) = answer.document["unreadable"]
    assert (answer.code, unread["file"], len(unread["why"]) < 200) == (4, str(bad / INDEX), True)
    named = diff(good, bad / INDEX)
    assert (named.code, named.talk.startswith(f"error: {bad / INDEX}: {unread['why']}")) == (4, True)


def test_a_huge_index_is_not_parsed(sharded: Write, diff: Any) -> None:
    good, bad = sharded("a"), sharded("b")
    with (bad / INDEX).open("r+b") as stream:
        stream.truncate(200 << 20)
    answer = diff(good, bad)
    assert (answer.code, "larger than 20.0 MiB" in answer.text) == (4, True)

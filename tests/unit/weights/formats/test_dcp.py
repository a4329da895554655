"""Checkpoints of torch.distributed.checkpoint, written by torch itself or, box by box, with torch's own classes."""

from __future__ import annotations

import enum
import io
import itertools
import json
import pickle
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict import get_state_dict

pytestmark = pytest.mark.filterwarnings("ignore")
Box = tuple[tuple[int, ...], tuple[int, ...]]


def trained() -> dict[str, Any]:
    """The state of a tiny run: a model, its optimizer, and what else a trainer stores."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
    parameters, state = get_state_dict(model, optimizer)
    return {
        "model": parameters,
        "optimizer": state,
        "step": 2,
        "train_state": {"step": torch.tensor(2), "tokens": [7, 8], "name": "run"},
        "rng": torch.get_rng_state(),
        "buffer": io.BytesIO(b"opaque bytes"),
    }


def save(folder: Path, state: dict[str, Any], **options: Any) -> Path:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, sync_files=False, **options), no_dist=True)
    return folder


def write(folder: Path, tensors: dict[str, list[tuple[Box, Any]]], sizes: dict[str, Any] | None = None) -> Path:
    """Write tensors box by box, each box to the file of another rank."""
    folder.mkdir(parents=True)
    metadata = Metadata({}, {}, {}, None, "1.0.0")
    for name, boxes in tensors.items():
        ends = ([o + n for o, n in zip(*box, strict=True)] for box, _ in boxes)
        size = torch.Size((sizes or {}).get(name) or map(max, zip(*ends, strict=True)))
        chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape)) for (offsets, shape), _ in boxes]
        properties = TensorProperties.create_from_tensor(boxes[0][1])
        metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, size, chunks)
        for rank, ((offsets, _), value) in enumerate(boxes):
            with (folder / f"__{rank}_0.distcp").open("ab") as stream:
                begin = stream.tell()
                torch.save(value, stream)
                info = _StorageInfo(f"__{rank}_0.distcp", begin, stream.tell() - begin)
            metadata.storage_data[MetadataIndex(name, offsets)] = info
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def cut(value: Any, *counts: int) -> list[tuple[Box, Any]]:
    """Cut a tensor into a grid of boxes, like FSDP with tensor parallelism."""
    axes = []
    for size, count in zip(value.shape, counts, strict=True):
        part = -(-size // count)
        axes.append([(at, min(part, size - at)) for at in range(0, size, part)])
    found = []
    for box in itertools.product(*axes):
        piece = value[tuple(slice(at, at + n) for at, n in box)]
        found.append(((tuple(at for at, _ in box), tuple(n for _, n in box)), piece.clone()))
    return found


def edit(folder: Path, change: Callable[[Metadata], Any]) -> None:
    """Change the metadata of a checkpoint."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_metadata_that_names_enumerations_by_getattr_is_read(
    tmp_path: Path, diff: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So Python 3.11.2 pickles their members."""
    a = save(tmp_path / "a", trained())
    monkeypatch.setattr(enum.Enum, "__reduce_ex__", lambda member, _: (getattr, (type(member), member.name)))
    b = save(tmp_path / "b", trained())
    assert b"getattr" in (b / ".metadata").read_bytes()
    assert diff(a, b).code == 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"thread_count": 2},
        {"single_file_per_rank": False},
        {"serialization_format": SerializationFormat.SAFETENSORS},
    ],
    ids=["one file", "two threads", "a file for each entry", "safetensors"],
)
def test_a_state_is_equal_however_it_is_stored(tmp_path: Path, diff: Any, options: dict[str, Any]) -> None:
    a, b = save(tmp_path / "a", trained()), save(tmp_path / "b", trained(), **options)
    answer = diff(a, b)
    assert (answer.code, answer.text.count("\n")) == (0, 1)
    document = diff(a, b, "--json").document
    assert document["compared"] == len(list(trained()["model"])) * 4 + 2
    assert not document["notes"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s["model"]["0.weight"].view(-1)[13].mul_(1.5), "0.weight "),
        (lambda s: s["optimizer"]["state"]["2.weight"]["exp_avg"].view(-1)[1].add_(1), "2.weight exp_avg "),
        (lambda s: s["optimizer"]["state"]["2.weight"]["exp_avg_sq"].view(-1)[1].add_(1), "2.weight exp_avg_sq "),
        (lambda s: s["optimizer"]["state"]["0.bias"]["step"].add_(1), "optimizer.state.0.bias.step"),
        (
            lambda s: s["optimizer"]["param_groups"][0].update(lr=0.5),
            "optimizer.param_groups.0.lr: 0.01 in A, 0.5 in B",
        ),
        (lambda s: s.update(step=3), "step: 2 in A, 3 in B"),
        (lambda s: s["train_state"]["tokens"].append(9), "train_state.tokens.2: nothing in A, 9 in B"),
        (lambda s: s["rng"].view(-1)[7].bitwise_xor_(1), "rng"),
        (lambda s: s.update(buffer=io.BytesIO(b"opaque bytez")), "buffer"),
        (lambda s: s["model"].pop("0.bias"), "0.bias"),
    ],
)
def test_every_change_is_named(tmp_path: Path, diff: Any, change: Callable[[Any], Any], said: str) -> None:
    a = save(tmp_path / "a", trained())
    state = trained()
    change(state)
    answer = diff(a, save(tmp_path / "b", state))
    assert answer.code == 1
    assert said in answer.text


def test_a_sharded_state_is_equal_to_any_other_cutting_and_to_the_whole(tmp_path: Path, diff: Any) -> None:
    wide, cube, scalar = torch.randn(12, 10), torch.randn(4, 6, 5).bfloat16(), torch.tensor(3.0)
    state = {"model.w": wide, "model.c": cube, "optimizer.state.w.exp_avg": wide * 2, "optimizer.state.w.step": scalar}

    def sharded(name: str, two: tuple[int, int], three: tuple[int, int, int]) -> Path:
        shards = {key: cut(value, *{2: two, 3: three, 0: ()}[value.ndim]) for key, value in state.items()}
        folder = write(tmp_path / name, shards)
        edit(folder, lambda metadata: metadata.planner_data.update({key: tuple(key.split(".", 1)) for key in state}))
        return folder

    first = sharded("a", (4, 1), (2, 1, 1))
    for name, (two, three) in enumerate(
        [((1, 1), (1, 1, 1)), ((2, 2), (1, 3, 1)), ((1, 4), (2, 2, 2)), ((5, 3), (1, 1, 5))]
    ):
        answer = diff(first, sharded(f"b{name}", two, three), "--json")
        assert (answer.code, answer.document["compared"], answer.document["notes"]) == (0, 4, [])
    nested = {"model": {"w": wide, "c": cube}, "optimizer": {"state": {"w": {"exp_avg": wide * 2, "step": scalar}}}}
    torch.save(nested, tmp_path / "whole.pt")
    assert diff(sharded("c", (2, 2), (1, 3, 1)), tmp_path / "whole.pt").code == 0
    save_file({"w": wide, "c": cube}, tmp_path / "weights.safetensors")
    assert diff(tmp_path / "weights.safetensors", first).code == 0


def test_one_element_that_differs_is_named_by_its_index_in_the_whole(tmp_path: Path, diff: Any) -> None:
    whole = torch.randn(12, 10)
    changed = whole.clone()
    changed[7, 6] += 2
    a = write(tmp_path / "a", {"w": cut(whole, 4, 1), "v": cut(whole, 2, 2)})
    b = write(tmp_path / "b", {"w": cut(changed, 3, 2), "v": cut(changed, 1, 5)})
    document = diff(a, b, "--json").document
    assert [item["first_at"] for item in document["different"]] == [[7, 6], [7, 6]]
    assert "1 element at [7, 6]" in diff(a, b).text


def test_boxes_of_short_runs_are_one_error_without_numpy(tmp_path: Path, diff_without_numpy: Any) -> None:
    whole = torch.randn(12, 10)
    a, b = write(tmp_path / "a", {"w": cut(whole, 4, 1)}), write(tmp_path / "b", {"w": cut(whole, 1, 5)})
    answer = diff_without_numpy(a, b)
    assert answer.returncode == 1 and answer.stderr.startswith("error: ") and "numpy" in answer.stderr


def test_shards_in_safetensors_are_joined(tmp_path: Path, diff: Any) -> None:
    whole = {"w": torch.randn(12, 10), "b": torch.randn(12)}
    for side, counts in (("a", (4, 1)), ("b", (2, 2))):
        shards = {"w": cut(whole["w"], *counts), "b": cut(whole["b"], counts[0])}
        (tmp_path / side).mkdir()
        for index in range(4):
            held = {name: boxes[index] for name, boxes in shards.items() if index < len(boxes)}
            at = json.dumps({name: {"saved_offsets": box[0]} for name, (box, _) in held.items()})
            path = tmp_path / side / f"shard-{index + 1:05d}-model-00001-of-00001.safetensors"
            save_file(
                {name: value for name, (_, value) in held.items()}, path, {"DCP_SHARDING_INFO": at, "format": "pt"}
            )
    assert diff(tmp_path / "a", tmp_path / "b").code == 0
    save_file(whole, tmp_path / "whole.safetensors")
    assert diff(tmp_path / "a", tmp_path / "whole.safetensors").code == 0
    (tmp_path / "b" / "shard-00002-model-00001-of-00001.safetensors").unlink()
    answer = diff(tmp_path / "a", tmp_path / "b")
    assert (answer.code, "30 of its 120" in answer.text) == (4, True)


def test_ranks_that_save_without_coordination_are_read_together(tmp_path: Path, diff: Any) -> None:
    for side in "ab":
        whole = write(tmp_path / side, {"w": cut(torch.arange(24.0).reshape(6, 4), 2, 1)})
        for rank, part in enumerate(cut(torch.arange(24.0).reshape(6, 4), 2, 1)):
            alone = write(tmp_path / f"{side}{rank}", {"rng": [(((0,), (3,)), torch.full((3,), rank))], "w": [part]})
            edit(alone, lambda metadata: setattr(metadata.state_dict_metadata["w"], "size", torch.Size((6, 4))))
            edit(
                alone,
                lambda m, r=rank: [setattr(i, "relative_path", f"__{r}_0.distcp") for i in m.storage_data.values()],
            )
            (alone / ".metadata").rename(whole / f"__{rank}.metadata")
            (alone / "__0_0.distcp").rename(whole / f"__{rank}_0.distcp")
        (whole / ".metadata").unlink()
    document = diff(tmp_path / "a", tmp_path / "b", "--json").document
    assert (document["equal"], document["compared"]) == (True, 3)
    (tmp_path / "b" / "__1.metadata").write_bytes(b"\x80\x04N.")
    assert diff(tmp_path / "a", tmp_path / "b").code == 4


def change_first(name: str, value: Any) -> Callable[[Metadata], None]:
    """Return a change of where the first entry is."""
    return lambda metadata: setattr(next(iter(metadata.storage_data.values())), name, value)


WRONG: dict[str, Callable[[Metadata], object]] = {
    "a chunk is not listed": lambda m: m.state_dict_metadata["w"].chunks.pop(),
    "a chunk is nowhere": lambda m: m.storage_data.pop(MetadataIndex("w", (4, 0))),
    "a tensor is not described": lambda m: m.state_dict_metadata.pop("w"),
    "chunks overlap": lambda m: m.state_dict_metadata["w"].chunks.append(
        ChunkStorageMetadata(torch.Size((1, 0)), torch.Size((2, 5)))
    ),
    "larger": lambda m: setattr(m.state_dict_metadata["w"], "size", torch.Size((9, 10))),
    "smaller": lambda m: setattr(m.state_dict_metadata["w"], "size", torch.Size((7, 10))),
    "other dtype": lambda m: setattr(m.state_dict_metadata["w"].properties, "dtype", torch.int32),
    "transformed": change_first("transform_descriptors", ["zstd"]),
    "short": change_first("length", 20),
    "past the end": change_first("length", 10**9),
    "outside": change_first("relative_path", "../w"),
    "no such file": change_first("relative_path", "gone"),
    "before the file": change_first("offset", -1),
    "an object without a place": lambda m: m.state_dict_metadata.update(x=BytesStorageMetadata()),
    "a number for a description": lambda m: m.state_dict_metadata.update(x=7),
    "no places": lambda m: setattr(m, "storage_data", None),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_the_metadata_does_not_tell_right_is_never_equal(
    tmp_path: Path, diff: Any, check_text: Any, wrong: str
) -> None:
    for side in "ab":
        write(tmp_path / side, {"w": cut(torch.randn(8, 10), 2, 2), "v": cut(torch.zeros(3), 1)})
        edit(tmp_path / side, WRONG[wrong])
    answer = diff(tmp_path / "a", tmp_path / "b", "--json")
    assert (answer.code, answer.document["equal"]) == (4, False)
    lines = [f"not read: {e['entry']} ({e['type']}) in {e['file']}: {e['why']}" for e in answer.document["not_read"]]
    lines += [f"unreadable: {item['file']}: {item['why']}" for item in answer.document["unreadable"]]
    # How many bytes torch writes is its own choice.
    check_text(*(re.sub(r"(?<![\d,-])\d,?\d{3}(?![\d,])", "SIZE", line) for line in lines))


def test_a_checkpoint_without_metadata_is_one_line(tmp_path: Path, diff: Any) -> None:
    a = save(tmp_path / "a", trained())
    b = save(tmp_path / "b", trained())
    (b / ".metadata").unlink()
    answer = diff(a, b)
    assert answer.code == 4
    assert "b/.metadata: missing" in answer.text
    assert "missing in B" not in answer.text
    assert diff("--audit", b).code == 4


def test_a_missing_file_is_said_once(tmp_path: Path, diff: Any) -> None:
    for side in "ab":
        write(
            tmp_path / side, {name: cut(torch.ones(8, 10), 2, 1) for name in ("v", "w")} | {"u": cut(torch.ones(2), 1)}
        )
    (tmp_path / "b" / "__1_0.distcp").unlink()
    answer = diff(tmp_path / "a", tmp_path / "b", "--json")
    document = answer.document
    assert (answer.code, document["different"]) == (4, [])
    assert [item["file"] for item in document["unreadable"]] == [str(tmp_path / "b" / "__1_0.distcp")]
    assert {(item["entry"], item["type"]) for item in document["not_read"]} == {(n, "F32 [8, 10]") for n in "vw"}


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_file_of_a_checkpoint_stands_for_all_of_it(tmp_path: Path, diff: Any, name: str) -> None:
    a, b = save(tmp_path / "a", trained()), save(tmp_path / "b", trained())
    assert diff(a / name, b).code == 0


def test_no_flipped_bit_is_equal_unless_torch_reads_the_same(tmp_path: Path, diff: Any) -> None:
    state = {"w": torch.arange(6.0).reshape(2, 3), "step": 2, "lr": [0.5, "x"]}
    a, b = save(tmp_path / "a", state), save(tmp_path / "b", state)
    chance = random.Random(7)
    for name in (".metadata", "__0_0.distcp"):
        whole = (b / name).read_bytes()
        for at in chance.sample(range(len(whole)), 25):
            raw = bytearray(whole)
            raw[at] ^= 1 << chance.randrange(8)
            (b / name).write_bytes(raw)
            if diff(a, b).code == 0:
                assert read_by_torch(b) == read_by_torch(a), (name, at)
        (b / name).write_bytes(whole)


def read_by_torch(folder: Path) -> dict[str, Any]:
    state = {"w": torch.full((2, 3), -1.0), "step": -1, "lr": [-1.0, "-"]}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in state.items()}

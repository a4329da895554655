"""Random checkpoints in the containers that trainers write: one file, or a folder of several."""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save as pack_safetensors
from torch.distributed.checkpoint.api import CheckpointException
from weights_changes import Change, draw_change
from weights_resaved import resaved
from weights_sites import NoSuchChange, node_at
from weights_trees import Draw

ST_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
)
# The names of checkpoints that are one file, which is compared itself, not its folder.
ONE = ("a.pt", "a.safetensors", "a.npz")
TENSOR_KINDS = ("bit", "dtype, same bits", "shape, same elements")
ENTRY_KINDS = ("key renamed", "entry removed", "entry duplicated")
# Not content: which rank wrote a dump is what pairs it, digests of two moments may be compared, and an index is only
# checked against the files.
PLACE = ("pp", "tp", "dp")
NOT_CONTENT = ("step", "when", "coordinate")
TEXT_KINDS = ("character", "number", "key renamed", "entry removed", "entry duplicated")


class NotSaved(Exception):
    """The library does not save such a checkpoint."""


@dataclass(frozen=True)
class Pickled:
    """A file of `torch.save`. `is_flat`: its readers rely on contiguous tensors, so that it is saved with these."""

    tree: Any
    is_flat: bool = False

    def pack(self, path: Path, source: random.Random) -> None:
        is_zip = source.random() < 0.7
        try:
            torch.save(
                self.tree,
                path,
                pickle_protocol=source.choice((2, 2, 3, 4, 5)),
                _use_new_zipfile_serialization=is_zip,
            )
        except RuntimeError as error:
            if "view the same data as different types" not in str(error):
                raise
            raise NotSaved from error

    def again(self, source: random.Random) -> Pickled:
        return Pickled(resaved(self.tree, source, is_flat=self.is_flat), self.is_flat)

    def changed(self, source: random.Random) -> tuple[Change, Pickled]:
        change = draw_change(self.tree, source)
        return change, Pickled(change.tree, self.is_flat)


@dataclass(frozen=True)
class Flat:
    """A .safetensors file."""

    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str]

    def pack(self, path: Path, source: random.Random) -> None:
        names = source.sample(list(self.tensors), len(self.tensors))
        data = {str(name): self.tensors[name].contiguous().clone() for name in names}
        metadata = {str(key): text for key, text in self.metadata.items()}
        raw = pack_safetensors(data, metadata or None)
        # The library sorts entries by dtype and name; other writers do not.
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        shuffled = {key: header[key] for key in source.sample(list(header), len(header))}
        packed = json.dumps(shuffled, indent=source.choice((None, 1))).encode()
        packed += b" " * (-len(packed) % 8)
        path.write_bytes(len(packed).to_bytes(8, "little") + packed + raw[8 + length :])

    def again(self, source: random.Random) -> Flat:
        return self

    def changed(self, source: random.Random) -> tuple[Change, Flat]:
        if self.metadata and source.random() < 0.2:
            change = draw_change(self.metadata, source, TEXT_KINDS)
            is_other_place = any(self.metadata.get(key) != change.tree.get(key) for key in PLACE)
            if is_other_place or _content(self.metadata) == _content(change.tree):
                raise NoSuchChange
            return replace(change, kind=f"metadata: {change.kind}", is_local=False), replace(self, metadata=change.tree)
        while True:
            change = draw_change(self.tensors, source, (*TENSOR_KINDS, *ENTRY_KINDS))
            if all(tensor.dtype in ST_DTYPES for tensor in change.tree.values()):
                return change, replace(self, tensors=change.tree)


def _content(metadata: dict[str, str]) -> set[tuple[str, str]]:
    return {(key, text) for key, text in metadata.items() if key not in PLACE and (key, text) != ("format", "pt")}


@dataclass(frozen=True)
class Document:
    """A JSON file."""

    content: Any

    def pack(self, path: Path, source: random.Random) -> None:
        path.write_text(json.dumps(self.content, indent=source.choice((None, 2))))

    def again(self, source: random.Random) -> Document:
        return Document(resaved(self.content, source))

    def changed(self, source: random.Random) -> tuple[Change, Document]:
        change = draw_change(self.content, source, TEXT_KINDS)
        is_index = self.content.get("weight_map", 0) == change.tree.get("weight_map")
        if is_index or any(self.content.get(key) != change.tree.get(key) for key in NOT_CONTENT):
            raise NoSuchChange
        return replace(change, kind=f"JSON: {change.kind}", is_local=False), Document(change.tree)


@dataclass(frozen=True)
class Distributed:
    """A folder of torch.distributed.checkpoint, written by one process."""

    tree: Any

    def pack(self, path: Path, source: random.Random) -> None:
        writer = dcp.FileSystemWriter(
            path, single_file_per_rank=source.random() < 0.7, thread_count=source.choice((1, 2)), sync_files=False
        )
        try:
            dcp.save(self.tree, storage_writer=writer, no_dist=True)
        except CheckpointException as error:
            raise NotSaved from error

    def again(self, source: random.Random) -> Distributed:
        return Distributed(resaved(self.tree, source))

    def changed(self, source: random.Random) -> tuple[Change, Distributed]:
        change = draw_change(self.tree, source)
        # It saves leaves under dotted names; empty dictionaries and attributes of tensors are lost.
        held, other = dict(_leaves(self.tree)), dict(_leaves(change.tree))
        is_attribute = change.kind == "entry added" and isinstance(node_at(self.tree, change.path), torch.Tensor)
        if is_attribute or (held.keys() == other.keys() and all(held[name] is other[name] for name in held)):
            raise NoSuchChange
        return change, Distributed(change.tree)


def _leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    parts = tree.items() if isinstance(tree, dict) else enumerate(tree) if type(tree) is list and tree else None
    if parts is None:
        yield name, tree
    else:
        for key, part in parts:
            yield from _leaves(part, f"{name}.{key}")


@dataclass(frozen=True)
class Arrays:
    """An .npz file."""

    arrays: dict[str, Any]

    def pack(self, path: Path, source: random.Random) -> None:
        # Compressed arrays are not read, and what objects they contain is then not known.
        has_objects = any(array.dtype == object for array in self.arrays.values())
        save = np.savez_compressed if source.random() < 0.2 and not has_objects else np.savez
        save(path, **{str(name): self.arrays[name] for name in source.sample(list(self.arrays), len(self.arrays))})

    def again(self, source: random.Random) -> Arrays:
        return self

    def changed(self, source: random.Random) -> tuple[Change, Arrays]:
        change = draw_change(self.arrays, source, (*TENSOR_KINDS, *ENTRY_KINDS))
        return change, Arrays(change.tree)


Part = Pickled | Flat | Document | Distributed | Arrays
Files = dict[str, Part]


# Containers. Each draws the files of one checkpoint, by their paths in its folder.


def torch_file(draw: Draw) -> Files:
    return {ONE[0]: Pickled(draw.checkpoint())}


def flat_tensors(draw: Draw, names: tuple[str, ...] = ("w", "b", "a.b", "layers.0.w", "layers.1.w", "é", "0")) -> Any:
    chosen = draw.random.sample(names, draw.random.randrange(1, len(names)))
    return {name: draw.dense(ST_DTYPES) for name in chosen}


def safetensors_file(draw: Draw) -> Files:
    metadata = {key: draw.random.choice(("pt", "1", "ü")) for key in draw.random.sample(("format", "step", "note"), 2)}
    return {ONE[1]: Flat(flat_tensors(draw), metadata if draw.random.random() < 0.7 else {})}


def plain_folder(draw: Draw) -> Files:
    names = draw.random.sample(("f.pt", "b.bin", "c.pth", "d.ckpt", "e.safetensors"), 2)
    return {
        name: safetensors_file(draw)[ONE[1]] if name[0] == "e" else Pickled(Draw(draw.random, 8).checkpoint())
        for name in names
    }


def hugging_face(draw: Draw) -> Files:
    first = flat_tensors(draw, ("embed.w", "layers.0.w", "layers.0.b"))
    second = flat_tensors(draw, ("layers.1.w", "layers.1.b", "lm_head.w"))
    return shards([first, second])


def shards(parts: list[dict[str, torch.Tensor]]) -> Files:
    """Return the shards of a checkpoint with their index."""
    names = [f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors" for number in range(len(parts))]
    size = sum(tensor.numel() * tensor.dtype.itemsize for part in parts for tensor in part.values())
    weight_map = {key: name for name, part in zip(names, parts, strict=True) for key in part}
    index = Document({"metadata": {"total_size": size}, "weight_map": weight_map})
    held = {name: Flat(part, {"format": "pt"}) for name, part in zip(names, parts, strict=True)}
    return {**held, "model.safetensors.index.json": index}


def cut_otherwise(files: Files, source: random.Random) -> Files:
    """Return the same tensors in other files.

    Raises:
        NoSuchChange: this checkpoint has more than tensors, or files that have a meaning.
    """
    flats = [part for part in files.values() if isinstance(part, Flat)]
    others = [part for name, part in files.items() if not isinstance(part, Flat) and not name.endswith(".index.json")]
    if not flats or others or any("rank" in name for name in files) or any(_content(flat.metadata) for flat in flats):
        raise NoSuchChange
    tensors = {name: tensor for flat in flats for name, tensor in flat.tensors.items()}
    if source.random() < 0.3:
        return {ONE[0]: Pickled(tensors)}
    if source.random() < 0.3:
        return {ONE[1]: Flat(tensors, {})}
    names = source.sample(list(tensors), len(tensors))
    at = source.randrange(1, len(names)) if len(names) > 1 else 1
    return shards([{name: tensors[name] for name in part} for part in (names[:at], names[at:]) if part])


def trainer(draw: Draw) -> Files:
    """As transformers' Trainer saves."""
    small = Draw(draw.random, 4)
    states = {"python": draw.random.getstate(), "numpy": draw.state_of_generator(), "cpu": torch.get_rng_state()}
    return {
        "model.safetensors": Flat(flat_tensors(draw), {"format": "pt"}),
        "optimizer.pt": Pickled(draw.optimizer()),
        "scheduler.pt": Pickled({"base_lrs": [draw.number()], "last_epoch": 4, "_last_lr": [draw.number()]}),
        "rng_state.pth": Pickled(states),
        "training_args.bin": Pickled(small._object(1)),
        "trainer_state.json": Document({"global_step": 20, "log_history": [{"loss": 1.5, "step": 10}], "epoch": 0.1}),
    }


def rank_dumps(draw: Draw) -> Files:
    return {
        f"step-000020-after/rank-{tp:04d}.safetensors": Flat(
            flat_tensors(draw), {"pp": "0", "tp": str(tp), "dp": "0", "format": "pt"}
        )
        for tp in range(2)
    }


def digests(draw: Draw) -> Files:
    return {
        f"rank-{rank:04d}.digests.json": Document(
            {
                "schema_version": 1,
                "algorithm": "xxh3-128",
                "rank": rank,
                "coordinate": {"pp": 0, "tp": rank, "dp": 0},
                "step": 20,
                "when": "after",
                "tensors": {
                    name: ["F32", [4, draw.random.randrange(4)], f"{draw.random.getrandbits(128):032x}"]
                    for name in ("w", "b", "layers.0.w")
                },
            }
        )
        for rank in range(2)
    }


def universal(draw: Draw) -> Files:
    made: Files = {
        f"zero/{name}/{state}.pt": Pickled({"param": draw.floats((2, 2)), "cat_dim": 0})
        for name in ("1.up.weight", "tied_modules.embed.weight")
        for state in ("fp32", "exp_avg", "exp_avg_sq")
    }
    made["zero/1.up.weight/step.pt"] = Pickled(torch.tensor(20.0))
    made["zero/optimizer_state.pt"] = Pickled({"param_groups": [{"lr": draw.number()}]})
    made["mp_rank_00_model_states.pt"] = Pickled(
        {"global_steps": 20, "dp_world_size": 1, "lr_scheduler": draw.number()}
    )
    return made


def distributed(draw: Draw) -> Files:
    tree = {"model": flat_tensors(draw), "optimizer": draw.optimizer(), "step": draw.number(), "note": draw.text()}
    tree["more"] = draw.random.choice((draw.rare, draw.elements, draw.array, draw.dense))()
    return {"checkpoint": Distributed(tree)}


def npz(draw: Draw) -> Files:
    return {ONE[2]: Arrays({name: np.asarray(draw.array()) for name in draw.random.sample(("w", "b", "a.b", "é"), 3)})}


def deepspeed(draw: Draw) -> Files:
    """A pipeline checkpoint with ZeRO-1's shards, as the tests make it."""
    made = _tiny_module().TinyCheckpoint(tp=draw.random.choice((1, 2)), pp=1, dp=draw.random.choice((1, 2)))
    folder = Path(tempfile.mkdtemp())
    try:
        target = made.write(folder)
        return {file.name: Pickled(torch.load(file, weights_only=False), True) for file in sorted(target.iterdir())}
    finally:
        shutil.rmtree(folder)


@cache
def _tiny_module() -> Any:
    path = Path(__file__).parents[1] / "tests" / "unit" / "weights" / "conftest.py"
    spec = importlib.util.spec_from_file_location("weights_conftest", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["weights_conftest"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Container:
    """One kind of checkpoint; `share` is how often it is drawn, and `more` names a file that is added to it.

    A rank that is added is another topology, with which the same content may be equal.
    `has_keys`: entries are named by their keys, not by the files' names.
    """

    make: Callable[[Draw], Files]
    share: int
    more: str = ""
    has_keys: bool = True


CONTAINERS = {
    "torch file": Container(torch_file, 60),
    "safetensors": Container(safetensors_file, 12),
    "folder": Container(plain_folder, 6, "g.pt"),
    "hugging face": Container(hugging_face, 5, "model-00003-of-00002.safetensors"),
    "trainer": Container(trainer, 4, "other.pt"),
    "rank dumps": Container(rank_dumps, 4),
    "digests": Container(digests, 3),
    "universal": Container(universal, 3, "zero/2.up.weight/fp32.pt", has_keys=False),
    "npz": Container(npz, 4),
    "distributed": Container(distributed, 3),
    "deepspeed": Container(deepspeed, 3, "layer_07-model_00-model_states.pt", has_keys=False),
}


def draw_files(source: random.Random, only: str | None = None) -> tuple[str, Files]:
    """Return the name of a random container, and its files."""
    name = only or source.choices(list(CONTAINERS), [container.share for container in CONTAINERS.values()])[0]
    return name, CONTAINERS[name].make(Draw(source))


def write_files(folder: Path, files: Files, source: random.Random) -> Path:
    """Write a checkpoint, and return the path to compare: the only file, or the folder."""
    folder.mkdir()
    for name, part in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        part.pack(path, source)
    name = next(iter(files))
    return folder / name if name in ONE else folder


def again(files: Files, source: random.Random) -> Files:
    """Return the same checkpoint for saving it again."""
    return {name: files[name].again(source) for name in source.sample(list(files), len(files))}


def change_files(container: str, files: Files, source: random.Random) -> tuple[Change, Files]:
    """Return files with one random change inside one of them, or of the files themselves."""
    if len(files) > 1 and source.random() < 0.15:
        return _other_files(files, source, CONTAINERS[container].more)
    name = source.choice(list(files))
    change, part = files[name].changed(source)
    return replace(change, is_local=change.is_local and CONTAINERS[container].has_keys), {**files, name: part}


def _other_files(files: Files, source: random.Random, more: str) -> tuple[Change, Files]:
    name = source.choice([name for name in files if not name.endswith(".index.json")])
    kind = source.choice(("file removed", "file added")) if more else "file removed"
    if kind == "file removed":
        made = {other: part for other, part in files.items() if other != name}
    else:
        alike = [other for other in files if Path(other).suffix == Path(more).suffix]
        made = {**files, more: files[source.choice(alike)]} if alike else dict(files)
    if made.keys() == files.keys():
        raise NoSuchChange
    return Change(f"{kind}: {name if kind == 'file removed' else more}", (), made, False), made


def damage(path: Path, source: random.Random) -> str:
    """Cut a random file of a written checkpoint; return what was done."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    file = source.choice(files)
    size = file.stat().st_size
    length = source.choice((0, size - 1, source.randrange(size)))
    with file.open("r+b") as stream:
        stream.truncate(length)
    return f"{file.name} cut to {length} of {size} bytes"

"""Reads the metadata of torch.distributed.checkpoint: the boxes of each tensor, and where in which file they are.

It is in `.metadata`; or in `__0.metadata`, `__1.metadata`, ... if the ranks saved without a word to each other; or in
the headers of `shard-00001-model-00001-of-00001.safetensors`, ... The first two are pickles of `Metadata`, whose fields
have kept their names since torch 2.0:

    state_dict_metadata   name -> TensorStorageMetadata(properties, size, chunks), or BytesStorageMetadata()
    storage_data          MetadataIndex(fqn, offset) -> _StorageInfo(relative_path, offset, length)
    planner_data          name -> the path of keys that the name was joined from
"""

from __future__ import annotations

import functools
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from bigsci_launch.units import format_bytes
from bigsci_launch.weights.files.boxes import Numbers
from bigsci_launch.weights.files.json_text import BadJson, parse_json
from bigsci_launch.weights.files.mapped import MappedFile, UnreadableFile
from bigsci_launch.weights.files.sources import Unreadable
from bigsci_launch.weights.formats.safetensors_file import SafetensorsFile, read_safetensors
from bigsci_launch.weights.formats.torch_file import MAX_PICKLE_BYTES
from bigsci_launch.weights.formats.torch_objects import TORCH_DTYPES
from bigsci_launch.weights.objects.machine import MAX_OPERATIONS, PickleMachine
from bigsci_launch.weights.objects.nodes import BadPickle, Instance, Named, Outside
from bigsci_launch.weights.objects.texts import show

METADATA = ".metadata"
DATA = ".distcp"
# What Megatron-core writes next to it: the values that every rank has, and at the end, how the tensors are stored.
OF_MEGATRON, LAST_OF_MEGATRON = "common.pt", "metadata.json"
GET_LAYOUT = "torch.serialization._get_layout"
OF_RANK = re.compile(r"__(\d+)\.metadata")
SHARD = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")
# The text in a safetensors file's metadata that says where its tensors are in their wholes, and others of torch.
SHARDING = "DCP_SHARDING_INFO"
OF_TORCH = (SHARDING, "DCP_VERSION", "format")
MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
PATHS = [f"{module}.{kind}Path" for module in ("pathlib", "pathlib._local") for kind in ("Posix", "PurePosix")]
# The fields of each class. Those of `Metadata` may grow: other fields are compared as values.
FIELDS = {
    "Metadata": ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"),
    "MetadataIndex": ("fqn", "offset", "index"),
    "_StorageInfo": ("relative_path", "offset", "length", "transform_descriptors"),
    "TensorStorageMetadata": ("properties", "size", "chunks"),
    "ChunkStorageMetadata": ("offsets", "sizes"),
    "StorageMeta": ("checkpoint_id", "save_id", "load_id", "modules"),
}
# A checkpoint has one box for each tensor and rank, so its metadata grows with its data.
DATA_PER_OPERATION = 4096
# What Megatron-core adds to the metadata: which rank wrote what. Nothing of the state is in it.
PLANS = "all_local_plans"
PLAN_CLASSES = (
    "torch.distributed.checkpoint.planner.SavePlan",
    "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan",
)
WRITE_ITEM = "torch.distributed.checkpoint.planner.WriteItem"
PLAN_FIELDS = {"items", "storage_data", "planner_data", "usable"}
ITEM_FIELDS = {"index", "type", "bytes_io_data", "tensor_data"}
DATA_PER_BYTE = 64


@dataclass(frozen=True, slots=True)
class Item:
    """The bytes of one entry in a file; `transforms` name what was done to them, such as a compression."""

    path: Path
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ListedBox:
    """A box of a tensor, and where its elements are; None if no file has them."""

    offsets: Numbers
    shape: Numbers
    item: Item | None


@dataclass(frozen=True, slots=True)
class ListedTensor:
    """A tensor that the metadata lists; `keys` is its path in the state dict, `layout` usually `torch.strided`."""

    name: str
    keys: tuple[Any, ...]
    dtype: str
    layout: str
    shape: Numbers
    boxes: tuple[ListedBox, ...]


@dataclass(frozen=True, slots=True)
class ListedBytes:
    """An entry that is no tensor."""

    name: str
    keys: tuple[Any, ...]
    item: Item | None


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """What a checkpoint's metadata lists. `unlisted` are stored entries that no tensor has; `rest` other fields.

    `broken` are files of metadata that could not be read. Without coordination, several ranks list the same names.
    """

    path: Path
    tensors: tuple[ListedTensor, ...]
    blobs: tuple[ListedBytes, ...]
    unlisted: tuple[tuple[str, Item], ...]
    rest: Mapping[str, Any]
    broken: tuple[Unreadable, ...] = ()

    def items(self) -> Iterator[tuple[str, Item]]:
        """Yield every item that a file should have, with the name of its entry."""
        yield from ((tensor.name, box.item) for tensor in self.tensors for box in tensor.boxes if box.item is not None)
        yield from ((blob.name, blob.item) for blob in self.blobs if blob.item is not None)
        yield from self.unlisted


def is_dcp_name(name: str) -> bool:
    """Whether a file's name says that it is a part of a distributed checkpoint, which is read as a whole."""
    return name == METADATA or name.endswith(DATA) or bool(OF_RANK.fullmatch(name) or SHARD.fullmatch(name))


def read_dcp_metadata(folder: Path) -> DcpMetadata:
    """Read what the checkpoint in a folder says of itself.

    Raises:
        UnreadableFile: there is no metadata, or none that can be read.
    """
    files = {file.name: file for file in folder.iterdir() if file.is_file()}
    data_bytes = sum(file.stat().st_size for file in files.values())
    if METADATA in files:
        return _read(files[METADATA], data_bytes)
    of_ranks = sorted((int(match[1]), name) for name in files if (match := OF_RANK.fullmatch(name)))
    if of_ranks:
        return _joined(folder, [functools.partial(_read, files[name], data_bytes) for _, name in of_ranks])
    shards = sorted(name for name in files if SHARD.fullmatch(name))
    if shards:
        return _joined(folder, [functools.partial(_of_shard, files[name]) for name in shards])
    count = sum(name.endswith(DATA) for name in files)
    saved = f": the save of {'this file' if count == 1 else f'these {count} files'} was not finished" if count else ""
    raise UnreadableFile(folder / METADATA, f"missing{saved}")


def _joined(folder: Path, readers: Iterable[Callable[[], DcpMetadata]]) -> DcpMetadata:
    """Join the metadata of several ranks. A tensor has the boxes of all ranks, and is as large as they say together."""
    found, broken = [], []
    for read in readers:
        try:
            found.append(read())
        except UnreadableFile as error:
            broken.append(Unreadable(error.path, error.why))
    tensors: dict[str, list[ListedTensor]] = {}
    for tensor in (tensor for metadata in found for tensor in metadata.tensors):
        tensors.setdefault(tensor.name, []).append(tensor)
    return DcpMetadata(
        folder,
        tuple(map(_whole, tensors.values())),
        tuple(blob for metadata in found for blob in metadata.blobs),
        tuple(item for metadata in found for item in metadata.unlisted),
        {name: value for metadata in found for name, value in metadata.rest.items()},
        tuple(broken),
    )


def _whole(parts: Sequence[ListedTensor]) -> ListedTensor:
    first = parts[0]
    sizes = itertools.zip_longest(*(part.shape for part in parts), fillvalue=0)
    dtypes, layouts = dict.fromkeys(part.dtype for part in parts), dict.fromkeys(part.layout for part in parts)
    if len({len(part.shape) for part in parts}) > 1:
        layouts["shapes that differ"] = None
    boxes = tuple(box for part in parts for box in part.boxes)
    return ListedTensor(first.name, first.keys, "/".join(dtypes), "/".join(layouts), tuple(map(max, sizes)), boxes)


def _of_shard(path: Path) -> DcpMetadata:
    """Return what a shard's header lists. A tensor is at least as large as its last box says."""
    file = read_safetensors(path)
    offsets = saved_offsets(file)
    item = Item(path, 0, path.stat().st_size)
    tensors = []
    for name, entry in file.entries.items():
        at = offsets.get(name, (0,) * len(entry.shape))
        if len(at) != len(entry.shape):
            raise UnreadableFile(path, f"its {SHARDING} is damaged")
        shape = tuple(map(sum, zip(at, entry.shape, strict=True)))
        box = ListedBox(at, entry.shape, item)
        tensors.append(ListedTensor(name, (name,), entry.dtype, "torch.strided", shape, (box,)))
    rest = {f"{path.name}.{name}": text for name, text in file.metadata.items() if name not in OF_TORCH}
    return DcpMetadata(path, tuple(tensors), (), (), rest)


def saved_offsets(file: SafetensorsFile) -> Mapping[str, Numbers]:
    """Return where the tensors of a safetensors file are in their wholes, as far as its metadata says so.

    Raises:
        UnreadableFile: its metadata says so in another form than torch does.
    """
    text = file.metadata.get(SHARDING)
    if text is None:
        return {}
    try:
        listed = parse_json(text.encode())
        found = {name: tuple(map(operator.index, entry["saved_offsets"])) for name, entry in listed.items()}
    except (BadJson, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UnreadableFile(file.path, f"its {SHARDING} is damaged") from error
    if any(min(offsets, default=0) < 0 for offsets in found.values()):
        raise UnreadableFile(file.path, f"its {SHARDING} is damaged")
    return found


def _read(path: Path, data_bytes: int) -> DcpMetadata:
    """Read a `.metadata` file; `data_bytes` is the size of the files that it describes.

    Raises:
        UnreadableFile: it is missing or damaged, or lists something that no version of torch writes.
    """
    limit = max(MAX_PICKLE_BYTES, data_bytes // DATA_PER_BYTE)
    with MappedFile(path) as file:
        if len(file) > limit:
            raise UnreadableFile(path, f"{format_bytes(len(file))} are too much for {format_bytes(data_bytes)} of data")
        pickled = bytes(file.memory)
    machine = PickleMachine(pickled, _refer, max_operations=max(MAX_OPERATIONS, data_bytes // DATA_PER_OPERATION))
    try:
        tree = machine.run()
        if machine.end != len(pickled):
            raise BadPickle("bytes follow the end of its pickle")
        return _Parser(path).metadata(tree)
    except (BadPickle, _Strange) as error:
        raise UnreadableFile(path, str(error)) from error


def _refer(reference: Any) -> Any:
    return Outside(show(reference))


class _Strange(Exception):
    """The metadata is not what torch writes; the message says what is strange."""


class _Parser:
    def __init__(self, path: Path) -> None:
        self._path = path

    def metadata(self, tree: Any) -> DcpMetadata:
        fields = _fields(tree, "Metadata")
        storage = self._storage(_mapping(fields, "storage_data"))
        paths = fields.get("planner_data")
        keys = paths if isinstance(paths, dict) else {}
        tensors, blobs = [], []
        for name, entry in _mapping(fields, "state_dict_metadata").items():
            path = keys.get(name)
            found = path if isinstance(path, tuple) and all(isinstance(key, str | int) for key in path) else ()
            found = found or (name,)
            if not isinstance(name, str):
                raise _Strange(f"the name {show(name)} is not text")
            if _class_of(entry) == "BytesStorageMetadata":
                blobs.append(ListedBytes(name, found, storage.pop((name, None), None)))
            else:
                tensors.append(_tensor(name, found, entry, storage))
        _require_origin(fields.get("storage_meta"))
        known = (*FIELDS["Metadata"], *((PLANS,) if _are_plans(fields.get(PLANS)) else ()))
        rest = {f"{self._path.name}.{name}": value for name, value in fields.items() if name not in known}
        unlisted = tuple((name, item) for (name, _), item in storage.items())
        return DcpMetadata(self._path, tuple(tensors), tuple(blobs), unlisted, rest)

    def _storage(self, entries: Mapping[Any, Any]) -> dict[tuple[str, Numbers | None], Item]:
        found: dict[tuple[str, Numbers | None], Item] = {}
        for index, info in entries.items():
            at = _fields(index, "MetadataIndex")
            name, offset = at.get("fqn"), at.get("offset")
            if not isinstance(name, str):
                raise _Strange("the place of an entry has no name")
            key = (name, None if offset is None else _numbers(offset))
            if key in found:
                raise _Strange(f"the place of {name} is stated twice")
            found[key] = self._item(info)
        return found

    def _item(self, info: Any) -> Item:
        fields = _fields(info, "_StorageInfo")
        offset, length = _numbers((fields.get("offset"), fields.get("length")))
        name, transforms = fields.get("relative_path"), fields.get("transform_descriptors") or ()
        if not isinstance(name, str) or not name or "\0" in name or not isinstance(transforms, (list, tuple)):
            raise _Strange("the place of an entry names no file")
        relative = PurePosixPath(name)
        if relative.is_absolute() or ".." in relative.parts:
            raise _Strange(f"the place of an entry is outside the checkpoint: {show(name)}")
        return Item(self._path.parent / relative, offset, length, tuple(map(str, transforms)))


def _tensor(
    name: str, keys: tuple[Any, ...], entry: Any, storage: dict[tuple[str, Numbers | None], Item]
) -> ListedTensor:
    fields = _fields(entry, "TensorStorageMetadata")
    shape, chunks = _numbers(fields.get("size")), fields.get("chunks")
    dtype, layout = _properties(fields.get("properties"))
    if not isinstance(chunks, (list, tuple)):
        raise _Strange(f"{name} has no list of chunks")
    boxes: dict[tuple[Numbers, Numbers], ListedBox] = {}
    items: dict[Numbers, Item | None] = {}
    for chunk in chunks:
        box = _fields(chunk, "ChunkStorageMetadata")
        offsets, size = _numbers(box.get("offsets")), _numbers(box.get("sizes"))
        if len(offsets) != len(shape) or len(size) != len(shape):
            raise _Strange(f"a chunk of {name} has another number of dims")
        if offsets not in items:
            items[offsets] = storage.pop((name, offsets), None)
        boxes[offsets, size] = ListedBox(offsets, size, items[offsets])
    return ListedTensor(name, keys, dtype, layout, shape, tuple(boxes.values()))


def _require_origin(value: Any) -> None:
    """Require that the fields on the origin of a checkpoint, which are not compared, hold nothing else."""
    if value is None:
        return
    fields = _fields(value, "StorageMeta")
    where = fields.get("checkpoint_id")
    is_path = isinstance(where, Instance) and str(where.made_by) in PATHS and not where.states
    words = [fields.get("save_id"), fields.get("load_id"), *(fields.get("modules") or ())]
    if not (where is None or isinstance(where, str) or is_path) or not all(isinstance(w, str | None) for w in words):
        raise _Strange("its storage_meta is not what torch writes")


def _are_plans(value: Any) -> bool:
    """Whether a field lists nothing but the plans by which the ranks saved, which say where bytes are, not which."""
    return isinstance(value, list) and all(map(_is_plan, value))


def _is_plan(value: Any) -> bool:
    if (
        not isinstance(value, Instance)
        or str(value.made_by) not in PLAN_CLASSES
        or value.attributes.keys() - PLAN_FIELDS
    ):
        return False
    items = value.attributes.get("items")
    return isinstance(items, list) and all(
        isinstance(item, Instance) and str(item.made_by) == WRITE_ITEM and not item.attributes.keys() - ITEM_FIELDS
        for item in items
    )


def _properties(value: Any) -> tuple[str, str]:
    """Return the dtype and the layout. Properties set their state from a tuple that begins with these two."""
    states = value.states if isinstance(value, Instance) and _class_of(value) == "TensorProperties" else ()
    state = states[0] if len(states) == 1 and isinstance(states[0], tuple) and len(states[0]) == 5 else None
    if state is None or not isinstance(state[0], Named) or state[0].module != "torch":
        raise _Strange("the properties of a tensor have no dtype")
    _, layout, requires_grad, memory_format, pin_memory = state
    member = memory_format.made_by if isinstance(memory_format, Instance) else memory_format
    is_format = isinstance(member, Named) and member.name.partition(".")[0] == "_MEM_FORMAT_ENCODING"
    if not isinstance(requires_grad, bool) or not isinstance(pin_memory, bool) or not is_format:
        raise _Strange("the properties of a tensor are not what torch writes")
    is_called = isinstance(layout, Instance) and str(layout.made_by) == GET_LAYOUT and len(layout.args) == 1
    return TORCH_DTYPES.get(state[0].name, state[0].name), str(layout.args[0]) if is_called else show(layout)


def _fields(value: Any, name: str) -> Mapping[str, Any]:
    if _class_of(value) != name or not isinstance(value, Instance):
        raise _Strange(f"not the metadata of a distributed checkpoint ({show(value)} where {name} should be)")
    fields = value.attributes
    unknown = [] if name == "Metadata" else sorted(fields.keys() - set(FIELDS[name]))
    if unknown or not fields:
        raise _Strange(
            f"a {name} has {f'the field {show(unknown[0])}, which no reader knows' if unknown else 'no field'}"
        )
    return fields


def _class_of(value: Any) -> str:
    """Return the name of a class of the checkpoint package; empty for anything else."""
    if not isinstance(value, Instance) or value.args or value.kwargs or value.items or value.elements:
        return ""
    return value.made_by.name if value.made_by.module in MODULES else ""


def _mapping(fields: Mapping[str, Any], name: str) -> Mapping[Any, Any]:
    value = fields.get(name)
    if not isinstance(value, dict):
        raise _Strange(f"its {name} is missing")
    return value


def _numbers(value: Any) -> Numbers:
    if not isinstance(value, tuple) or not all(type(number) is int and number >= 0 for number in value):
        raise _Strange(f"{show(value)} where sizes or offsets should be")
    return value

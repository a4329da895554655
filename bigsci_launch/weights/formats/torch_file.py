"""Reads files of `torch.save` without torch, and without running any code that the pickle names.

Supports both containers: the zip of torch >= 1.6, and the older chain of pickles.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bigsci_launch.units import format_bytes
from bigsci_launch.weights.files.json_text import is_length, shown
from bigsci_launch.weights.files.mapped import MappedFile, UnreadableFile, os_reason
from bigsci_launch.weights.files.sources import Contents
from bigsci_launch.weights.files.tensors import (
    DTYPE_BYTES,
    MAX_DIMS,
    NotRead,
    Place,
    Segment,
    StoredTensor,
    StoredValue,
    TensorRole,
)
from bigsci_launch.weights.formats.inflate import Inflated, inflate, inflate_records
from bigsci_launch.weights.formats.torch_archives import (
    EXPORT_CONFIGS,
    EXPORT_FORMAT,
    SCRIPT_CONSTANTS,
    exported_tensors,
    with_constants,
)
from bigsci_launch.weights.formats.torch_objects import TorchObjects
from bigsci_launch.weights.formats.values import value_of
from bigsci_launch.weights.formats.zip_file import ZipRecord, read_zip
from bigsci_launch.weights.objects.encode import NotPlain
from bigsci_launch.weights.objects.flatten import Leaf, flatten
from bigsci_launch.weights.objects.machine import PickleMachine
from bigsci_launch.weights.objects.nodes import BadPickle, Outside, StorageNode, TensorNode

ZIP_MAGIC = b"PK\x03\x04"
# torch.save begins with the pickle, TorchScript with the first tensor if it has any.
FIRST_RECORD = re.compile(rb"[^/]+/data(?:\.pkl|/\d+)")
# The pickle of torch's magic number, 0x1950a86a20f9469cfc6c, in protocol 2; later protocols begin otherwise.
LEGACY_START = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
LEGACY_MAGIC = LEGACY_START[2:]
MAX_LEGACY_START = 11 + len(LEGACY_MAGIC)
# Records that say how the others are stored, or when they were.
BOOKKEEPING = (
    "version",
    "byteorder",
    ".format_version",
    ".storage_alignment",
    ".data/version",
    ".data/serialization_id",
    "archive_version",
    EXPORT_FORMAT,
)
# Bytes of an older file that no storage is known to have.
REST = "after the last storage"
# A tensor that `Tensor.expand` made refers to each element many times. Up to so many elements, it is read as it is.
MAX_REPEATED = 1 << 24
# Pickles of a checkpoint are small: names and shapes. Anything larger is not a checkpoint's pickle.
MAX_PICKLE_BYTES = 64 << 20
# Records other than storages, such as the version, are checked against their checksums if they are small.
SMALL_RECORD = 1024
PICKLES = ("data.pkl", SCRIPT_CONSTANTS)


@dataclass(frozen=True, slots=True)
class StorageRecord:
    """Where a storage's bytes are in the file, or in the temporary file `inflated`; `lost` is why they are nowhere.

    `crc` comes from the zip directory; None in legacy files, and if it was checked.
    """

    offset: int
    num_bytes: int
    crc: int | None = None
    inflated: MappedFile | None = None
    lost: str = ""


@dataclass(frozen=True, slots=True)
class OtherRecord:
    """A record of a zip that no object refers to, such as the code of a TorchScript module; `key` as of a storage.

    Without a `digest`, its bytes are compared where they are.
    """

    name: str
    key: str
    num_bytes: int
    digest: bytes | None = None


@dataclass(frozen=True, slots=True)
class TorchFile:
    """The contents of a file that torch wrote: the object, with a `TensorNode` for each tensor, and the storages.

    `others` are the records of its zip that are neither. `is_program`: it has a model's code too.
    """

    path: Path
    tree: Any
    records: Mapping[str, StorageRecord]
    others: tuple[OtherRecord, ...] = ()
    is_program: bool = False


def is_torch_start(start: bytes) -> bool:
    """Whether a file that begins with these bytes is one of `torch.save`."""
    if start.startswith(ZIP_MAGIC):
        name = start[30 : 30 + int.from_bytes(start[26:28], "little")]
        return FIRST_RECORD.fullmatch(name) is not None
    return start.startswith(LEGACY_START)


def read_torch_file(path: Path) -> TorchFile:
    """Parse a `torch.save` file. This takes about a millisecond and reads no tensor bytes.

    Raises:
        UnreadableFile: the file is missing, truncated or damaged, or torch did not write it.
    """
    with MappedFile(path) as file:
        return read_torch_slice(file, 0, len(file))


def read_torch_slice(file: MappedFile, start: int, length: int) -> TorchFile:
    """Parse the `torch.save` file that fills `length` bytes of a larger file from `start`.

    Raises:
        UnreadableFile: the file ends before it, or it is damaged, or torch did not write it.
    """
    if not 0 <= start <= start + length <= len(file):
        raise UnreadableFile(file.path, f"truncated: ends at byte {len(file):,} instead of {start + length:,}")
    head = bytes(file.memory[start : start + min(length, MAX_LEGACY_START)])
    try:
        if head.startswith(ZIP_MAGIC):
            return _read_zip(file, start, length)
        if head.startswith(b"\x80") and LEGACY_MAGIC in head:
            return _read_legacy(file, start + head.index(LEGACY_MAGIC) + len(LEGACY_MAGIC), start + length)
    except UnreadableFile:
        raise
    except OSError as error:
        raise UnreadableFile(file.path, os_reason(error)) from error
    except BadPickle as error:
        raise UnreadableFile(file.path, str(error)) from error
    except Exception as error:
        # A pickle of unknown origin can fail in any way, and must not stop the comparison of the other files.
        raise UnreadableFile(file.path, f"not a readable torch file ({type(error).__name__}: {error})") from error
    raise UnreadableFile(file.path, "not a torch.save file (neither a zip nor a legacy torch file)")


def _read_zip(file: MappedFile, start: int, length: int) -> TorchFile:
    records = read_zip(file, start, length)
    # torch names every record after the file, as in `model/data.pkl`.
    prefix = f"{next(iter(records), '').partition('/')[0]}/"
    named = {name.removeprefix(prefix): record for name, record in records.items()}
    if len({name.removeprefix("data/") for name in named}) < len(records):
        raise UnreadableFile(file.path, "two of its records could be meant by one name")
    if "data.pkl" not in named and EXPORT_FORMAT not in named:
        raise UnreadableFile(file.path, "a zip file, but torch did not write it (it has no data.pkl)")
    order = named.get("byteorder")
    if order is not None and inflate(file, order, MAX_PICKLE_BYTES) != b"little":
        raise UnreadableFile(file.path, "written on a big-endian machine, which is not read")
    tree, used = _read_exported(file, named) if "data.pkl" not in named else _read_pickles(file, named)
    for record in records.values():
        if record.num_bytes <= SMALL_RECORD and not record.name.startswith(f"{prefix}data/"):
            inflate(file, record, SMALL_RECORD)
    unused = {name: record for name, record in named.items() if name not in BOOKKEEPING and name not in used}
    others = tuple(_other_records(file, unused))
    in_memory = {*BOOKKEEPING, *PICKLES, *(other.name for other in others if other.digest is not None)}
    storages = {name: record for name, record in named.items() if name not in in_memory}
    # A zip inside a file is one of many, and no library compresses these.
    inflated = inflate_records(file, storages.values()) if length == len(file) else Inflated()
    places = {name.removeprefix("data/"): _storage_record(record, inflated) for name, record in named.items()}
    return TorchFile(file.path, tree, places, others, SCRIPT_CONSTANTS in named or EXPORT_FORMAT in named)


def _storage_record(record: ZipRecord, inflated: Inflated) -> StorageRecord:
    if not record.is_deflated:
        return StorageRecord(record.offset, record.num_bytes, record.crc)
    offset = inflated.offsets.get(record.name)
    if offset is None:
        return StorageRecord(0, record.num_bytes, lost=inflated.lost.get(record.name, "it is compressed"))
    return StorageRecord(offset, record.num_bytes, inflated=inflated.file)


def _read_pickles(file: MappedFile, named: Mapping[str, ZipRecord]) -> tuple[Any, set[str]]:
    objects, constants = TorchObjects(), TorchObjects("constants/")
    tree = _unpickle(file, named["data.pkl"], objects)
    used = {"data.pkl", *(f"data/{key}" for key in objects.keys)}
    if SCRIPT_CONSTANTS in named:
        tree = with_constants(tree, _unpickle(file, named[SCRIPT_CONSTANTS], constants))
        used |= {SCRIPT_CONSTANTS, *constants.keys}
    return tree, used


def _unpickle(file: MappedFile, record: ZipRecord, objects: TorchObjects) -> Any:
    return PickleMachine(inflate(file, record, MAX_PICKLE_BYTES), objects.refer, objects.make).run()


def _read_exported(file: MappedFile, named: Mapping[str, ZipRecord]) -> tuple[Any, set[str]]:
    configs = {
        name: inflate(file, record, MAX_PICKLE_BYTES)
        for name, record in named.items()
        if name.endswith(tuple(EXPORT_CONFIGS.values()))
    }
    tree = exported_tensors(configs)
    return tree, {f"data/{node.storage}" for node in tree.values()}


def _other_records(file: MappedFile, others: Mapping[str, ZipRecord]) -> Iterator[OtherRecord]:
    """Yield records that no object refers to, the small ones with their digest."""
    left = MAX_PICKLE_BYTES
    for name, record in others.items():
        key = name.removeprefix("data/")
        if record.num_bytes > left:
            yield OtherRecord(name, key, record.num_bytes)
            continue
        left -= record.num_bytes
        content = inflate(file, record, record.num_bytes)
        yield OtherRecord(name, key, record.num_bytes, hashlib.sha256(content).digest())


def _read_legacy(file: MappedFile, at: int, end: int) -> TorchFile:
    begin, data = at, bytes(file.memory[at : min(end, at + MAX_PICKLE_BYTES)])
    rebuilder, found = TorchObjects(), []
    for _ in range(4):
        machine = PickleMachine(data, rebuilder.refer, rebuilder.make, start=at - begin)
        found.append(machine.run())
        at = begin + machine.end
    _protocol, system, tree, keys = found
    if not isinstance(system, dict) or not isinstance(keys, list):
        raise UnreadableFile(file.path, "not a torch.save file (its list of storages is missing)")
    if system.get("little_endian") is False:
        raise UnreadableFile(file.path, "written on a big-endian machine, which is not read")
    records, at = _legacy_records(file, at, end, _storage_keys(file, keys), rebuilder.widths)
    if at == end:
        return TorchFile(file.path, tree, records)
    rest = OtherRecord(REST, REST, end - at)
    return TorchFile(file.path, tree, {**records, REST: StorageRecord(at, end - at)}, (rest,))


def _storage_keys(file: MappedFile, keys: list[Any]) -> list[str]:
    if not all(isinstance(key, str) or type(key) is int for key in keys) or len(set(keys)) < len(keys):
        raise UnreadableFile(file.path, "not a torch.save file (its list of storages is damaged)")
    return [str(key) for key in keys]


def _legacy_records(
    file: MappedFile, offset: int, end: int, keys: Sequence[str], widths: Mapping[str, int]
) -> tuple[dict[str, StorageRecord], int]:
    found: dict[str, StorageRecord] = {}
    for key in keys:
        if key not in widths:
            # Its length is unknown, so what follows cannot be found either.
            break
        if offset + 8 > end:
            raise UnreadableFile(file.path, f"truncated after {end:,} bytes: storage {shown(key)} is missing")
        (num_elements,) = struct.unpack_from("<q", file.memory, offset)
        num_bytes = num_elements * widths[key]
        offset += 8
        if num_elements < 0 or offset + num_bytes > end:
            raise UnreadableFile(
                file.path, f"truncated after {end:,} bytes: storage {shown(key)} extends past the end of the file"
            )
        found[key] = StorageRecord(offset, num_bytes)
        offset += num_bytes
    return found, offset


def walk_tensors(tree: Any, name: str = "") -> Iterator[tuple[str, TensorNode]]:
    """Yield a tree's tensors with their dotted names, in file order."""
    yield from ((entry.name, entry.node) for entry in flatten(tree, name) if isinstance(entry.node, TensorNode))


def entry_contents(file: TorchFile, entries: Iterable[tuple[Leaf, TensorRole]], place: Place) -> Contents:
    """Return every entry of a torch file as a tensor, a value, or one that is not read."""
    tensors, values, not_read = [], [], []
    for entry, role in entries:
        node = _whole_storage(file, entry.node) if isinstance(entry.node, StorageNode) else entry.node
        try:
            if isinstance(node, TensorNode):
                core = without_repeats(node)
                tensors.append(stored(file, entry.name, role, place, core))
                if core is not node:
                    values.append(value_of(f"{entry.name}.(expanded)", place, file.path, node.shape))
            else:
                values.append(_value(file, entry, place))
        except UnreadableFile as error:
            not_read.append(NotRead(entry.name, _type_text(node), file.path, error.why))
    for other in file.others:
        name = f"record {other.name}"
        if other.digest is not None:
            size = format_bytes(other.num_bytes)
            values.append(StoredValue(name, place, file.path, b"#" + other.digest, size))
            continue
        try:
            tensors.append(stored(file, name, "other", place, _whole_storage(file, StorageNode("U8", other.key))))
        except UnreadableFile as error:
            not_read.append(NotRead(name, "a record", file.path, error.why))
    return Contents(tuple(tensors), values=tuple(values), not_read=tuple(not_read))


def _type_text(node: Any) -> str:
    if isinstance(node, TensorNode):
        return f"{node.dtype} {shown(str(list(node.shape)))}"
    return "a reference" if isinstance(node, Outside) else type(node).__name__.lower()


def _whole_storage(file: TorchFile, node: StorageNode) -> TensorNode:
    record = file.records.get(node.key)
    length = record.num_bytes // DTYPE_BYTES[node.dtype] if record else 1
    return TensorNode(node.key, node.dtype, 0, (length,), (1,))


def _value(file: TorchFile, entry: Leaf, place: Place) -> StoredValue:
    if isinstance(entry.node, Outside):
        raise UnreadableFile(file.path, f"it is stored outside the file, at {entry.node.reference}")
    try:
        return value_of(entry.name, place, file.path, entry.node)
    except NotPlain as error:
        raise UnreadableFile(file.path, str(error)) from error


def stored(file: TorchFile, name: str, role: TensorRole, place: Place, node: TensorNode) -> StoredTensor:
    """Return a tensor of a torch file, with the location of its bytes.

    Raises:
        UnreadableFile: its storage is missing, or shorter than the tensor; or the tensor repeats its elements so often
            that they cannot all be read.
    """
    record = file.records.get(node.storage)
    width = DTYPE_BYTES[node.dtype]
    what = name or f"storage {node.storage}"
    if record is None:
        raise UnreadableFile(file.path, f"the storage of {what} is missing")
    if record.lost:
        raise UnreadableFile(file.path, record.lost)
    if len(node.shape) > MAX_DIMS:
        raise UnreadableFile(file.path, f"{what} has {len(node.shape):,} dimensions, more than {MAX_DIMS}")
    if len(node.shape) != len(node.strides) or not all(map(is_length, (node.offset, *node.shape, *node.strides))):
        raise UnreadableFile(file.path, f"the layout of {what} is impossible")
    span = _span(node)
    if (node.offset + span) * width > record.num_bytes:
        raise UnreadableFile(file.path, f"the storage of {what} is shorter than the tensor")
    if math.prod(node.shape) > max(span, MAX_REPEATED):
        raise UnreadableFile(file.path, f"{what} repeats its elements too often: {math.prod(node.shape):,} of {span:,}")
    segment = Segment(file.path, record.offset + node.offset * width, span * width, record.inflated)
    strides = None if _is_contiguous(node) else node.strides
    dtype, shape = node.dtype, node.shape
    if dtype == "F4_X2" and strides is None and shape:
        # Two numbers an element, as torch counts them; other formats count numbers.
        dtype, shape = "F4", (*shape[:-1], 2 * shape[-1])
    return StoredTensor(name, role, place, dtype, shape, (segment,), strides)


def _span(node: TensorNode) -> int:
    """Return the number of elements of the storage from a tensor's first element to its last."""
    if 0 in node.shape:
        return 0
    return 1 + sum((length - 1) * stride for length, stride in zip(node.shape, node.strides, strict=True))


def without_repeats(node: TensorNode) -> TensorNode:
    """Return a tensor without its dimensions' repetitions, if `Tensor.expand` made it far larger than its storage."""
    if len(node.shape) != len(node.strides) or math.prod(node.shape) <= MAX_REPEATED:
        return node
    shape = tuple(
        min(length, 1) if stride == 0 else length for length, stride in zip(node.shape, node.strides, strict=True)
    )
    return replace(node, shape=shape)


def _is_contiguous(node: TensorNode) -> bool:
    expected = 1
    for length, stride in zip(reversed(node.shape), reversed(node.strides), strict=True):
        if length != 1 and stride != expected:
            return 0 in node.shape
        expected *= length
    return True

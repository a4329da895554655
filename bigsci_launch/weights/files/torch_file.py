"""Reads files of `torch.save` without torch, and without running any code that the pickle names.

Supports both containers: the zip of torch >= 1.6, and the older chain of pickles. Except for the few classes that make
up a tensor, every class becomes an inert `Stub`, which keeps its state and does nothing.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from bigsci_launch.safe_pickle import SafeUnpickler
from bigsci_launch.weights.files.mapped import MappedFile
from bigsci_launch.weights.files.tensors import (
    DTYPE_BYTES,
    Place,
    Segment,
    StoredTensor,
    TensorRole,
    UnreadableFile,
    os_reason,
)

STORAGE_DTYPES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
    "ComplexFloatStorage": "C64",
    "ComplexDoubleStorage": "C128",
    "UntypedStorage": "U8",
}
TORCH_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
    "complex128": "C128",
}
PLAIN_BUILTINS = {"set": set, "frozenset": frozenset, "dict": dict, "list": list, "tuple": tuple, "complex": complex}
ZIP_MAGIC = b"PK\x03\x04"
# The pickle of torch's magic number, 0x1950a86a20f9469cfc6c.
LEGACY_START = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
# Pickles of a checkpoint are small: names and shapes. Anything larger is not a checkpoint's pickle.
MAX_PICKLE_BYTES = 1 << 30


class Stub:
    """Replaces an object whose class is not run: keeps the module, the name and the state."""

    module = ""
    name = ""
    state: Any = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Stub:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accept any arguments of the real class and discard them."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __call__(self, *args: Any, **kwargs: Any) -> Stub:
        return Stub()

    def __setitem__(self, key: Any, value: Any) -> None:
        """Drop an item of a foreign mapping."""

    def append(self, value: Any) -> None:
        """Drop an item of a foreign sequence."""

    def extend(self, values: Any) -> None:
        """Drop items of a foreign sequence."""

    def add(self, value: Any) -> None:
        """Drop an item of a foreign set."""


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str
    key: str


@dataclass(frozen=True, slots=True)
class _Dtype:
    name: str


@dataclass(frozen=True, slots=True)
class TensorNode:
    """A tensor inside a pickle: its storage, and its layout there (`offset` and `strides` in elements)."""

    storage: str
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StorageRecord:
    """Where a storage's bytes are in the file; `crc` comes from the zip directory, None in legacy files."""

    offset: int
    num_bytes: int
    crc: int | None = None


@dataclass(frozen=True, slots=True)
class TorchFile:
    """The contents of a `torch.save` file: the object, with a `TensorNode` for each tensor, and the storages."""

    path: Path
    tree: Any
    records: Mapping[str, StorageRecord]


@dataclass
class _HandedOut:
    """What one unpickling received: one stub class per foreign name, and bytes per element by storage (`widths`)."""

    stubs: dict[tuple[str, str], type[Stub]] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)

    def find(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in REBUILDERS:
            rebuild = REBUILDERS[name]
            return lambda *args: rebuild(*args)  # a new function each time, because the pickle may set attributes on it
        if module in ("torch", "torch.storage", "torch.cuda") and name in STORAGE_DTYPES:
            return _Storage(STORAGE_DTYPES[name], "")
        if module == "torch" and name in TORCH_DTYPES:
            return _Dtype(TORCH_DTYPES[name])
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module in ("builtins", "__builtin__") and name in PLAIN_BUILTINS:
            return PLAIN_BUILTINS[name]
        return self._stub(module, name)

    def _stub(self, module: str, name: str) -> type[Stub]:
        key = (module, name)
        if key not in self.stubs:
            self.stubs[key] = type(name.rpartition(".")[2], (Stub,), {"module": module, "name": name})
        return self.stubs[key]

    def load(self, reference: Any) -> Any:
        # ("storage", storage class, key, device, number of elements[, view]) in both containers.
        is_storage = isinstance(reference, tuple) and len(reference) >= 5 and reference[0] == "storage"
        if is_storage and isinstance(reference[1], _Storage):
            dtype, key = reference[1].dtype, str(reference[2])
            self.widths[key] = DTYPE_BYTES[dtype]
            return _Storage(dtype, key)
        return Stub()


def _rebuild(storage: Any, offset: int, shape: Any, strides: Any, *rest: Any) -> Any:
    if not isinstance(storage, _Storage):
        return Stub()
    return TensorNode(storage.key, storage.dtype, int(offset), tuple(shape), tuple(strides))


def _rebuild_with_dtype(storage: Any, offset: int, shape: Any, strides: Any, *rest: Any) -> Any:
    dtypes = [value.name for value in rest if isinstance(value, _Dtype)]
    if not isinstance(storage, _Storage) or not dtypes:
        return Stub()
    return TensorNode(storage.key, dtypes[0], int(offset), tuple(shape), tuple(strides))


def _first(tensor: Any, *rest: Any) -> Any:
    return tensor


REBUILDERS: dict[str, Callable[..., Any]] = {
    "_rebuild_tensor": _rebuild,
    "_rebuild_tensor_v2": _rebuild,
    "_rebuild_tensor_v3": _rebuild_with_dtype,
    "_rebuild_parameter": _first,
    "_rebuild_parameter_with_state": _first,
}


def _unpickle(stream: IO[bytes], handed_out: _HandedOut | None = None) -> Any:
    """Return the next object from a stream of pickles."""
    handed_out = handed_out or _HandedOut()
    return SafeUnpickler(stream, handed_out.find, handed_out.load).load()


def read_torch_file(path: Path) -> TorchFile:
    """Parse a `torch.save` file. This takes about a millisecond and reads no tensor bytes.

    Raises:
        UnreadableFile: the file is missing, truncated or compressed, or torch did not write it.
    """
    with MappedFile(path) as file:
        start = bytes(file.memory[: len(LEGACY_START)])
        try:
            if start.startswith(ZIP_MAGIC):
                return _read_zip(file)
            if start == LEGACY_START:
                return _read_legacy(file)
        except UnreadableFile:
            raise
        except OSError as error:
            raise UnreadableFile(path, os_reason(error)) from error
        except zipfile.BadZipFile as error:
            raise UnreadableFile(path, f"truncated after {len(file):,} bytes: the zip directory is missing") from error
        except Exception as error:
            # A pickle of unknown origin can fail in any way, and must not stop the comparison of the other files.
            raise UnreadableFile(path, f"not a readable torch file ({type(error).__name__}: {error})") from error
    raise UnreadableFile(path, "not a torch.save file (neither a zip nor a legacy torch file)")


def _read_zip(file: MappedFile) -> TorchFile:
    with file.path.open("rb") as stream, zipfile.ZipFile(stream) as archive:
        records = {info.filename.partition("/")[2]: _zip_record(file, info) for info in archive.infolist()}
    if "data.pkl" not in records:
        raise UnreadableFile(file.path, "a zip file, but torch.save did not write it (it has no data.pkl)")
    if "byteorder" in records and _bytes(file, records["byteorder"]) == b"big":
        raise UnreadableFile(file.path, "written on a big-endian machine, which is not read")
    tree = _unpickle(io.BytesIO(_bytes(file, records["data.pkl"])))
    storages = {name[5:]: record for name, record in records.items() if name.startswith("data/")}
    return TorchFile(file.path, tree, storages)


def _bytes(file: MappedFile, record: StorageRecord) -> bytes:
    return bytes(file.memory[record.offset : record.offset + min(record.num_bytes, MAX_PICKLE_BYTES)])


def _zip_record(file: MappedFile, info: zipfile.ZipInfo) -> StorageRecord:
    if info.compress_type != zipfile.ZIP_STORED:
        raise UnreadableFile(file.path, f"record {info.filename} is compressed, which torch.save never does")
    name_length, extra_length = struct.unpack_from("<HH", file.memory, info.header_offset + 26)
    offset = info.header_offset + 30 + name_length + extra_length
    if offset + info.file_size > len(file):
        raise UnreadableFile(file.path, f"truncated: record {info.filename} extends past the end of the file")
    return StorageRecord(offset, info.file_size, info.CRC)


def _read_legacy(file: MappedFile) -> TorchFile:
    with file.path.open("rb") as stream:
        stream.seek(len(LEGACY_START))
        _unpickle(stream)  # protocol version
        if _unpickle(stream).get("little_endian") is False:
            raise UnreadableFile(file.path, "written on a big-endian machine, which is not read")
        handed_out = _HandedOut()
        tree, keys = _unpickle(stream, handed_out), _unpickle(stream)
        return TorchFile(file.path, tree, dict(_legacy_records(file, stream.tell(), keys, handed_out.widths)))


def _legacy_records(
    file: MappedFile, offset: int, keys: list[Any], widths: Mapping[str, int]
) -> Iterator[tuple[str, StorageRecord]]:
    for key in map(str, keys):
        if offset + 8 > len(file):
            raise UnreadableFile(file.path, f"truncated after {len(file):,} bytes: storage {key} is missing")
        (num_elements,) = struct.unpack_from("<q", file.memory, offset)
        num_bytes = num_elements * widths.get(key, 1)
        offset += 8
        if num_elements < 0 or offset + num_bytes > len(file):
            raise UnreadableFile(
                file.path, f"truncated after {len(file):,} bytes: storage {key} extends past the end of the file"
            )
        yield key, StorageRecord(offset, num_bytes)
        offset += num_bytes


def walk_tensors(tree: Any, prefix: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, TensorNode]]:
    """Yield a tree's tensors with their dotted paths, in file order. A container that appears twice is visited once."""
    seen = set() if seen is None else seen
    if isinstance(tree, TensorNode):
        yield prefix, tree
        return
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    if not items or id(tree) in seen:
        return
    seen.add(id(tree))
    for key, value in items:
        yield from walk_tensors(value, f"{prefix}.{key}" if prefix else str(key), seen)


def stored(file: TorchFile, name: str, role: TensorRole, place: Place, node: TensorNode) -> StoredTensor:
    """Return a tensor of a torch file, with the location of its bytes.

    Raises:
        UnreadableFile: its storage is missing, or shorter than the tensor.
    """
    record = file.records.get(node.storage)
    width = DTYPE_BYTES[node.dtype]
    if record is None:
        raise UnreadableFile(file.path, f"the storage of {name or node.storage} is missing")
    span = 1 + sum((length - 1) * stride for length, stride in zip(node.shape, node.strides, strict=True))
    if 0 in node.shape:
        span = 0
    if node.offset < 0 or min(node.strides, default=0) < 0 or (node.offset + span) * width > record.num_bytes:
        raise UnreadableFile(file.path, f"the storage of {name or node.storage} is shorter than the tensor")
    segment = Segment(file.path, record.offset + node.offset * width, span * width)
    strides = None if _is_contiguous(node) else node.strides
    return StoredTensor(name, role, place, node.dtype, node.shape, (segment,), strides)


def _is_contiguous(node: TensorNode) -> bool:
    expected = 1
    for length, stride in zip(reversed(node.shape), reversed(node.strides), strict=True):
        if length != 1 and stride != expected:
            return 0 in node.shape
        expected *= length
    return True

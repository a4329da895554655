"""Headers of safetensors files: names, dtypes, shapes and byte offsets. Standard library only."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigsci_launch.weights.files.mapped import MappedFile
from bigsci_launch.weights.files.tensors import Segment, UnreadableFile, has_numbers, stored_bytes

# The limit that the format itself sets.
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    segment: Segment


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """The header: tensors in file order, and the free-text metadata."""

    path: Path
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]


def read_safetensors(path: Path) -> SafetensorsFile:
    """Parse the header of a safetensors file, without reading any tensor bytes.

    Raises:
        UnreadableFile: the file is missing or truncated, or is not a safetensors file.
    """
    with MappedFile(path) as file:
        header, start = _header(file)
        size = len(file)
    metadata = header.pop("__metadata__", {})
    try:
        entries = {name: _entry(path, start, size, value) for name, value in header.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise UnreadableFile(path, f"broken safetensors header ({error})") from error
    return SafetensorsFile(path, entries, metadata if isinstance(metadata, dict) else {})


def _header(file: MappedFile) -> tuple[dict[str, Any], int]:
    if len(file) < 8:
        raise UnreadableFile(file.path, f"not a safetensors file ({len(file)} bytes)")
    (length,) = struct.unpack_from("<Q", file.memory, 0)
    if length > MAX_HEADER_BYTES:
        raise UnreadableFile(file.path, f"not a safetensors file (its header would have {length:,} bytes)")
    if 8 + length > len(file):
        raise UnreadableFile(file.path, f"truncated inside the header, after {len(file):,} bytes")
    try:
        header = json.loads(file.memory[8 : 8 + length])
    except ValueError as error:
        raise UnreadableFile(file.path, "not a safetensors file (its header is not JSON)") from error
    if not isinstance(header, dict):
        raise UnreadableFile(file.path, "not a safetensors file (its header is not an object)")
    return header, 8 + length


def _entry(path: Path, start: int, size: int, value: Mapping[str, Any]) -> Entry:
    dtype, shape = str(value["dtype"]), tuple(int(length) for length in value["shape"])
    first, last = (int(offset) for offset in value["data_offsets"])
    if not has_numbers(dtype):
        shape = _shape_in_bytes(dtype, shape, last - first)
    if first < 0 or last - first != stored_bytes(dtype, math.prod(shape)):
        raise ValueError(f"{last - first} bytes for {dtype} {list(shape)}")
    if start + last > size:
        raise UnreadableFile(path, f"truncated: its header promises {start + last:,} bytes, but the file has {size:,}")
    return Entry(dtype, shape, Segment(path, start + first, last - first))


def _shape_in_bytes(dtype: str, shape: tuple[int, ...], num_bytes: int) -> tuple[int, ...]:
    """Return the shape of a tensor of unknown dtype in bytes: with the width of an element as its last dimension."""
    width, rest = divmod(num_bytes, max(1, math.prod(shape)))
    if rest:
        raise ValueError(f"elements of the unknown dtype {dtype} share bytes")
    return (*shape, width)

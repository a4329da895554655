"""Headers of safetensors files: names, dtypes, shapes and byte offsets. Standard library only.

A header is held to all that the format demands: no key twice, and tensors that fill the rest of the file, each byte
exactly once. The library itself refuses any other file.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigsci_launch.units import format_bytes
from bigsci_launch.weights.files.json_text import BadJson, is_length, parse_json, shown
from bigsci_launch.weights.files.mapped import MappedFile, UnreadableFile
from bigsci_launch.weights.files.sources import Contents, Source
from bigsci_launch.weights.files.tensors import (
    MAX_DIMS,
    PLACE_AXES,
    Place,
    Segment,
    StoredTensor,
    has_numbers,
    stored_bytes,
)
from bigsci_launch.weights.formats.values import value_of

# The format allows 100 MB. 100,000 tensors need 15 MB.
MAX_HEADER_BYTES = 20 << 20
# Metadata that every library for torch writes, or none.
USUAL = ("format", "pt")
KEYS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    segment: Segment


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """The header: tensors in file order, and the free-text metadata."""

    path: Path
    entries: Mapping[str, HeaderEntry]
    metadata: Mapping[str, str]


def read_safetensors(path: Path) -> SafetensorsFile:
    """Parse the header of a safetensors file, without reading any tensor bytes.

    Raises:
        UnreadableFile: the file is missing or truncated, or is not a safetensors file.
    """
    with MappedFile(path) as file:
        return read_safetensors_slice(file, 0)


def read_safetensors_slice(file: MappedFile, begin: int) -> SafetensorsFile:
    """Parse the header of the safetensors file that fills the rest of a larger file from byte `begin`.

    Raises:
        UnreadableFile: it is truncated, or is not a safetensors file.
    """
    path, size = file.path, len(file)
    header, start = _header(file, begin)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(type(text) is str for text in metadata.values()):
        raise UnreadableFile(path, "broken safetensors header (its metadata is not text)")
    entries = {name: _entry(path, start, name, value) for name, value in header.items()}
    _require_filled(path, start, size, [entry.segment for entry in entries.values()])
    return SafetensorsFile(path, entries, metadata)


def _header(file: MappedFile, begin: int) -> tuple[dict[str, Any], int]:
    """Return the header that begins at a byte of the file, and the byte at which it ends."""
    if len(file) < begin + 8:
        raise UnreadableFile(file.path, f"not a safetensors file ({len(file) - begin} bytes)")
    (length,) = struct.unpack_from("<Q", file.memory, begin)
    begin, end = begin + 8, begin + 8 + length
    if end > len(file):
        is_plausible = length <= 100_000_000 and file.memory[begin : begin + 1] == b"{"
        told = "truncated inside the header, after" if is_plausible else "not a safetensors file: its header ends after"
        raise UnreadableFile(file.path, f"{told} {len(file):,} bytes")
    if length > MAX_HEADER_BYTES:
        raise UnreadableFile(file.path, f"its header is larger than {format_bytes(MAX_HEADER_BYTES)}")
    if file.memory[begin : begin + 1] != b"{":
        raise UnreadableFile(file.path, "not a safetensors file (its header is not an object)")
    try:
        header = parse_json(file.memory[begin:end])
    except BadJson as error:
        raise UnreadableFile(file.path, f"not a safetensors file (its header {error})") from error
    return dict(header), end


def _entry(path: Path, start: int, name: str, value: Any) -> HeaderEntry:
    if not isinstance(value, dict) or value.keys() != KEYS:
        raise _broken(path, name, "it must have exactly a dtype, a shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not _are_lengths(shape) or len(shape) > MAX_DIMS:
        raise _broken(path, name, "it has an impossible shape")
    if not _are_lengths(offsets) or len(offsets) != 2:
        raise _broken(path, name, "it has impossible data_offsets")
    if type(dtype) is not str or not dtype.isidentifier():
        raise _broken(path, name, "it has an impossible dtype")
    first, last = offsets
    if not has_numbers(dtype):
        shape = _shape_in_bytes(path, name, dtype, shape, last - first)
    if last - first != stored_bytes(dtype, math.prod(shape)):
        raise _broken(path, name, f"{last - first:,} bytes for {dtype} {shown(str(shape))}")
    return HeaderEntry(dtype, tuple(shape), Segment(path, start + first, last - first))


def _shape_in_bytes(path: Path, name: str, dtype: str, shape: list[int], num_bytes: int) -> list[int]:
    """Return the shape of a tensor of unknown dtype in bytes: with the width of an element as its last dimension."""
    width, rest = divmod(num_bytes, max(1, math.prod(shape)))
    if rest:
        raise _broken(path, name, f"elements of the unknown dtype {shown(dtype)} share bytes")
    return [*shape, width]


def _are_lengths(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_length, value))


def _broken(path: Path, name: str, why: str) -> UnreadableFile:
    return UnreadableFile(path, f"broken safetensors header: {shown(name)}: {why}")


def _require_filled(path: Path, start: int, size: int, segments: Iterable[Segment]) -> None:
    """Require that the tensors fill the file from `start` to its end.

    Raises:
        UnreadableFile: two tensors overlap, there is a hole between two, or the file ends elsewhere.
    """
    ordered = sorted(segments, key=lambda segment: (segment.offset, segment.num_bytes))
    ends = itertools.chain([start], (segment.offset + segment.num_bytes for segment in ordered))
    for segment, end in zip(ordered, ends, strict=False):
        if segment.offset != end:
            what = "two tensors overlap" if segment.offset < end else "bytes between two tensors belong to none"
            raise UnreadableFile(path, f"broken safetensors header: {what}")
    last = ordered[-1].offset + ordered[-1].num_bytes if ordered else start
    if last > size:
        raise UnreadableFile(path, f"truncated: its header promises {last:,} bytes, but the file has {size:,}")
    if last < size:
        raise UnreadableFile(path, f"broken: {size - last:,} bytes follow its last tensor")


def read_tensors(source: Source) -> Contents:
    """Return the tensors of a file, and its metadata as values."""
    file = read_safetensors(source.path)
    place = stated_place(file.metadata, source)
    tensors = (
        StoredTensor(name, "weight", place, entry.dtype, entry.shape, (entry.segment,))
        for name, entry in file.entries.items()
    )
    values = (
        value_of(f"__metadata__.{key}", place, source.path, text)
        for key, text in file.metadata.items()
        if (key, text) != USUAL and not (key in PLACE_AXES and _is_index(str(text)))
    )
    return Contents(tuple(tensors), values=tuple(values))


def stated_place(metadata: Mapping[str, str], source: Source) -> Place:
    axes = {axis: str(metadata.get(axis, "")) for axis in PLACE_AXES}
    if source.format == "dump" and (wrong := [text for text in axes.values() if text and not _is_index(text)]):
        raise UnreadableFile(source.path, f"states an impossible coordinate ({wrong[0]!r})")
    stated = Place(**{axis: int(text) if _is_index(text) else None for axis, text in axes.items()})
    return stated if stated.is_known else source.place


def _is_index(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10

"""Digests of weights: 16 bytes per tensor, written by a trainer at any step, compared in milliseconds.

`rank-0003.digests.json`, one file per rank:

    {"schema_version": 1, "algorithm": "xxh3-128", "rank": 3, "coordinate": {"pp": 0, "tp": 1, "dp": 1},
     "step": 20, "when": "after", "tensors": {"1.mlp.up.weight": ["BF16", [512, 128], "9c0e..."], ...}}

A digest covers the elements' bytes in row-major order, little-endian, so it can be compared with any file that
contains the tensor itself.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bigsci_launch.errors import BslError
from bigsci_launch.topology import Coordinate
from bigsci_launch.weights.files.mapped import FilePool
from bigsci_launch.weights.files.tensors import (
    DTYPE_BYTES,
    PLACE_AXES,
    Place,
    Segment,
    StoredTensor,
    StoredValue,
    UnreadableFile,
    os_reason,
)
from bigsci_launch.weights.formats.values import value_of

ALGORITHM = "xxh3-128"
SCHEMA_VERSION = 1
# What is compared otherwise (the entries), or may differ between two moments of one run.
NOT_COMPARED = ("schema_version", "algorithm", "step", "when", "tensors")
# The key that precedes the entries in a file.
ENTRIES = b'"tensors"'
HASH_ELEMENTS = 4 << 20


@dataclass(frozen=True, slots=True)
class DigestFile:
    """One rank's digests; `entries[name]` is `[dtype, shape, digest]`, as in the file. `others` are its other keys."""

    path: Path
    place: Place
    step: int | None
    when: str | None
    entries: Mapping[str, Sequence[Any]]
    others: Mapping[str, Any] = field(default_factory=dict)


def digest_bytes(data: bytes | memoryview) -> str:
    """Return the digest of a tensor's elements, given as bytes."""
    digest: str = _hasher()(data).hexdigest()
    return digest


def digest_entry(dtype: str, shape: Sequence[int], data: bytes | memoryview) -> list[Any]:
    """Return a document's entry for one tensor; `dtype` is named as in safetensors, `data` has its elements."""
    return [dtype, list(shape), digest_bytes(data)]


def digest_document(
    entries: Mapping[str, Sequence[Any]], *, rank: int, coordinate: Coordinate, step: int
) -> dict[str, Any]:
    """Return the document of one rank after `step`; `entries` maps each tensor's name to its entry."""
    return {
        "schema_version": SCHEMA_VERSION,
        "algorithm": ALGORITHM,
        "rank": rank,
        "coordinate": coordinate.as_dict(),
        "step": step,
        "when": "after",
        "tensors": dict(entries),
    }


def _hasher() -> Any:
    try:
        from xxhash import xxh3_128
    except ModuleNotFoundError as error:
        raise BslError(
            "digests need xxhash, which is not installed", hint="pip install 'bigsci-launch[weights]'"
        ) from error
    return xxh3_128


def read_digests(path: Path) -> DigestFile:
    """Read the digests of one rank.

    Raises:
        UnreadableFile: the file is missing, is not JSON, or uses another algorithm.
    """
    return _parse(path, _bytes_of(path))


def read_two_digests(a: Path, b: Path) -> tuple[DigestFile, DigestFile]:
    """Read the digests of one rank on both sides. If the text of the entries is identical, it is parsed once.

    Raises:
        UnreadableFile: as in `read_digests`.
    """
    raw_a, raw_b = _bytes_of(a), _bytes_of(b)
    left = _parse(a, raw_a)
    head, key, entries = raw_b.partition(ENTRIES)
    if key and entries == raw_a.partition(ENTRIES)[2]:
        with contextlib.suppress(UnreadableFile):  # other keys follow the entries: parse the whole text
            return left, replace(_parse(b, head + ENTRIES + b": {}}"), entries=left.entries)
    return left, _parse(b, raw_b)


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UnreadableFile(path, os_reason(error)) from error


def _parse(path: Path, raw: bytes) -> DigestFile:
    try:
        document = json.loads(raw)
        algorithm, coordinate, entries = document["algorithm"], document["coordinate"], document["tensors"]
        place = Place(pp=coordinate["pp"], tp=coordinate["tp"], dp=coordinate["dp"])
    except (ValueError, KeyError, TypeError) as error:
        raise UnreadableFile(path, f"not a digest file ({type(error).__name__}: {error})") from error
    if not all(type(coordinate[axis]) is int and coordinate[axis] >= 0 for axis in PLACE_AXES):
        raise UnreadableFile(path, f"states an impossible coordinate ({coordinate})")
    if algorithm != ALGORITHM:
        raise UnreadableFile(path, f"contains {algorithm} digests; only {ALGORITHM} is supported")
    if not isinstance(entries, dict) or not _are_entries(entries.values()):
        raise UnreadableFile(path, "an entry is not [dtype, shape, digest]")
    version = document.get("schema_version")
    if version != SCHEMA_VERSION:
        raise UnreadableFile(path, f"has schema version {version}; only {SCHEMA_VERSION} is supported")
    others = {key: value for key, value in document.items() if key not in NOT_COMPARED}
    return DigestFile(path, place, document.get("step"), document.get("when"), entries, others)


def _are_entries(entries: Iterable[Any]) -> bool:
    return all(
        type(entry) is list and len(entry) == 3 and entry[0] in DTYPE_BYTES and type(entry[1]) is list
        for entry in entries
    )


def digest_tensor(file: DigestFile, name: str) -> StoredTensor:
    """Return one entry as a tensor without bytes."""
    dtype, shape, digest = file.entries[name]
    nowhere = (Segment(file.path, 0, 0),)
    return StoredTensor(name, "weight", file.place, dtype, tuple(shape), nowhere, digest=digest)


def digest_values(file: DigestFile) -> tuple[StoredValue, ...]:
    """Return what a file says besides its entries: its rank and coordinate."""
    return tuple(value_of(key, file.place, file.path, value) for key, value in file.others.items())


def digest_of(tensor: StoredTensor, files: FilePool) -> str:
    """Return a tensor's digest: the stored one if there is one, otherwise computed from its bytes.

    Raises:
        BslError: the digest must be computed, and xxhash is not installed.
    """
    if tensor.digest is not None:
        return tensor.digest
    hasher = _hasher()()
    if tensor.strides is None and not tensor.chunks:
        for segment in tensor.segments:
            memory = memoryview(files.get(segment.path).memory)
            hasher.update(memory[segment.offset : segment.offset + segment.num_bytes])
    else:
        from bigsci_launch.weights.files.elements import read_elements

        for start in range(0, tensor.num_elements, HASH_ELEMENTS):
            stop = min(start + HASH_ELEMENTS, tensor.num_elements)
            hasher.update(read_elements(tensor, start, stop, files).tobytes())
    digest: str = hasher.hexdigest()
    return digest

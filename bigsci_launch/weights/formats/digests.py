"""Digests of weights: 16 bytes per tensor, written by a trainer at any step, compared in milliseconds.

`rank-0003.digests.json`, one file per rank:

    {"schema_version": 1, "algorithm": "xxh3-128", "rank": 3, "coordinate": {"pp": 0, "tp": 1, "dp": 1},
     "step": 20, "when": "after", "tensors": {"1.mlp.up.weight": ["BF16", [512, 128], "9c0e..."], ...}}

A digest covers the elements' bytes in row-major order, little-endian, so it can be compared with any file that
contains the tensor itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import Any

from bigsci_launch.errors import INSTALL_WEIGHTS, BslError
from bigsci_launch.topology import Coordinate
from bigsci_launch.weights.files.json_text import BadJson, is_length, parse_json, shown
from bigsci_launch.weights.files.mapped import UnreadableFile, read_small_file
from bigsci_launch.weights.files.pool import FilePool
from bigsci_launch.weights.files.sources import Contents, Source
from bigsci_launch.weights.files.tensors import MAX_DIMS, PLACE_AXES, Place, Segment, StoredTensor, StoredValue
from bigsci_launch.weights.formats.values import value_of

ALGORITHM = "xxh3-128"
SCHEMA_VERSION = 1
# What is compared otherwise (the entries), or may differ between two moments of one run.
NOT_COMPARED = ("schema_version", "algorithm", "step", "when", "tensors")
# The key that precedes the entries in a file.
ENTRIES = b'"tensors"'
HASH_ELEMENTS = 4 << 20
DIGEST = re.compile(r"[0-9a-f]{32}")
# 200,000 tensors.
MAX_DIGEST_FILE = 20 << 20


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
        raise BslError("digests need xxhash, which is not installed", hint=INSTALL_WEIGHTS) from error
    return xxh3_128


def read_digests(path: Path) -> DigestFile:
    """Read the digests of one rank.

    Raises:
        UnreadableFile: the file is missing, is not JSON, or uses another algorithm.
    """
    return _parse(path, read_small_file(path, MAX_DIGEST_FILE))


def read_two_digests(a: Path, b: Path) -> tuple[DigestFile, DigestFile]:
    """Read the digests of one rank on both sides. If the text of the entries is identical, it is parsed once.

    Raises:
        UnreadableFile: as in `read_digests`.
    """
    raw_a, raw_b = (read_small_file(path, MAX_DIGEST_FILE) for path in (a, b))
    left = _parse(a, raw_a)
    (head_a, _, entries_a), (head_b, key, entries_b) = raw_a.partition(ENTRIES), raw_b.partition(ENTRIES)
    if not key or entries_a != entries_b:
        return left, _parse(b, raw_b)
    try:
        alone, right = (_parse(path, head + ENTRIES + b": {}}") for path, head in ((a, head_a), (b, head_b)))
    except UnreadableFile:  # other keys follow the entries
        return left, _parse(b, raw_b)
    if replace(alone, entries=left.entries) != left:
        return left, _parse(b, raw_b)
    return left, replace(right, entries=left.entries)


def _parse(path: Path, raw: bytes) -> DigestFile:
    try:
        document = parse_json(raw)
    except BadJson as error:
        raise UnreadableFile(path, f"not a digest file (it {error})") from error
    if not isinstance(document, dict):
        raise UnreadableFile(path, "not a digest file (it is not an object)")
    algorithm, entries = document.get("algorithm"), document.get("tensors")
    if algorithm != ALGORITHM:
        raise UnreadableFile(path, f"contains {shown(algorithm)} digests; only {ALGORITHM} is supported")
    place = _place(path, document.get("coordinate"))
    step, when = document.get("step"), document.get("when")
    if not isinstance(entries, dict) or not all(map(_is_entry, entries.values())):
        raise UnreadableFile(path, "an entry is not [dtype, shape, digest]")
    if type(step) not in (int, NoneType) or type(when) not in (str, NoneType):
        raise UnreadableFile(path, "states an impossible step")
    version = document.get("schema_version")
    if version != SCHEMA_VERSION:
        raise UnreadableFile(path, f"has schema version {shown(version)}; only {SCHEMA_VERSION} is supported")
    others = {key: value for key, value in document.items() if key not in NOT_COMPARED}
    return DigestFile(path, place, step, when, entries, others)


def _place(path: Path, coordinate: Any) -> Place:
    indices = {axis: coordinate.get(axis) for axis in PLACE_AXES} if isinstance(coordinate, dict) else {}
    if len(indices) < len(PLACE_AXES) or not all(map(is_length, indices.values())):
        raise UnreadableFile(path, f"states an impossible coordinate ({shown(coordinate)})")
    return Place(**indices)


def _is_entry(entry: Any) -> bool:
    if type(entry) is not list or len(entry) != 3:
        return False
    dtype, shape, digest = entry
    return (
        (type(dtype) is str and dtype.isidentifier())
        and (type(shape) is list and len(shape) <= MAX_DIMS and all(map(is_length, shape)))
        and (type(digest) is str and DIGEST.fullmatch(digest) is not None)
    )


def digest_tensor(file: DigestFile, name: str) -> StoredTensor:
    """Return one entry as a tensor without bytes."""
    dtype, shape, digest = file.entries[name]
    nowhere = (Segment(file.path, 0, 0),)
    return StoredTensor(name, "weight", file.place, dtype, tuple(shape), nowhere, digest=digest)


def read_digest_tensors(source: Source) -> Contents:
    """Return the tensors of a file of digests, without bytes."""
    file = read_digests(source.path)
    return Contents(tuple(digest_tensor(file, name) for name in file.entries))


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
            memory = memoryview(files.with_bytes(segment).memory)
            hasher.update(memory[segment.offset : segment.offset + segment.num_bytes])
    else:
        from bigsci_launch.weights.files.elements import read_elements

        for start in range(0, tensor.num_elements, HASH_ELEMENTS):
            stop = min(start + HASH_ELEMENTS, tensor.num_elements)
            hasher.update(read_elements(tensor, start, stop, files).tobytes())
    digest: str = hasher.hexdigest()
    return digest

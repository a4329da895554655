"""Indexes as Hugging Face writes them (`model.safetensors.index.json`): which shard has which tensor."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigsci_launch.weights.files.json_text import BadJson, parse_json, shown
from bigsci_launch.weights.files.mapped import UnreadableFile, open_file, read_small_file
from bigsci_launch.weights.files.sources import ShardIndex, Unreadable

# model.safetensors.index.json; with a variant: diffusion_pytorch_model.safetensors.index.fp16.json.
INDEX = re.compile(r".+\.index(?:\.[\w-]+)?\.json")
SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.\w+)")
MAX_INDEX_BYTES = 20 << 20


def is_index_name(name: str) -> bool:
    """Whether a file is called as the index of a sharded checkpoint."""
    return INDEX.fullmatch(name) is not None


def read_index(path: Path) -> ShardIndex:
    """Read an index. Every file that it names is one next to it, by name; whether they exist is not checked.

    Raises:
        UnreadableFile: the file cannot be read, or is not such an index.
    """
    try:
        document = parse_json(read_small_file(path, MAX_INDEX_BYTES))
    except BadJson as error:
        raise UnreadableFile(path, f"not a shard index (it {error})") from error
    places = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(places, dict):
        raise UnreadableFile(path, "not a shard index (it has no weight_map)")
    for name, file in places.items():
        if not isinstance(file, str) or file in ("", ".", "..") or "/" in file or "\0" in file:
            why = f"for {shown(name)} it names {shown(file)}, no file next to it"
            raise UnreadableFile(path, f"not a shard index ({why})")
    shards: dict[str, set[str]] = {}
    for name, file in places.items():
        shards.setdefault(file, set()).add(name)
    return ShardIndex(path, places, shards, _total_size(document.get("metadata")))


def _total_size(metadata: Any) -> int | None:
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return int(size) if isinstance(size, (int, float)) and 0 <= size < 1 << 63 else None


@dataclass(frozen=True, slots=True)
class Sharding:
    """What the indexes of a folder say: the index that lists each shard, faults, and notes.

    `astray` are shards that no index lists although there is one: they are no part of the checkpoint.
    """

    lists: Mapping[Path, ShardIndex]
    astray: frozenset[Path]
    broken: tuple[Unreadable, ...]
    notes: tuple[str, ...]


def check_shards(indexes: Sequence[Path], files: Sequence[Path]) -> Sharding:
    """Check `files` against the indexes next to them: missing shards, shards that none lists, and their size."""
    lists: dict[Path, ShardIndex] = {}
    broken: list[Unreadable] = []
    notes: list[str] = []
    indexed: set[tuple[Path, str]] = set()
    present = set(files)
    for path in indexes:
        try:
            index = read_index(path)
        except UnreadableFile as error:
            broken.append(Unreadable(path, error.why))
            continue
        indexed.add((path.parent, path.name.partition(".index.")[0]))
        shards = sorted(path.parent / file for file in index.shards)
        lists |= dict.fromkeys(shards, index)
        lost = [file for file in shards if file not in present and not file.is_file()]
        broken += (Unreadable(file, f"missing, but listed in {path.name}") for file in lost)
        if not lost:
            notes += _size_note(index, shards)
    astray = set()
    for series, numbered in _series(files).items():
        if series in indexed:
            astray |= {file for file in numbered.values() if file not in lists}
        else:
            broken += _gaps(numbered)
    broken += (Unreadable(file, "a shard that the index next to it does not list") for file in sorted(astray))
    return Sharding(lists, frozenset(astray), tuple(broken), tuple(notes))


def _series(files: Sequence[Path]) -> dict[tuple[Path, str], dict[tuple[int, int], Path]]:
    """Return the files that are called `x-00001-of-00003.y`, by folder and `x.y`, then by the two numbers."""
    found: dict[tuple[Path, str], dict[tuple[int, int], Path]] = {}
    for file in files:
        if match := SHARD.fullmatch(file.name):
            series = found.setdefault((file.parent, f"{match[1]}{match[4]}"), {})
            series[int(match[2]), int(match[3])] = file
    return found


def _gaps(shards: Mapping[tuple[int, int], Path]) -> Iterator[Unreadable]:
    example = next(iter(shards.values()))
    match = SHARD.fullmatch(example.name)
    assert match is not None
    for count in sorted({count for _, count in shards}):
        numbers = {number for number, of in shards if of == count}
        lost = sorted(set(range(1, min(count, 10_000) + 1)) - numbers)
        for number in () if 0 in numbers else lost:
            name = f"{match[1]}-{number:05d}-of-{count:05d}{match[4]}"
            yield Unreadable(example.parent / name, "missing: the names of the other shards count it")


def _size_note(index: ShardIndex, shards: Sequence[Path]) -> Iterator[str]:
    if index.total_size is None:
        return
    try:
        sizes = [_tensor_bytes(file) for file in shards]
    except (OSError, UnreadableFile, struct.error):
        return  # the reader of the shard says what is wrong with it
    held, is_exact = sum(sizes), all(file.suffix == ".safetensors" for file in shards)
    if held < index.total_size or (is_exact and held != index.total_size):
        stated = f"{index.path.name} declares {index.total_size:,} bytes of tensors"
        yield f"{stated}, but they have {'' if is_exact else 'less than '}{held:,}"


def _tensor_bytes(file: Path) -> int:
    """Return the bytes of a shard's tensors; for a format other than safetensors, an upper limit."""
    size = file.stat().st_size
    if file.suffix != ".safetensors":
        return size
    with open_file(file) as stream:
        (header,) = struct.unpack("<Q", stream.read(8))
    return max(0, size - 8 - int(header))

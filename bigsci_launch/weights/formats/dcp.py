"""Reads checkpoints of torch.distributed.checkpoint, which torchtitan, FSDP, Lightning and Megatron-core write.

A folder has one `.metadata` for all ranks, and at least one `.distcp` file for each. Such a file is a series of items:
each box of a tensor, and each other entry, as its own `torch.save` file. With safetensors as storage, one safetensors
file at its end has all of its boxes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bigsci_launch.weights.files.boxes import Region, assemble, hole_or_overlap
from bigsci_launch.weights.files.mapped import MappedFile, UnreadableFile
from bigsci_launch.weights.files.pool import MANY_FILES, FilePool, equal_segments
from bigsci_launch.weights.files.sources import Contents, Source, Unreadable
from bigsci_launch.weights.files.tensors import DTYPE_BYTES, NOWHERE, Chunk, NotRead, Segment, StoredTensor, TensorRole
from bigsci_launch.weights.formats.containers import with_roles
from bigsci_launch.weights.formats.dcp_metadata import (
    DcpMetadata,
    Item,
    ListedBox,
    ListedTensor,
    read_dcp_metadata,
    saved_offsets,
)
from bigsci_launch.weights.formats.safetensors_file import SafetensorsFile, read_safetensors_slice
from bigsci_launch.weights.formats.torch_file import (
    MAX_PICKLE_BYTES,
    ZIP_MAGIC,
    TorchFile,
    entry_contents,
    read_torch_slice,
    stored,
)
from bigsci_launch.weights.formats.values import value_of
from bigsci_launch.weights.objects.flatten import Leaf, flatten
from bigsci_launch.weights.objects.nodes import BadPickle, TensorNode

OF_RANK = re.compile(r"__(\d+)_")


def read_dcp(source: Source) -> Contents:
    """Return every entry of a distributed checkpoint; each tensor is whole, whatever the number of ranks.

    Raises:
        UnreadableFile: its metadata is missing or damaged.
    """
    metadata = read_dcp_metadata(source.path)
    files = FilePool(MANY_FILES)
    try:
        return _DcpReader(metadata, files).contents()
    finally:
        files.close_all()


class _NotRead(Exception):
    """An entry cannot be read; the message says why."""


@dataclass
class _DcpReader:
    metadata: DcpMetadata
    files: FilePool
    tensors: list[StoredTensor] = field(default_factory=list)
    parts: list[Contents] = field(default_factory=list)
    not_read: list[NotRead] = field(default_factory=list)
    unreadable: dict[Path, Unreadable] = field(default_factory=dict)
    safetensors: dict[tuple[Path, int], SafetensorsFile] = field(default_factory=dict)

    def contents(self) -> Contents:
        listed = self.metadata.tensors
        entries, container = _with_roles(self.metadata)
        found = self._in_file_order(
            (box.item, (index, box)) for index, tensor in enumerate(listed) for box in tensor.boxes if box.item
        )
        pieces: dict[int, list[Chunk]] = {}
        lost: dict[int, str] = {}
        for item, (index, box) in found:
            try:
                piece = self._box(item, listed[index], box)
            except (_NotRead, UnreadableFile) as error:
                lost.setdefault(index, _why(error, self.metadata.path))
            else:
                pieces.setdefault(index, []).append(Chunk(box.offsets, piece))
        for index, (tensor, (entry, role)) in enumerate(zip(listed, entries[: len(listed)], strict=True)):
            self._join(tensor, role, entry.name, pieces.get(index, []), lost.get(index))
        names = [entry.name for entry, _ in entries[len(listed) :]]
        named = zip(self.metadata.blobs, names, strict=True)
        for item, name in self._told_apart(list(self._in_file_order((blob.item, name) for blob, name in named))):
            self._blob(item, name)
        self._leave()
        return Contents(
            tuple([*self.tensors, *(tensor for part in self.parts for tensor in part.tensors)]),
            values=tuple(value for part in self.parts for value in part.values),
            not_read=(*self.not_read, *(entry for part in self.parts for entry in part.not_read)),
            container=container,
            unreadable=(*self.metadata.broken, *self.unreadable.values()),
        )

    def _in_file_order(self, found: Iterable[tuple[Item | None, Any]]) -> Iterator[tuple[Item, Any]]:
        items = [(item, thing) for item, thing in found if item is not None]
        yield from sorted(items, key=lambda pair: (str(pair[0].path), pair[0].offset))

    def _file(self, item: Item) -> MappedFile:
        """Return an item's file; if it is unreadable, or too short, it is listed once."""
        known = self.unreadable.get(item.path)
        if known is None:
            try:
                file = self.files.get(item.path)
                if item.offset + item.length <= len(file):
                    return file
                why = f"truncated: it has {len(file):,} bytes, but its metadata lists {item.offset + item.length:,}"
            except UnreadableFile as error:
                why = "missing, but listed in its metadata" if not item.path.exists() else error.why
            known = self.unreadable.setdefault(item.path, Unreadable(item.path, why))
        raise _NotRead(f"it is in {item.path.name}, which cannot be read")

    def _box(self, item: Item, tensor: ListedTensor, box: ListedBox) -> StoredTensor:
        if item.transforms:
            raise _NotRead(f"its bytes are transformed ({', '.join(item.transforms)})")
        if tensor.dtype not in DTYPE_BYTES or tensor.layout != "torch.strided":
            raise _NotRead(f"its type is unknown ({tensor.dtype}, {tensor.layout})")
        file = self._file(item)
        if file.memory[item.offset : item.offset + len(ZIP_MAGIC)] == ZIP_MAGIC:
            node = read_torch_slice(file, item.offset, item.length)
            piece = self._only_tensor(node, tensor.name)
        else:
            piece = self._safe(file, item, tensor, box)
        if (piece.dtype, piece.shape) != (tensor.dtype, box.shape):
            held = f"{piece.dtype} {list(piece.shape)}"
            raise _NotRead(f"its file has {held} at {list(box.offsets)}, its metadata {tensor.dtype} {list(box.shape)}")
        return piece

    def _only_tensor(self, file: TorchFile, name: str) -> StoredTensor:
        if not isinstance(file.tree, TensorNode) or file.others:
            raise _NotRead("its file has something other than a plain tensor")
        return stored(file, name, "other", NOWHERE, file.tree)

    def _safe(self, file: MappedFile, item: Item, tensor: ListedTensor, box: ListedBox) -> StoredTensor:
        """Return a box from the safetensors file that begins at the item's offset, as do all items of that file."""
        key = (file.path, item.offset)
        if key not in self.safetensors:
            self.safetensors[key] = read_safetensors_slice(file, item.offset)
        entry = self.safetensors[key].entries.get(tensor.name)
        offsets = saved_offsets(self.safetensors[key]).get(tensor.name)
        if entry is None or (offsets is not None and offsets != box.offsets):
            raise _NotRead(f"{file.path.name} does not have its elements from {list(box.offsets)} on")
        return StoredTensor(tensor.name, "other", NOWHERE, entry.dtype, entry.shape, (entry.segment,))

    def _join(self, tensor: ListedTensor, role: TensorRole, name: str, pieces: list[Chunk], lost: str | None) -> None:
        type_ = f"{tensor.dtype} {list(tensor.shape)}"
        missing = next((box for box in tensor.boxes if box.item is None), None)
        if missing is not None:
            lost = lost or f"no file has its elements from {list(missing.offsets)} on"
        boxes = dict.fromkeys((box.offsets, box.shape) for box in tensor.boxes)
        why = lost or hole_or_overlap(tensor.shape, list(boxes))
        if why is not None:
            title = name if role in ("weight", "other") else f"{name} {role}"
            self.not_read.append(NotRead(title, type_, self.metadata.path, why))
            return
        whole = StoredTensor(name, role, NOWHERE, tensor.dtype, tensor.shape, ())
        kept, copies = self._without_copies([piece for piece in pieces if piece.tensor.num_elements])
        if not kept:
            self.tensors.append(replace(whole, segments=(Segment(self.metadata.path, 0, 0),)))
        elif not copies:
            self.tensors.append(assemble(whole, kept))
        elif len(kept) == 1:
            # Every rank has its own, such as its random state.
            pieces_of_ranks = (chunk.tensor for chunk in (*kept, *copies))
            self.tensors += (replace(piece, name=_of_rank(name, piece.path)) for piece in pieces_of_ranks)
        else:
            why = f"the copies of its box at {list(copies[0].offsets)} differ"
            self.not_read.append(NotRead(name, type_, copies[0].tensor.path, why))

    def _without_copies(self, pieces: list[Chunk]) -> tuple[list[Chunk], list[Chunk]]:
        """Return one chunk for each box, and all further ones that differ from it."""
        kept: dict[Region, Chunk] = {}
        others = []
        for piece in pieces:
            first = kept.setdefault((piece.offsets, piece.tensor.shape), piece)
            a, b = first.tensor, piece.tensor
            if a is not b and (a.strides != b.strides or not equal_segments(a.segments, b.segments, self.files)):
                others.append(piece)
        return list(kept.values()), others

    def _told_apart(self, blobs: Sequence[tuple[Item, str]]) -> Iterator[tuple[Item, str]]:
        """Yield the blobs that several ranks have once if they are the same, otherwise with the rank in their names."""
        named: dict[str, list[Item]] = {}
        for item, name in blobs:
            named.setdefault(name, []).append(item)
        for name, items in named.items():
            if len(items) == 1 or self._are_same(items):
                yield items[0], name
            else:
                yield from ((item, _of_rank(name, item.path)) for item in items)

    def _are_same(self, items: Sequence[Item]) -> bool:
        first, *others = (Segment(item.path, item.offset, item.length) for item in items)
        try:
            return all(equal_segments((first,), (other,), self.files) for other in others)
        except UnreadableFile:
            return False

    def _blob(self, item: Item, name: str) -> None:
        try:
            if item.transforms:
                raise _NotRead(f"its bytes are transformed ({', '.join(item.transforms)})")
            self.parts.append(self._entries(self._file(item), item, name))
        except (_NotRead, UnreadableFile, BadPickle) as error:
            self.not_read.append(NotRead(name, "an object", item.path, _why(error, item.path)))

    def _entries(self, file: MappedFile, item: Item, name: str) -> Contents:
        if file.memory[item.offset : item.offset + len(ZIP_MAGIC)] == ZIP_MAGIC:
            held = read_torch_slice(file, item.offset, item.length)
            return entry_contents(held, ((leaf, "other") for leaf in flatten(held.tree, name)), NOWHERE)
        if item.length > MAX_PICKLE_BYTES:
            raise _NotRead(f"it has {item.length:,} bytes in an unknown format")
        raw = file.memory[item.offset : item.offset + item.length]
        return Contents((), values=(value_of(name, NOWHERE, item.path, bytes(raw)),))

    def _leave(self) -> None:
        """List what the metadata has but no tensor or object, and compare fields of it that only some writers know."""
        path = self.metadata.path
        for blob in self.metadata.blobs:
            if blob.item is None:
                self.not_read.append(NotRead(blob.name, "an object", path, "no file has its bytes"))
        for name, item in self.metadata.unlisted:
            why = "its metadata says where it is, but not what it is"
            self.not_read.append(NotRead(name, "a stored item", item.path, why))
        if self.metadata.rest:
            file = TorchFile(path, self.metadata.rest, {})
            leaves = flatten(dict(self.metadata.rest))
            self.parts.append(entry_contents(file, ((leaf, "other") for leaf in leaves), NOWHERE))


def _with_roles(metadata: DcpMetadata) -> tuple[list[tuple[Leaf, TensorRole]], str]:
    """Return a leaf with its role for each tensor, then for each object; and the key of the parameters' dictionary."""
    some_tensor = TensorNode("", "F32", 0, (), ())
    leaves = [Leaf(tensor.name, tensor.keys, some_tensor) for tensor in metadata.tensors]
    leaves += [Leaf(blob.name, blob.keys, None) for blob in metadata.blobs]
    tree: dict[Any, Any] = {}
    for leaf in leaves:
        folder = tree
        for key in leaf.path[:-1]:
            inner = folder.setdefault(key, {})
            folder = inner if isinstance(inner, dict) else {}
        folder[leaf.path[-1]] = leaf.node
    return with_roles(tree, leaves, has_all=True)


def _of_rank(name: str, path: Path) -> str:
    """Return a name with the rank whose file has the entry: `__3_0.distcp`."""
    match = OF_RANK.match(path.name)
    return f"{name} (rank {match[1]})" if match else f"{name} ({path.stem})"


def _why(error: Exception, path: Path) -> str:
    if isinstance(error, UnreadableFile):
        return error.why if error.path == path else f"in {error.path.name}: {error.why}"
    return str(error)

"""Copies of ranks' states in host memory, which outlive the generations of a process.

A copy is one flat buffer, so that it is sent as it is: a document, and then for each optimizer group the fp32 masters
and AdamW's two moments of the rank's partition. A process keeps two copies of its own state and two of each state that
it keeps for another rank. The older one is overwritten, so a complete one is there at any time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bigsci_launch.recover.holding import Holding, Shard, StateVersion
from bigsci_launch.safe_files import parse_json
from bigsci_launch.train.device.digest import digest64
from bigsci_launch.train.device.host_memory import host_zeros

DOCUMENT_BYTES = 1 << 16
VECTORS = 3
"""Of a partition: the masters, and the first and the second moments."""

_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class HeldPart:
    """A rank's partition of one optimizer group: the shard of a unit, and its size with the padding at its end."""

    shard: Shard
    size: int


@dataclass(frozen=True, slots=True)
class Shape:
    """What the state of one rank consists of. `document` is the unit of what is not cut: generators and counters."""

    document: str
    parts: tuple[HeldPart, ...]

    @property
    def num_bytes(self) -> int:
        return DOCUMENT_BYTES + 4 * VECTORS * sum(part.size for part in self.parts)

    @property
    def shards(self) -> tuple[Shard, ...]:
        """What a copy of this shape holds."""
        return Shard(self.document, 0, DOCUMENT_BYTES), *(part.shard for part in self.parts)

    def make_copy(self) -> Copy:
        """Return an empty copy of this shape."""
        return Copy(self)


class Copy:
    """The state of one rank after one step, if `is_complete`."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.version = StateVersion(-1, -1)
        self.whole: Mapping[str, int] = {}
        self.is_complete = False
        self.buffer = host_zeros(shape.num_bytes)

    def part_vectors(self) -> Iterator[tuple[HeldPart, Tensor]]:
        """Yield each part with its vectors, of shape (VECTORS, size)."""
        start = DOCUMENT_BYTES
        for part in self.shape.parts:
            stop = start + 4 * VECTORS * part.size
            yield part, self.buffer[start:stop].view(torch.float32).view(VECTORS, part.size)
            start = stop

    def pieces(self, wanted: Shard) -> list[Tensor]:
        """Return the memory of a shard that this copy holds, as flat tensors."""
        if wanted.unit == self.shape.document:
            return [self.buffer[wanted.start : min(wanted.stop, DOCUMENT_BYTES)]]
        for part, vectors in self.part_vectors():
            if part.shard.unit == wanted.unit:
                first = part.shard.start
                return [vector[wanted.start - first : wanted.stop - first] for vector in vectors]
        raise KeyError(wanted.unit)

    def holds(self, wanted: Shard) -> bool:
        """Return whether all of a shard is in this copy."""
        return any(
            each.unit == wanted.unit and each.start <= wanted.start and each.stop >= wanted.stop
            for each in self.shape.shards
        )

    def write_document(self, document: Mapping[str, Any]) -> None:
        """Store what is not cut."""
        text = json.dumps(document).encode()
        if len(text) > DOCUMENT_BYTES - _LENGTH_BYTES:
            raise ValueError(f"the document of a snapshot has {len(text)} bytes; at most {DOCUMENT_BYTES} are kept")
        data = len(text).to_bytes(_LENGTH_BYTES, "little") + text
        self.buffer[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def read_document(self) -> dict[str, Any]:
        """Return what `write_document` stored."""
        data = bytes(self.buffer[:DOCUMENT_BYTES].numpy())
        length = int.from_bytes(data[:_LENGTH_BYTES], "little")
        document: dict[str, Any] = parse_json(data[_LENGTH_BYTES : _LENGTH_BYTES + length], allow_nan=True)
        return document


class Memory:
    """All copies that this process holds, of its own state and of others'."""

    def __init__(self) -> None:
        self._copies: dict[str, list[Copy]] = {}
        self.reached = 0
        """The last step that a rank of this attempt has begun, as far as this process knows."""
        self.done = 0
        """The last step that this process has finished, or restored."""
        self.began: int | None = None
        """The step after which this attempt began."""

    def manifest(self) -> list[Holding]:
        return [Holding(copy.version, copy.shape.shards, copy.whole) for copy in self._complete()]

    def _complete(self) -> Iterator[Copy]:
        return (copy for copies in self._copies.values() for copy in copies if copy.is_complete)

    def digests(self, version: StateVersion) -> dict[Shard, list[int]]:
        """Return the digests of all shards that are held of a state."""
        return {
            shard: [digest64(piece) for piece in copy.pieces(shard)]
            for copy in self._complete()
            if copy.version == version
            for shard in copy.shape.shards
        }

    def find(self, version: StateVersion, shard: Shard) -> Copy | None:
        """Return a copy of a state that holds a shard."""
        return next((copy for copy in self._complete() if copy.version == version and copy.holds(shard)), None)

    def place(self, shape: Shape, version: StateVersion, whole: Mapping[str, int]) -> Copy:
        """Return the copy of this shape for a state: the one that is held, or one to be filled.

        To be filled is the older of two; the other one stays complete.
        """
        copies = self._copies.setdefault(shape.document, [])
        usable = [copy for copy in copies if copy.shape == shape]
        for copy in usable:
            if copy.is_complete and copy.version == version:
                copy.whole = whole
                return copy
        if len(usable) < 2:
            copies.append(shape.make_copy())
            chosen = copies[-1]
        else:
            chosen = min(usable, key=lambda copy: (copy.is_complete, copy.version))
        chosen.is_complete, chosen.version, chosen.whole = False, version, whole
        return chosen

    def keep_only(self, version: StateVersion | None) -> None:
        """Forget all other states: the ranks have agreed on this one."""
        for copy in self._complete():
            copy.is_complete = copy.version == version

    def release_others(self, shapes: Sequence[Shape]) -> None:
        """Free the copies whose shapes are not among `shapes`."""
        kept = {name: [copy for copy in copies if copy.shape in shapes] for name, copies in self._copies.items()}
        self._copies = {name: copies for name, copies in kept.items() if copies}

"""Boxes of a tensor: how chunks make up a whole, and where the chunks of two sides meet. Pure, without numpy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from bigsci_launch.weights.files.tensors import Chunk, StoredTensor

Numbers = tuple[int, ...]
Region = tuple[Numbers, Numbers]
"""The offsets of a box in a tensor, and its shape."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """A box that is in one chunk of each side; `offsets` are those of its first element in the whole."""

    offsets: Numbers
    shape: Numbers
    a: Chunk
    b: Chunk


def assemble(whole: StoredTensor, chunks: Sequence[Chunk]) -> StoredTensor:
    """Return a tensor that consists of chunks, which cover it exactly. `whole` has its name and shape, but no bytes.

    Chunks that follow each other in row-major order become segments.
    """
    flat = sorted(_without_nesting(chunks), key=lambda chunk: chunk.offsets)
    if len(flat) == 1:
        only = flat[0].tensor
        return replace(whole, segments=only.segments, strides=only.strides)
    end = 0
    for chunk in flat:
        span = run_in(whole.shape, chunk.offsets, chunk.tensor.shape)
        if span is None or span[0] != end or chunk.tensor.strides is not None:
            return replace(whole, segments=(), chunks=tuple(flat))
        end = span[1]
    return replace(whole, segments=tuple(segment for chunk in flat for segment in chunk.tensor.segments))


def _without_nesting(chunks: Sequence[Chunk]) -> Iterator[Chunk]:
    for chunk in chunks:
        for inner in chunks_of(chunk.tensor):
            offsets = tuple(map(sum, zip(chunk.offsets, inner.offsets, strict=True)))
            yield Chunk(offsets, inner.tensor)


def chunks_of(tensor: StoredTensor) -> tuple[Chunk, ...]:
    """Return a tensor's chunks; for a tensor without chunks, one that is all of it."""
    return tensor.chunks or (Chunk((0,) * len(tensor.shape), tensor),)


def run_in(whole: Numbers, offsets: Numbers, shape: Numbers) -> tuple[int, int] | None:
    """Return the first and last + 1 position of a box in row-major order; None if its elements are not in one run."""
    first, stride, is_narrow = 0, 1, False
    for length, offset, size in zip(reversed(whole), reversed(offsets), reversed(shape), strict=True):
        if is_narrow and size != 1:
            return None
        is_narrow = is_narrow or size != length
        first += offset * stride
        stride *= length
    return first, first + math.prod(shape)


def overlaps(a: StoredTensor, b: StoredTensor) -> Iterator[Overlap]:
    """Yield every box in which a chunk of `a` meets a chunk of `b`; the tensors have one shape."""
    left, right = ({(chunk.offsets, chunk.tensor.shape): chunk for chunk in chunks_of(side)} for side in (a, b))
    for at, other in meetings(list(left), list(right)):
        shared = shared_box(*at, *other)
        if shared is not None:
            yield Overlap(*shared, left[at], right[other])


def meetings(a: Sequence[Region], b: Sequence[Region]) -> Iterator[tuple[Region, Region]]:
    """Yield the pairs of boxes that may meet: those whose ranges overlap on the dim that tells most boxes apart."""
    dims = range(len(a[0][0]) if a else 0)
    dim = max(dims, key=lambda dim: len({offsets[dim] for offsets, _ in (*a, *b)}), default=None)
    if dim is None:
        yield from itertools.product(a, b)
        return
    waiting = sorted(b, key=lambda box: box[0][dim], reverse=True)
    active: list[Region] = []
    for box in sorted(a, key=lambda box: box[0][dim]):
        first = box[0][dim]
        last = first + box[1][dim]
        while waiting and waiting[-1][0][dim] < last:
            active.append(waiting.pop())
        active = [(offsets, shape) for offsets, shape in active if offsets[dim] + shape[dim] > first]
        yield from ((box, other) for other in active if other[0][dim] < last)


def hole_or_overlap(shape: Numbers, boxes: Sequence[Region]) -> str | None:
    """Return what is wrong with boxes that should cover a whole exactly; None if they do."""
    for offsets, size in boxes:
        if any(first + n > length for first, n, length in zip(offsets, size, shape, strict=True)):
            return f"the box {list(size)} at {list(offsets)} extends past its end"
    kept = [(offsets, size) for offsets, size in boxes if 0 not in size]
    for (at, size), (other, other_size) in meetings(kept, kept):
        if (at, size) < (other, other_size) and shared_box(at, size, other, other_size) is not None:
            return f"the boxes at {list(at)} and {list(other)} overlap"
    covered = sum(math.prod(size) for _, size in kept)
    if covered < math.prod(shape):
        return f"no file has {math.prod(shape) - covered:,} of its {math.prod(shape):,} elements"
    return None


def shared_box(offsets_a: Numbers, shape_a: Numbers, offsets_b: Numbers, shape_b: Numbers) -> Region | None:
    """Return the box that two boxes share; None if they share no element."""
    offsets = tuple(map(max, offsets_a, offsets_b))
    ends = (min(x + n, y + m) for x, n, y, m in zip(offsets_a, shape_a, offsets_b, shape_b, strict=True))
    shape = tuple(end - offset for end, offset in zip(ends, offsets, strict=True))
    return (offsets, shape) if min(shape, default=1) > 0 else None


def inside(chunk: Chunk, offsets: Numbers) -> Numbers:
    """Return offsets in the whole as offsets in a chunk."""
    return tuple(offset - start for offset, start in zip(offsets, chunk.offsets, strict=True))


def index_of(position: int, shape: Numbers) -> Numbers:
    """Return the index of an element, given its position in row-major order."""
    found = []
    for length in reversed(shape):
        position, index = divmod(position, length)
        found.append(index)
    return tuple(reversed(found))


def pieces_of(offsets: Numbers, shape: Numbers, limit: int) -> Iterator[Region]:
    """Cut a box into boxes of at most `limit` elements, in row-major order of their first elements."""
    if math.prod(shape) <= limit:
        yield offsets, shape
        return
    dim = next(dim for dim, size in enumerate(shape) if size > 1)
    rows = max(1, limit // math.prod(shape[dim + 1 :]))
    for start in range(0, shape[dim], rows):
        taken = min(rows, shape[dim] - start)
        yield from pieces_of(
            (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :]), (*shape[:dim], taken, *shape[dim + 1 :]), limit
        )

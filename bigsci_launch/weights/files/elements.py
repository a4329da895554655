"""Reads elements of a stored tensor as numpy arrays, a bounded number at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

# BLAS would start one thread per core, each with its own buffers, for dot products that fit in a cache.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import numpy.typing as npt

from bigsci_launch.weights.files.boxes import Numbers, Region, index_of, inside, overlaps, pieces_of, run_in, shared_box
from bigsci_launch.weights.files.pool import FilePool
from bigsci_launch.weights.files.small_floats import SCALE, SMALL_FLOATS, values_of_codes
from bigsci_launch.weights.files.tensors import (
    DTYPE_BYTES,
    PACKED_DTYPES,
    Segment,
    StoredTensor,
    cut_segments,
)

Array = npt.NDArray[Any]

# How elements are stored. Formats that numpy does not know are read as integers of the same width.
STORED_AS: dict[str, type[np.generic]] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "C32": np.uint32,
    "C64": np.complex64,
    "C128": np.complex128,
    "QI32": np.int32,
    "QI8": np.int8,
    "BITS16": np.uint16,
}
COMPLEX = {"C32": np.float16, "C64": np.float32, "C128": np.float64}


def stored_as(dtype: str) -> type[np.generic]:
    """Return numpy's dtype for elements as they are read: bytes, unless they are wider."""
    return STORED_AS.get(dtype, np.uint8)


def read_elements(tensor: StoredTensor, start: int, stop: int, files: FilePool) -> Array:
    """Return elements `start` to `stop` in row-major order, as stored: a view of the file if they are contiguous.

    Raises:
        UnreadableFile: the file has been removed or has become shorter.
    """
    if tensor.chunks:
        return _chunked(tensor, start, stop, files)
    if tensor.strides is not None:
        return np.asarray(_shaped(tensor, files).flat[start:stop])
    if tensor.dtype in PACKED_DTYPES:
        return _unpacked(tensor, start, stop, files)
    return _contiguous(tensor, start, stop, files)


def _contiguous(tensor: StoredTensor, start: int, stop: int, files: FilePool) -> Array:
    width = DTYPE_BYTES[tensor.dtype]
    pieces = [_view(tensor, segment, files) for segment in cut_segments(tensor.segments, start * width, stop * width)]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces or [np.empty(0, stored_as(tensor.dtype))])


def _view(tensor: StoredTensor, segment: Segment, files: FilePool) -> Array:
    file = files.with_bytes(segment)
    file.require(segment.offset + segment.num_bytes)
    dtype = stored_as(tensor.dtype)
    return np.frombuffer(file.memory, dtype, segment.num_bytes // DTYPE_BYTES[tensor.dtype], segment.offset)


def _unpacked(tensor: StoredTensor, start: int, stop: int, files: FilePool) -> Array:
    """Return one code a byte of elements that share bytes. The first element is in the lowest bits."""
    group, num_bytes = PACKED_DTYPES[tensor.dtype]
    first, last = start // group, -(-stop // group)
    raw = _contiguous(tensor, first * num_bytes, last * num_bytes, files).reshape(-1, num_bytes).astype(np.uint32)
    joined = sum((raw[:, index] << np.uint32(8 * index) for index in range(num_bytes)), np.uint32(0))
    bits = 8 * num_bytes // group
    codes = np.empty((last - first, group), np.uint8)
    for index in range(group):
        codes[:, index] = (joined >> np.uint32(bits * index)) & np.uint32((1 << bits) - 1)
    return codes.reshape(-1)[start - first * group : stop - first * group]


def _shaped(tensor: StoredTensor, files: FilePool) -> Array:
    flat = _view(tensor, tensor.segments[0], files)
    if tensor.strides is None:
        return flat.reshape(tensor.shape)
    strides = [stride * DTYPE_BYTES[tensor.dtype] for stride in tensor.strides]
    return np.lib.stride_tricks.as_strided(flat, tensor.shape, strides, writeable=False)


def read_box(tensor: StoredTensor, offsets: Sequence[int], shape: Sequence[int], files: FilePool) -> Array:
    """Return a box of a tensor without chunks, in the box's shape: a view of the file if the tensor is one segment.

    Raises:
        UnreadableFile: the file has been removed or has become shorter.
    """
    if len(tensor.segments) == 1 and tensor.dtype not in PACKED_DTYPES:
        box = tuple(slice(first, first + size) for first, size in zip(offsets, shape, strict=True))
        return np.asarray(_shaped(tensor, files)[box])
    span = run_in(tensor.shape, tuple(offsets), tuple(shape))
    if span is not None:
        return read_elements(tensor, *span, files).reshape(shape)
    dim = next(dim for dim, size in enumerate(shape) if size > 1)
    rows = [
        read_box(tensor, (*offsets[:dim], row, *offsets[dim + 1 :]), (*shape[:dim], 1, *shape[dim + 1 :]), files)
        for row in range(offsets[dim], offsets[dim] + shape[dim])
    ]
    return np.concatenate(rows, axis=dim)


def _chunked(tensor: StoredTensor, start: int, stop: int, files: FilePool) -> Array:
    found = np.empty(stop - start, stored_as(tensor.dtype))
    for offsets, shape in _boxes_of_range(tensor.shape, start, stop):
        first = sum(offset * math.prod(tensor.shape[dim + 1 :]) for dim, offset in enumerate(offsets)) - start
        box = found[first : first + math.prod(shape)].reshape(shape)
        for chunk in tensor.chunks:
            shared = shared_box(offsets, shape, chunk.offsets, chunk.tensor.shape)
            if shared is not None:
                first_of, size_of = shared
                at = tuple(
                    slice(low - begin, low - begin + size)
                    for low, begin, size in zip(first_of, offsets, size_of, strict=True)
                )
                box[at] = read_box(chunk.tensor, inside(chunk, first_of), size_of, files)
    return found


def _boxes_of_range(shape: Numbers, start: int, stop: int) -> Iterator[Region]:
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    while start < stop:
        # The outermost dim whose rows begin here and end within the range.
        dim = next(d for d, stride in enumerate(strides) if start % stride == 0 and start + stride <= stop)
        offsets = tuple(start // stride % length for stride, length in zip(strides, shape, strict=True))
        rows = min((stop - start) // strides[dim], shape[dim] - offsets[dim])
        yield offsets, (*(1,) * dim, rows, *shape[dim + 1 :])
        start += rows * strides[dim]


@dataclass(frozen=True, slots=True)
class Window:
    """The same elements of two tensors, flat; `positions` are those of the window's box in a tensor of `whole`."""

    left: Array
    right: Array
    offsets: Numbers
    shape: Numbers
    whole: Numbers

    def position(self, at: int) -> int:
        """Return the position in the whole, in row-major order, of the window's element `at`."""
        position = 0
        for index, offset, length in zip(index_of(at, self.shape), self.offsets, self.whole, strict=True):
            position = position * length + index + offset
        return position


def windows(a: StoredTensor, b: StoredTensor, files: FilePool, limit: int) -> Iterator[Window]:
    """Yield two tensors with equally many elements, at most `limit` elements at a time, each element once.

    Raises:
        UnreadableFile: a file has been removed or has become shorter.
    """
    if a.shape == b.shape and (a.chunks or b.chunks):
        for overlap in overlaps(a, b):
            for offsets, shape in pieces_of(overlap.offsets, overlap.shape, limit):
                left, right = (
                    np.ascontiguousarray(read_box(chunk.tensor, inside(chunk, offsets), shape, files)).reshape(-1)
                    for chunk in (overlap.a, overlap.b)
                )
                yield Window(left, right, offsets, shape, a.shape)
        return
    for start in range(0, b.num_elements, limit):
        stop = min(start + limit, b.num_elements)
        left, right = (read_elements(side, start, stop, files) for side in (a, b))
        yield Window(left, right, (start,), (stop - start,), (b.num_elements,))


def are_same_bits(a: Array, b: Array) -> bool:
    """Whether two arrays of one dtype and shape have the same bits."""
    if a.itemsize > 8:
        return a.tobytes() == b.tobytes()
    bits = f"u{a.itemsize}"
    return bool(np.array_equal(a.view(bits), b.view(bits)))


def as_floats(stored: Array, dtype: str) -> Array:
    """Return values as floats: float32 for float formats up to 32 bits, otherwise float64; complex numbers as pairs."""
    if dtype == "BF16":
        widened: Array = (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return widened
    if dtype in SMALL_FLOATS or dtype == SCALE:
        return values_of_codes(dtype)[stored]
    if dtype in ("F16", "F32"):
        return stored.astype(np.float32, copy=False)
    if dtype == "C32":
        return np.ascontiguousarray(stored).view(np.float16).astype(np.float32)
    if dtype in COMPLEX:
        return stored.view(COMPLEX[dtype])
    return stored.astype(np.float64, copy=False)


@np.errstate(all="ignore")
def round_to(values: Array, dtype: str) -> Array:
    """Return float32 values rounded to nearest even in `dtype`, as stored integers or floats of that dtype."""
    if dtype != "BF16":
        return values.astype(stored_as(dtype))
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    is_odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded: Array = ((bits + np.uint32(0x7FFF) + is_odd) >> np.uint32(16)).astype(np.uint16)
    rounded[np.isnan(values)] = 0x7FC0
    return rounded

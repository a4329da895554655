"""Reads elements of a stored tensor as numpy arrays, a bounded number at a time."""

from __future__ import annotations

import math
import os
from typing import Any

# BLAS would start one thread per core, each with its own buffers, for dot products that fit in a cache.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import numpy.typing as npt

from bigsci_launch.weights.files.mapped import FilePool
from bigsci_launch.weights.files.tensors import DTYPE_BYTES, Segment, StoredTensor, UnreadableFile, cut_segments

Array = npt.NDArray[Any]

# How elements are stored. Formats that numpy does not know are read as integers of the same width.
STORED_AS = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
    "F8_E4M3": np.uint8,
    "F8_E5M2": np.uint8,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.uint8,
    "C64": np.complex64,
    "C128": np.complex128,
}


def read_elements(tensor: StoredTensor, start: int, stop: int, files: FilePool) -> Array:
    """Return elements `start` to `stop` in row-major order, as stored: a view of the file if they are contiguous.

    Raises:
        UnreadableFile: the file has been removed or has become shorter.
    """
    if tensor.parts:
        return _interleaved(tensor, start, stop, files)
    if tensor.strides is not None:
        return _strided(tensor, start, stop, files)
    width = DTYPE_BYTES[tensor.dtype]
    pieces = [_view(tensor, segment, files) for segment in cut_segments(tensor.segments, start * width, stop * width)]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces or [np.empty(0, STORED_AS[tensor.dtype])])


def _view(tensor: StoredTensor, segment: Segment, files: FilePool) -> Array:
    memory = files.get(segment.path).memory
    if segment.offset + segment.num_bytes > len(memory):
        raise UnreadableFile(segment.path, "shorter than a moment ago: another process is writing to it")
    dtype = STORED_AS[tensor.dtype]
    return np.frombuffer(memory, dtype, segment.num_bytes // DTYPE_BYTES[tensor.dtype], segment.offset)


def _strided(tensor: StoredTensor, start: int, stop: int, files: FilePool) -> Array:
    width = DTYPE_BYTES[tensor.dtype]
    flat = _view(tensor, tensor.segments[0], files)
    strides = [stride * width for stride in tensor.strides or ()]
    shaped = np.lib.stride_tricks.as_strided(flat, tensor.shape, strides, writeable=False)
    return np.asarray(shaped.flat[start:stop])


def _interleaved(tensor: StoredTensor, start: int, stop: int, files: FilePool) -> Array:
    """Return elements of a tensor split along `dim`, joining whole rows (all elements of one outer index)."""
    inner = math.prod(tensor.shape[tensor.dim + 1 :])
    widths = [part.shape[tensor.dim] * inner for part in tensor.parts]
    row = sum(widths)
    first, last = start // row, -(-stop // row)
    rows = np.empty((last - first, row), STORED_AS[tensor.dtype])
    begin = 0
    for part, width in zip(tensor.parts, widths, strict=True):
        piece = read_elements(part, first * width, last * width, files)
        rows[:, begin : begin + width] = piece.reshape(last - first, width)
        begin += width
    return rows.reshape(-1)[start - first * row : stop - first * row]


def as_floats(stored: Array, dtype: str) -> Array:
    """Return values as floats: float32 for float formats up to 32 bits, otherwise float64; complex numbers as pairs."""
    if dtype == "BF16":
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype in ("F8_E4M3", "F8_E5M2"):
        return _FLOAT8[dtype][stored]
    if dtype in ("F16", "F32"):
        return stored.astype(np.float32, copy=False)
    if dtype in ("C64", "C128"):
        return stored.view(np.float32 if dtype == "C64" else np.float64)
    return stored.astype(np.float64, copy=False)


def _float8_table(exponent_bits: int, mantissa_bits: int, *, is_finite_only: bool) -> Array:
    """Return the 256 values of an 8-bit float. With `is_finite_only` (E4M3), only all-ones codes are NaN."""
    code = np.arange(256)
    bias = (1 << (exponent_bits - 1)) - 1
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    value = np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent - bias))
    top = exponent == (1 << exponent_bits) - 1
    if is_finite_only:
        value[(code & 0x7F) == 0x7F] = np.nan
    else:
        value[top] = np.where(mantissa[top] == 0, np.inf, np.nan)
    return np.where(code & 0x80, -value, value).astype(np.float32)


_FLOAT8 = {
    "F8_E4M3": _float8_table(4, 3, is_finite_only=True),
    "F8_E5M2": _float8_table(5, 2, is_finite_only=False),
}


@np.errstate(all="ignore")
def round_to(values: Array, dtype: str) -> Array:
    """Return float32 values rounded to nearest even in `dtype`, as stored integers or floats of that dtype."""
    if dtype != "BF16":
        return values.astype(STORED_AS[dtype])
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    is_odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + is_odd) >> np.uint32(16)).astype(np.uint16)
    rounded[np.isnan(values)] = 0x7FC0
    return rounded

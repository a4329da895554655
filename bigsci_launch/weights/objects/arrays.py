"""Numpy's arrays and scalars in a pickle, in one form whichever protocol wrote them."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bigsci_launch.weights.objects.nodes import Instance, Named

NDARRAY = Named("numpy", "ndarray")
# Protocols up to 4 rebuild an array and then set its state; protocol 5 gives everything to one call.
RECONSTRUCT = Named("numpy._core.multiarray", "_reconstruct")
FROM_BUFFER = Named("numpy._core.numeric", "_frombuffer")
SCALAR = Named("numpy._core.multiarray", "scalar")
DTYPE = Named("numpy", "dtype")
KINDS = {"f": "float", "i": "int", "u": "uint", "c": "complex"}
STRUCT_CODES = {"f2": "e", "f4": "f", "f8": "d", "b1": "?", **{f"i{1 << n}": "bhiq"[n] for n in range(4)}}
STRUCT_CODES |= {f"u{1 << n}": "BHIQ"[n] for n in range(4)}
# An array with more rows or wider elements than this keeps the order in which the pickle has it.
MAX_ROWS = 1 << 16
MAX_WIDTH = 1 << 8
SHOWN_NUMBERS = 8
# The most that numpy makes.
MAX_DIMS = 64
MAX_SHOWN_BYTES = 16 * SHOWN_NUMBERS


@dataclass(frozen=True, slots=True)
class PickledArray:
    """An array of anything but Python objects: its class and dtype, and its elements in row-major order."""

    made_by: Named
    dtype: Any
    shape: tuple[int, ...]
    data: bytes


def array_of(node: Instance) -> PickledArray | None:
    """Return the array that an instance makes; None if it makes something else."""
    if node.items or node.elements or node.kwargs:
        return None
    if node.made_by == FROM_BUFFER and not node.states:
        return _from_buffer(*node.args) if 4 <= len(node.args) <= 5 else None
    if node.made_by != RECONSTRUCT or len(node.states) != 1:
        return None
    state, made_by = node.states[0], node.args[0] if node.args else None
    if not isinstance(made_by, Named) or not isinstance(state, tuple) or len(state) != 5:
        return None
    _version, shape, dtype, is_fortran, data = state
    return _array(made_by, dtype, shape, data, "F" if is_fortran else "C")


def objects_of(node: Instance) -> Instance | None:
    """Return an array of Python objects with the objects as its elements; None if the instance makes something else."""
    state = node.states[0] if node.made_by == RECONSTRUCT and len(node.states) == 1 else None
    if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[4], list) or not node.args:
        return None
    if not isinstance(node.args[0], Named) or node.items or node.elements or node.kwargs:
        return None
    _version, shape, dtype, is_fortran, elements = state
    layout = {"shape": shape, "dtype": dtype_text(dtype), "is_fortran": is_fortran}
    return Instance(node.args[0], kwargs=layout, elements=elements)


def _from_buffer(data: Any, dtype: Any, shape: Any, order: Any, axes: Any = None) -> PickledArray | None:
    if isinstance(data, Instance) and data.made_by == Named("builtins", "bytearray"):
        data = data.args[0] if data.args and not data.states else None
    return _array(NDARRAY, dtype, shape, data, order, axes)


def _array(made_by: Named, dtype: Any, shape: Any, data: Any, order: Any, axes: Any = None) -> PickledArray | None:
    if not isinstance(data, bytes) or not _are_lengths(shape):
        return None
    count = math.prod(shape)
    if len(data) % max(1, count) or (not count and data):
        return None
    strides = [math.prod(shape[index + 1 :]) for index in range(len(shape))]
    if order == "F":
        strides = [math.prod(shape[:index]) for index in range(len(shape))]
    elif order == "K":
        if not _are_lengths(axes) or sorted(axes) != list(range(len(shape))):
            return None
        shape, strides = tuple(shape[axis] for axis in axes), [strides[axis] for axis in axes]
    elif order != "C":
        return None
    ordered = data if order == "C" else _in_row_major_order(data, shape, strides)
    return None if ordered is None else PickledArray(made_by, dtype, tuple(shape), ordered)


def _are_lengths(lengths: Any) -> bool:
    if not isinstance(lengths, (list, tuple)) or len(lengths) > MAX_DIMS:
        return False
    return all(type(length) is int and 0 <= length < 1 << 63 for length in lengths)


def _in_row_major_order(data: bytes, shape: Sequence[int], strides: Sequence[int]) -> bytes | None:
    if not data:
        return data
    width = len(data) // math.prod(shape)
    if math.prod(shape[:-1]) > MAX_ROWS or width > MAX_WIDTH:
        return None
    starts = [
        sum(index * stride for index, stride in zip(at, strides[:-1], strict=True))
        for at in itertools.product(*map(range, shape[:-1]))
    ]
    length = (shape[-1] - 1) * strides[-1] + 1
    ordered = bytearray(len(data))
    for byte in range(width):
        lane = data[byte::width]
        ordered[byte::width] = b"".join([lane[start : start + length : strides[-1]] for start in starts])
    return bytes(ordered)


def array_text(array: PickledArray) -> str:
    """Return `array float32 [2, 3]`, with the numbers if they are few."""
    what = "array" if array.made_by == NDARRAY else str(array.made_by).removeprefix("numpy.")
    text = f"{what} {dtype_text(array.dtype)} {list(array.shape)}"
    numbers = _numbers(array.dtype, array.data) if math.prod(array.shape) <= SHOWN_NUMBERS else ()
    return f"{text}: {', '.join(map(repr, numbers))}" if numbers else text


def is_numpy_value(node: Instance) -> bool:
    """Whether an instance makes one of numpy's values that is no array of objects: an array, a scalar, a dtype."""
    is_scalar = node.made_by == SCALAR and len(node.args) == 2 and not node.states
    return is_scalar or _is_dtype(node) or array_of(node) is not None


def scalar_text(node: Instance) -> str | None:
    """Return `0.001 (float64)` of a scalar, or what its bytes are; None for anything else."""
    if node.made_by != SCALAR or len(node.args) != 2 or node.states or not isinstance(node.args[1], bytes):
        return None
    numbers = _numbers(*node.args)
    value = repr(numbers[0]) if len(numbers) == 1 else f"{len(node.args[1])} bytes"
    return f"{value} ({dtype_text(node.args[0])})"


def dtype_text(dtype: Any) -> str:
    """Return numpy's name of a dtype: `float32`; its code for dtypes that are no numbers."""
    code = _code(dtype)
    if code is None:
        fields = dtype.states[0][3] if _is_dtype(dtype) and len(dtype.states[0]) > 3 else None
        return f"record of {len(fields)} fields" if isinstance(fields, tuple) else "of another dtype"
    order, kind, size = code
    plain = kind in KINDS and size.isascii() and size.isdecimal()
    name = "bool" if code[1:] == ("b", "1") else f"{KINDS.get(kind)}{8 * int(size)}" if plain else f"{kind}{size}"
    return f"big-endian {name}" if order == ">" else name


def _is_dtype(dtype: Any) -> bool:
    return (
        isinstance(dtype, Instance)
        and dtype.made_by == DTYPE
        and len(dtype.states) == 1
        and isinstance(dtype.states[0], tuple)
    )


def _code(dtype: Any) -> tuple[str, str, str] | None:
    """Return a plain dtype's byte order, kind, and size; None for a dtype with fields."""
    if not _is_dtype(dtype) or not dtype.args or not isinstance(dtype.args[0], str) or len(dtype.args[0]) < 2:
        return None
    state = dtype.states[0]
    is_plain = len(state) > 4 and isinstance(state[1], str) and state[2:5] == (None, None, None)
    return (state[1], dtype.args[0][0], dtype.args[0][1:]) if is_plain else None


def _numbers(dtype: Any, data: bytes) -> tuple[Any, ...]:
    code = _code(dtype) if len(data) <= MAX_SHOWN_BYTES else None
    letter = STRUCT_CODES.get(f"{code[1]}{code[2]}") if code else None
    if code is None or letter is None or len(data) % struct.calcsize(f"<{letter}"):
        return ()
    return struct.unpack(f"{'>' if code[0] == '>' else '<'}{len(data) // struct.calcsize(letter)}{letter}", data)

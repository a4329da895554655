"""Tensors that consist of chunks: reading them, and comparing two that are cut otherwise."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bigsci_launch.weights.compare.statistics import measure
from bigsci_launch.weights.compare.work import is_equal, is_equal_by_chunks
from bigsci_launch.weights.files.boxes import assemble, index_of, run_in
from bigsci_launch.weights.files.elements import read_elements, windows
from bigsci_launch.weights.files.pool import FilePool
from bigsci_launch.weights.files.tensors import NOWHERE, Chunk, Segment, StoredTensor

DTYPES = {"<f4": "F32", "<i8": "I64", "<u1": "U8", "<c16": "C128"}


def stored(path: Path, offset: int, array: Any, *, split: int = 1) -> StoredTensor:
    """An array in row-major order at `offset`, told as `split` segments."""
    dtype = DTYPES[array.dtype.str.replace("|", "<")]
    cuts = [array.size * i // split * array.itemsize for i in range(split + 1)]
    segments = tuple(Segment(path, offset + low, high - low) for low, high in itertools.pairwise(cuts) if high > low)
    return StoredTensor("w", "weight", NOWHERE, dtype, array.shape, segments)


def boxes(draw: st.DrawFn, offsets: tuple[int, ...], shape: tuple[int, ...], depth: int) -> list[Any]:
    """Cut a box at random, again and again."""
    dims = [dim for dim, size in enumerate(shape) if size > 1]
    if depth == 0 or not dims or not draw(st.integers(0, 3)):
        return [(offsets, shape)]
    dim = draw(st.sampled_from(dims))
    cut = draw(st.integers(1, shape[dim] - 1))
    low, high = list(shape), list(shape)
    low[dim], high[dim] = cut, shape[dim] - cut
    after = list(offsets)
    after[dim] += cut
    return [
        *boxes(draw, offsets, tuple(low), depth - 1),
        *boxes(draw, tuple(after), tuple(high), depth - 1),
    ]


def write(draw: st.DrawFn, path: Path, array: Any) -> StoredTensor:
    """Write an array as chunks, some of them transposed and some told as several segments."""
    found, raw = [], b"x" * array.itemsize
    for offsets, shape in boxes(draw, (0,) * array.ndim, array.shape, 4):
        piece = array[tuple(slice(o, o + n) for o, n in zip(offsets, shape, strict=True))]
        tensor = stored(path, len(raw), piece, split=draw(st.integers(1, 3)))
        if draw(st.booleans()) and array.ndim > 1:
            tensor = stored(path, len(raw), piece)
            moved = np.moveaxis(piece, 0, -1)
            strides = tuple(s // array.itemsize for s in np.moveaxis(np.ascontiguousarray(moved), -1, 0).strides)
            tensor = StoredTensor("w", "weight", NOWHERE, tensor.dtype, shape, tensor.segments, strides)
            piece = moved
        found.append(Chunk(offsets, tensor))
        raw += np.ascontiguousarray(piece).tobytes()
    path.write_bytes(raw)
    draw(st.randoms(use_true_random=False)).shuffle(found)
    whole = StoredTensor("w", "weight", NOWHERE, found[0].tensor.dtype, array.shape, ())
    return assemble(whole, found)


@pytest.mark.slow
@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_two_cuttings_of_one_array_are_equal_and_one_element_is_found(tmp_path: Path, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=4)))
    dtype = data.draw(st.sampled_from(sorted(DTYPES)))
    array = (np.arange(np.prod(shape, dtype=int)) % 251).astype(dtype).reshape(shape)
    a = data.draw(st.composite(write)(tmp_path / "a", array))
    b = data.draw(st.composite(write)(tmp_path / "b", array))
    files = FilePool()
    assert is_equal((a, b), files) or measure(a, b, files).num_differing == 0
    assert is_equal_by_chunks(a, b, files)
    start = data.draw(st.integers(0, array.size))
    stop = data.draw(st.integers(start, array.size))
    assert read_elements(a, start, stop, files).tobytes() == array.reshape(-1)[start:stop].tobytes()
    limit = data.draw(st.integers(1, 40))
    found = {window.position(at) for window in windows(a, b, files, limit) for at in range(window.left.size)}
    assert found == set(range(array.size))

    at = data.draw(st.integers(0, array.size - 1))
    changed = array.copy()
    changed.reshape(-1)[at] += 1
    c = data.draw(st.composite(write)(tmp_path / "c", changed))
    assert not is_equal((a, c), files)
    statistics = measure(a, c, files)
    assert (statistics.num_differing, statistics.first, statistics.worst) == (1, at, at)
    assert index_of(at, array.shape) == tuple(map(int, np.unravel_index(at, array.shape)))


def test_chunks_in_row_major_order_become_segments(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.float32).reshape(4, 3)
    whole = StoredTensor("w", "weight", NOWHERE, "F32", (4, 3), ())
    rows = [Chunk((2 * i, 0), stored(tmp_path / "x", 24 * i, array[2 * i : 2 * i + 2])) for i in range(2)]
    assert [segment.offset for segment in assemble(whole, rows[::-1]).segments] == [0, 24]
    columns = [Chunk((0, i), stored(tmp_path / "x", 16 * i, array[:, i : i + 1])) for i in range(3)]
    assert not assemble(whole, columns).segments


@pytest.mark.parametrize(
    ("whole", "offsets", "shape", "expected"),
    [
        ((4, 3), (1, 0), (2, 3), (3, 9)),
        ((4, 3), (1, 1), (1, 2), (4, 6)),
        ((4, 3), (1, 1), (2, 2), None),
        ((4, 1), (1, 0), (3, 1), (1, 4)),
        ((2, 4, 3), (1, 1, 0), (1, 2, 3), (15, 21)),
        ((), (), (), (0, 1)),
    ],
)
def test_a_box_is_one_run_or_not(whole: Any, offsets: Any, shape: Any, expected: Any) -> None:
    assert run_in(whole, offsets, shape) == expected


def test_a_row_longer_than_a_window_is_read_in_pieces(tmp_path: Path) -> None:
    array = np.arange(4 * 1000, dtype=np.float32).reshape(2, 2000)
    path = tmp_path / "x"
    path.write_bytes(array[:, :1000].tobytes() + array[:, 1000:].tobytes())
    halves = [Chunk((0, 1000 * i), stored(path, 8000 * i, array[:, :1000])) for i in range(2)]
    chunked = assemble(StoredTensor("w", "weight", NOWHERE, "F32", (2, 2000), ()), halves)
    found = list(windows(chunked, chunked, FilePool(), 300))
    assert max(window.left.size for window in found) <= 300
    assert sum(window.left.size for window in found) == array.size

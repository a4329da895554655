"""Statistics of every dtype: values against torch's own, integers as integers, complex numbers as pairs."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bigsci_launch.weights.compare.compare import is_equal
from bigsci_launch.weights.compare.statistics import _chunk, measure
from bigsci_launch.weights.files.boxes import assemble
from bigsci_launch.weights.files.elements import as_floats, read_elements
from bigsci_launch.weights.files.pool import FilePool
from bigsci_launch.weights.files.small_floats import ordered_codes
from bigsci_launch.weights.files.tensors import NOWHERE, Chunk, Segment, StoredTensor

CODES = np.arange(256, dtype=np.uint8)
TORCH_FLOATS = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}
# The values of codes without sign, from the OCP Microscaling Formats specification 1.0.
OCP = {
    "F4": [0, 0.5, 1, 1.5, 2, 3, 4, 6],
    "F6_E2M3": [step / 8 for step in range(16)] + [step / 4 for step in range(8, 16)] + [s / 2 for s in range(8, 16)],
    "F6_E3M2": [0, 1 / 16, 1 / 8, 3 / 16] + [(4 + m) * 2.0 ** (e - 5) for e in range(1, 8) for m in range(4)],
}


@pytest.mark.parametrize("dtype", TORCH_FLOATS)
def test_eight_bit_floats_are_torchs(dtype: str) -> None:
    theirs = torch.from_numpy(CODES.copy()).view(TORCH_FLOATS[dtype]).float().numpy()
    np.testing.assert_array_equal(as_floats(CODES, dtype), theirs)


@pytest.mark.parametrize("dtype", OCP)
def test_smaller_floats_are_those_of_the_specification(dtype: str) -> None:
    magnitudes = OCP[dtype]
    expected = [*magnitudes, *(-value for value in magnitudes)]
    np.testing.assert_array_equal(as_floats(CODES[: len(expected)], dtype), expected)


@pytest.mark.parametrize("dtype", [*OCP, *TORCH_FLOATS])
def test_the_order_of_codes_is_the_order_of_values(dtype: str) -> None:
    codes = CODES[: 2 * len(OCP[dtype])] if dtype in OCP else CODES
    codes = codes[~np.isnan(as_floats(codes, dtype))]
    values, ordered = as_floats(codes, dtype), ordered_codes(codes, dtype)
    by_value = np.argsort(values, kind="stable")
    steps = np.diff(ordered[by_value].astype(int))
    np.testing.assert_array_equal(steps, np.diff(values[by_value]) > 0)


def test_complex_halves_are_torchs() -> None:
    halves = torch.randn(6, 2).half()
    stored = halves.view(torch.complex32).view(torch.int16).numpy().view(np.uint32).reshape(-1)
    np.testing.assert_array_equal(as_floats(stored, "C32").reshape(6, 2), halves.float().numpy())


def write_raw(path: Path, dtype: str, shape: list[int], raw: bytes) -> Path:
    """Write a safetensors file with one tensor of any dtype name."""
    header = json.dumps({"w": {"dtype": dtype, "shape": shape, "data_offsets": [0, len(raw)]}}).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(struct.pack("<Q", len(header)) + header + raw)
    return path


@pytest.mark.parametrize(("dtype", "bits"), [("F4", 4), ("F6_E2M3", 6), ("F6_E3M2", 6)])
def test_any_range_of_packed_elements_is_unpacked(tmp_path: Path, dtype: str, bits: int) -> None:
    codes = np.random.default_rng(0).integers(0, 1 << bits, 24)
    packed = sum(int(code) << (bits * index) for index, code in enumerate(codes)).to_bytes(24 * bits // 8, "little")
    path = tmp_path / "raw"
    path.write_bytes(b"....." + packed)
    split = 3 * bits // 2
    segments = (Segment(path, 5, split), Segment(path, 5 + split, len(packed) - split))
    tensor = StoredTensor("w", "weight", NOWHERE, dtype, (4, 6), segments)
    files = FilePool()
    for start in range(24):
        for stop in range(start, 25):
            np.testing.assert_array_equal(read_elements(tensor, start, stop, files), codes[start:stop])


@pytest.mark.parametrize("at", [None, 0, 7, 11])
def test_packed_elements_in_boxes_are_compared_where_they_are(tmp_path: Path, at: int | None) -> None:
    """A of [4, 6] halves of bytes in one piece, B of its columns 0 to 3 and 4 to 5, C of shorter rows."""
    codes = np.random.default_rng(1).integers(0, 16, (4, 6)).astype(np.uint8)

    def packed(elements: np.ndarray) -> bytes:
        flat = elements.reshape(-1)
        return bytes(flat[::2] | flat[1::2] << 4)

    whole = bytearray(packed(codes))
    if at is not None:
        whole[at] ^= 1
    (tmp_path / "a").write_bytes(whole)
    (tmp_path / "b").write_bytes(packed(codes[:, :4]) + packed(codes[:, 4:]))
    a = StoredTensor("w", "weight", NOWHERE, "F4", (4, 6), (Segment(tmp_path / "a", 0, 12),))
    left = replace(a, shape=(4, 4), segments=(Segment(tmp_path / "b", 0, 8),))
    right = replace(a, shape=(4, 2), segments=(Segment(tmp_path / "b", 8, 4),))
    b = assemble(replace(a, segments=()), [Chunk((0, 0), left), Chunk((0, 4), right)])
    rows = [replace(left, shape=(1, 4), segments=(Segment(tmp_path / "b", 2 * row, 2),)) for row in range(4)]
    chunks = [Chunk((row, 0), rows[(row + (at is not None)) % 4]) for row in range(4)]
    c = assemble(replace(a, segments=()), [*chunks, Chunk((0, 4), right)])
    for x, y in ((a, b), (b, c), (c, b)):
        assert is_equal((x, y), FilePool()) == (at is None)
    assert measure(a, b, FilePool()).num_differing == (at is not None)


@pytest.mark.parametrize("bits", [64, 63])
def test_large_integers_are_compared_as_integers(bits: int) -> None:
    kind, dtype = (np.uint64, "U64") if bits == 64 else (np.int64, "I64")
    a = np.array([2**53, 7, 2**bits - 1], kind)
    found = _chunk(a, a + np.array([1, 0, 0], kind), dtype, dtype)
    assert (found.num_differing, found.num_unequal, found.max_abs) == (1, 1, 1.0)
    ends = _chunk(np.array([np.iinfo(kind).min], kind), np.array([np.iinfo(kind).max], kind), dtype, dtype)
    assert ends.max_abs == pytest.approx(2.0**64)


@pytest.mark.parametrize(
    ("a", "dtype_a", "b", "dtype_b", "num_unequal"),
    [
        (np.array([2**53 + 1, 5], np.int64), "I64", np.array([2.0**53, 5.0]), "F64", 1),
        (np.array([2.0**53, 5.0]), "F64", np.array([2**53 + 1, 5], np.uint64), "U64", 1),
        (np.array([2**63 - 1], np.int64), "I64", np.array([2.0**63]), "F64", 1),
        (np.array([-1, 3], np.int64), "I64", np.array([2**64 - 1, 3], np.uint64), "U64", 1),
        (np.array([-1, 3], np.int8), "I8", np.array([255, 3], np.uint8), "U8", 1),
        (np.array([-1, 3], np.int8), "I8", np.array([-1, 3], np.int64), "I64", 0),
        (np.array([1 + 0j, 2 + 1j], np.complex64), "C64", np.array([1, 2], np.float32), "F32", 1),
        (np.array([1 + 1j, 2 + 1j], np.complex64), "C64", np.array([1 + 1j, 2 + 1j]), "C128", 0),
        (np.array([1 + 0j], np.complex128), "C128", np.array([1], np.int64), "I64", 0),
        (np.array([0, 1], np.uint8), "F8_E4M3", np.array([0, 1], np.uint8), "U8", 1),
    ],
)
def test_values_of_two_dtypes_are_compared_exactly(
    a: Any, dtype_a: str, b: Any, dtype_b: str, num_unequal: int
) -> None:
    for found in (_chunk(a, b, dtype_a, dtype_b), _chunk(b, a, dtype_b, dtype_a)):
        assert found.num_unequal == found.num_differing == num_unequal


def test_complex_numbers_count_as_one_element_each() -> None:
    a = np.array([1 + 2j, 3 + 4j, complex(np.nan, 1)], np.complex128)
    b = np.array([9 + 9j, 3 + 4j, complex(1, np.nan)], np.complex128)
    found = _chunk(a, b, "C128", "C128")
    assert (found.num_elements, found.num_differing, found.num_unequal, found.num_nan_on_one_side) == (3, 2, 2, 1)
    assert found.sum_squared_differences == pytest.approx(64 + 49)


def test_an_infinity_is_never_within_a_tolerance(tmp_path: Path, save_arrays: Callable[..., Path], diff: Any) -> None:
    base = np.linspace(1, 2, 8, dtype=np.float32)
    for index, (left, right) in enumerate([(np.inf, 3.0), (3.0, -np.inf), (np.inf, -np.inf)]):
        a, b = base.copy(), base.copy()
        a[3], b[3] = left, right
        paths = [save_arrays(tmp_path / f"{name}{index}.safetensors", {"w": v}) for name, v in (("a", a), ("b", b))]
        assert diff(*paths, "--tolerance", "0.5").code == 1
        assert diff(paths[0], paths[0], "--tolerance", "0.5").code == 0
    both = base.copy()
    both[3], b = np.inf, base * np.float32(1.001)
    b[3] = np.inf
    paths = [save_arrays(tmp_path / f"{name}.safetensors", {"w": v}) for name, v in (("a", both), ("b", b))]
    assert diff(*paths, "--tolerance", "0.5").code == 0


def test_squares_beyond_float64_are_not_within_a_tolerance(
    tmp_path: Path, save_arrays: Callable[..., Path], diff: Any
) -> None:
    a, b = np.full(4, 1.4e154), np.full(4, 0.7e154)
    paths = [save_arrays(tmp_path / f"{name}.safetensors", {"w": value}) for name, value in (("a", a), ("b", b))]
    assert diff(*paths, "--tolerance", "0.1").code == 1


DTYPES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "F8_E8M0": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "C64": 8,
    "F4": 0.5, "F6_E2M3": 0.75, "F6_E3M2": 0.75, "F10_NEW": 2,
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_flipped_bit_of_any_dtype_is_a_difference(tmp_path: Path, diff: Any, dtype: str) -> None:
    shape, raw = [2, 4], bytearray(b"\x01" * int(8 * DTYPES[dtype]))
    same = [write_raw(tmp_path / f"{side}.safetensors", dtype, shape, raw) for side in "ab"]
    answer = diff(*same, "--json")
    assert answer.code == 0 and answer.document["compared"] == 1
    for at in (0, len(raw) - 1):
        changed = bytearray(raw)
        changed[at] ^= 1
        write_raw(same[1], dtype, shape, changed)
        answer = diff(*same, "--json")
        assert answer.code == 1
        (entry,) = answer.document["different"]
        assert (entry["tensor"], entry["a"]["dtype"]) == ("w", dtype)
        assert diff(*same).code == diff(*same, "--tolerance", "0").code == 1

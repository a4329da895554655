"""Statistics against a plain reference in float64, for values that stress every branch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bigsci_launch.weights.compare.statistics import CHUNK, NOTHING, Statistics, _chunk, measure
from bigsci_launch.weights.files.elements import as_floats, round_to
from bigsci_launch.weights.files.pool import FilePool
from bigsci_launch.weights.files.tensors import NOWHERE, StoredTensor
from bigsci_launch.weights.formats.safetensors_file import read_safetensors

pytestmark = pytest.mark.slow

BITS = {torch.bfloat16: (np.uint16, "BF16"), torch.float16: (np.uint16, "F16"), torch.float32: (np.uint32, "F32")}
FLOAT_OF = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}


def ulp_reference(a: np.ndarray, b: np.ndarray) -> int:
    """Largest distance on the line of representable values, both zeros being one point."""
    width = 8 * a.itemsize
    top = 1 << (width - 1)

    def position(bits: int) -> int:
        return -(bits - top) if bits >= top else bits

    pairs = zip(a.view(f"u{a.itemsize}").tolist(), b.view(f"u{b.itemsize}").tolist(), strict=True)
    return max((abs(position(x) - position(y)) for x, y in pairs), default=0)


@np.errstate(all="ignore")
def check(bits_a: np.ndarray, bits_b: np.ndarray, dtype: str, found: Statistics) -> None:
    a, b = (as_floats(bits.view(FLOAT_OF[dtype]), dtype).astype(np.float64) for bits in (bits_a, bits_b))
    finite = np.isfinite(a) & np.isfinite(b)
    left, right = a[finite], b[finite]
    assert found.num_elements == a.size
    assert found.num_differing == int((bits_a != bits_b).sum())
    assert found.num_unequal == int(((a != b) & ~(np.isnan(a) & np.isnan(b))).sum())
    assert found.num_nan_on_one_side == int((np.isnan(a) ^ np.isnan(b)).sum())
    assert found.max_abs == pytest.approx(np.abs(left - right).max(initial=0), rel=1e-6, abs=0)
    assert found.max_ulp == ulp_reference(bits_a[finite], bits_b[finite])
    for sum_found, expected in (
        (found.sum_squares_a, (left**2).sum()),
        (found.sum_squares_b, (right**2).sum()),
        (found.sum_squared_differences, ((left - right) ** 2).sum()),
    ):
        assert sum_found == pytest.approx(expected, rel=1e-4, abs=0)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@given(data=st.data())
def test_any_bits_measure_as_the_reference(dtype: str, data: st.DataObject) -> None:
    kind = np.uint32 if dtype == "F32" else np.uint16
    size = data.draw(st.integers(1, 40))
    special = [0, 1, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7FC1, 0x3F80, 0xBF80]
    one = st.one_of(st.integers(0, np.iinfo(kind).max), st.sampled_from([s << 16 for s in special]
                    if dtype == "F32" else special))  # fmt: skip
    bits_a = data.draw(hnp.arrays(kind, size, elements=one))
    bits_b = data.draw(st.one_of(st.just(bits_a.copy()), hnp.arrays(kind, size, elements=one)))
    stored = FLOAT_OF[dtype]
    check(bits_a, bits_b, dtype, _chunk(bits_a.view(stored), bits_b.view(stored), dtype, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_chunks_add_up(tmp_path: Path, save_arrays: Callable[..., Path], dtype: torch.dtype) -> None:
    a = torch.randn(3 * CHUNK + 77).to(dtype)
    b = a.clone()
    b[::1000] *= 1.25
    b[5] = float("nan")
    pair = [load(save_arrays(tmp_path / f"{side}.safetensors", {"w": value})) for side, value in (("a", a), ("b", b))]
    kind, name = BITS[dtype]
    bits = [value.view(torch.int16 if kind is np.uint16 else torch.int32).numpy().view(kind) for value in (a, b)]
    check(bits[0], bits[1], name, measure(*pair, FilePool()))


def load(path: Path) -> StoredTensor:
    entry = read_safetensors(path).entries["w"]
    return StoredTensor("w", "weight", NOWHERE, entry.dtype, entry.shape, (entry.segment,))


def test_integers_and_other_dtypes_are_measured(tmp_path: Path, save_arrays: Callable[..., Path]) -> None:
    a = load(save_arrays(tmp_path / "a.safetensors", {"w": np.array([1, 2, 3], np.int64)}))
    b = load(save_arrays(tmp_path / "b.safetensors", {"w": np.array([1, 2, 9], np.int64)}))
    c = load(save_arrays(tmp_path / "c.safetensors", {"w": np.array([1, 2, 9], np.float32)}))
    found = measure(a, b, FilePool())
    assert (found.num_differing, found.max_abs, found.max_ulp) == (1, 6.0, None)
    assert measure(b, c, FilePool()).num_unequal == 0


@pytest.mark.parametrize("last", [2.0, np.inf])
def test_a_real_number_is_complex_without_imaginary_part(last: float) -> None:
    real, complex_ = np.array([1, last], np.float64), np.array([1, complex(last, 3)], np.complex64)
    for found in (_chunk(real, complex_, "F64", "C64"), _chunk(complex_, real, "C64", "F64")):
        assert (found.num_elements, found.num_differing, found.first) == (2, 1, 1)
        assert (found.num_unequal, found.max_abs, found.worst) == (1, 3.0, 1)


def test_nothing_is_neutral() -> None:
    one = np.array([1.0, 2.0], np.float32)
    found = _chunk(one, one * 2, "F32", "F32")
    assert found + NOTHING == NOTHING + found == found
    assert found.norm_ratio == pytest.approx(2)
    assert found.cosine == pytest.approx(1)


# Rounding rules differ only in ties: the bits that bfloat16 drops are exactly one half.
TIES = st.integers(0, 0xFFFF).map(lambda top: top << 16 | 0x8000)


@given(hnp.arrays(np.uint32, st.integers(1, 50), elements=st.one_of(st.integers(0, 2**32 - 1), TIES)))
def test_rounding_is_torchs(bits: np.ndarray) -> None:
    values = bits.view(np.float32)
    with np.errstate(all="ignore"):
        mine = {dtype: round_to(values, dtype) for dtype in ("BF16", "F16")}
    numbers = ~np.isnan(values)
    for dtype, kind in (("BF16", torch.bfloat16), ("F16", torch.float16)):
        theirs = torch.from_numpy(values.copy()).to(kind).view(torch.int16).numpy().view(np.uint16)
        assert (mine[dtype].view(np.uint16)[numbers] == theirs[numbers]).all()

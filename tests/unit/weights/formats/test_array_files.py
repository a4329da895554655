"""Files of numpy: equal to themselves, every change named, whatever is cut said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.weights.files.mapped import UnreadableFile
from bigsci_launch.weights.files.sources import Source
from bigsci_launch.weights.formats.numpy_file import read_numpy

CODES = ["?", "i1", "u1", "<i2", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16", ">f4", "<U3", "S2", "<M8[s]"]
ARRAYS = {f"dtype {code}": np.arange(6).astype(code).reshape(2, 3) for code in CODES} | {
    "records": np.array([(1, 2.0)], dtype=[("a", "<i4"), ("b", "<f8")]),
    "order": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "order of bytes": np.asfortranarray(np.arange(6).reshape(2, 3).astype(">i4")),
    "empty": np.zeros((0, 3)),
    "one": np.array(2.5),
    "objects": np.array([1, "a", None], dtype=object),
}


def changed(array: np.ndarray) -> np.ndarray:
    """Return an array with one element or, if it has none, the shape changed."""
    found = array.copy(order="K")
    if not found.size:
        return np.zeros((0, 4))
    at = (-1,) * found.ndim
    if found.dtype == object:
        found[at] = "b"
        return found
    raw = bytearray(np.array(found[at], found.dtype).tobytes())
    raw[0] ^= 1
    found[at] = np.frombuffer(bytes(raw), found.dtype)[0]
    return found


def test_every_array_of_a_file_is_compared(tmp_path: Path, diff: Any) -> None:
    np.savez(tmp_path / "a.npz", **ARRAYS)
    np.savez(tmp_path / "b.npz", **ARRAYS)
    assert diff(tmp_path / "a.npz", tmp_path / "b.npz").code == 0
    np.savez(tmp_path / "b.npz", **{name: changed(array) for name, array in ARRAYS.items()})
    document = diff(tmp_path / "a.npz", tmp_path / "b.npz", "--json").document
    found = {entry["tensor"] for entry in document["different"]} | {entry["value"] for entry in document["values"]}
    assert {name.partition(".")[0] for name in found} == ARRAYS.keys()
    assert not document["not_read"]


def test_numbers_of_numpy_and_torch_are_the_same(tmp_path: Path, diff: Any, save_arrays: Any) -> None:
    known = {name: ARRAYS[name] for name in ("dtype <f4", "dtype <i8", "order")}
    np.savez(tmp_path / "a.npz", **known)
    assert diff(tmp_path / "a.npz", save_arrays(tmp_path / "b.safetensors", known)).code == 0


def test_one_array_is_a_file_too(tmp_path: Path, diff: Any) -> None:
    for name, array in (
        ("a", ARRAYS["order"]),
        ("b", np.ascontiguousarray(ARRAYS["order"])),
        ("c", ARRAYS["order"] + 1),
    ):
        np.save(tmp_path / f"{name}.npy", array)
    assert diff(tmp_path / "a.npy", tmp_path / "b.npy").code == 0
    assert diff(tmp_path / "a.npy", tmp_path / "c.npy").code == 1


@given(st.data())
def test_damaged_arrays_are_one_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("npy") / "a.npy"
    np.save(path, ARRAYS[data.draw(st.sampled_from(sorted(ARRAYS)))])
    raw = bytearray(path.read_bytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.integers(1, len(raw)))])
    try:
        read_numpy(Source(path, "", "plain"))
    except UnreadableFile as error:
        assert error.path == path

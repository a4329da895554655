"""Numpy in pickles: one form whatever the protocol and the order in memory, and a readable text."""

from __future__ import annotations

import datetime
import enum
import pickle
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bigsci_launch.weights.objects.arrays import MAX_ROWS, array_of
from bigsci_launch.weights.objects.encode import encode
from bigsci_launch.weights.objects.machine import PickleMachine
from bigsci_launch.weights.objects.texts import show

PROTOCOLS = range(2, 6)


class Mode(enum.Enum):
    """An enum."""

    FAST = 3


def described(value: Any, protocol: int = 4) -> Any:
    return PickleMachine(pickle.dumps(value, protocol), str).run()


def forms(value: Any) -> set[bytes]:
    return {encode(described(value, protocol)) for protocol in PROTOCOLS}


CUBE = np.arange(24.0).reshape(2, 3, 4)


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6),
        np.zeros((0, 3)),
        np.array(2.5),
        np.array(["a", "bc"]),
        np.array([(1, 2.0)], dtype=[("a", "<i4"), ("b", "<f8")]),
        np.float32(0.25),
        np.random.RandomState(3).get_state(),
        np.random.default_rng(3),
        np.frombuffer(b"12345678", np.int32),
    ],
)
def test_every_protocol_gives_one_form(value: Any) -> None:
    assert len(forms(value)) == 1


@pytest.mark.parametrize("axes", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1), (2, 0, 1)])
def test_the_order_in_memory_is_no_difference(axes: tuple[int, ...]) -> None:
    turned = CUBE.transpose(axes)
    assert forms(turned) == forms(np.ascontiguousarray(turned))
    assert forms(turned) != forms(turned + (np.indices(turned.shape).sum(0) == 5))


def test_an_array_of_too_many_rows_keeps_its_order() -> None:
    tall = np.asfortranarray(np.zeros((MAX_ROWS + 1, 2), np.uint8))
    node = described(tall)
    assert array_of(node) is None
    assert encode(node) == encode(described(tall))
    tall[5, 1] = 1
    assert encode(node) != encode(described(tall))


@given(hnp.arrays(st.sampled_from(["<f4", "<i8", "|u1", ">i2"]), hnp.array_shapes(min_side=0)), st.data())
def test_arrays_are_equal_exactly_if_their_bytes_are(array: np.ndarray, data: st.DataObject) -> None:
    assert forms(np.asfortranarray(array)) == forms(array)
    if array.size:
        other = array.copy()
        at = data.draw(st.integers(0, array.nbytes - 1))
        other.view(np.uint8).reshape(-1)[at] ^= 1
        assert forms(other).isdisjoint(forms(array))


@pytest.mark.parametrize(
    "a, b",
    [
        (np.zeros(2, "<f4"), np.zeros(2, ">f4")),
        (np.zeros(2, np.float32), np.zeros(2, np.int32)),
        (np.zeros((2, 3)), np.zeros((3, 2))),
        (np.zeros(3), np.zeros(3).view(np.recarray)),
        (np.array(1.0), np.float64(1.0)),
        (np.datetime64(1, "s"), np.datetime64(1, "h")),
        (np.zeros(2, [("a", "<f4"), ("b", "<f4")]), np.zeros(2, [("a", "<f4"), ("c", "<f4")])),
    ],
)
def test_equal_bytes_of_another_kind_are_a_difference(a: Any, b: Any) -> None:
    assert forms(a).isdisjoint(forms(b))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.arange(624), "array int64 [624]"),
        (np.array([[1, 2]], np.uint8), "array uint8 [1, 2]: 1, 2"),
        (np.zeros((3, 4), ">f4"), "array big-endian float32 [3, 4]"),
        (np.array([True]), "array bool [1]: True"),
        (np.zeros(3, [("a", "<f4"), ("b", "<f4")]), "array record of 2 fields [3]"),
        (np.array(["ab", "c"]), "array U2 [2]"),
        (np.float64(0.001), "0.001 (float64)"),
        (np.complex64(1), "8 bytes (complex64)"),
        (np.dtype("f2"), "dtype float16"),
        (datetime.datetime(2026, 1, 2, 3, 4, 5), "2026-01-02 03:04:05"),
        (datetime.date(2026, 1, 2), "2026-01-02"),
        (PurePosixPath("/a/b"), "/a/b"),
        (PurePosixPath("a/b"), "a/b"),
        (slice(1, None), "slice(1, None, None)"),
        (range(3), "range(0, 3, 1)"),
        (1 + 2j, "complex(1.0, 2.0)"),
        (Mode.FAST, f"{__name__}.Mode(3)"),
        ({"b", "a"}, "['a', 'b']"),
    ],
)
def test_values_have_a_readable_text(value: Any, text: str) -> None:
    assert {show(described(value, protocol)) for protocol in PROTOCOLS} == {text}

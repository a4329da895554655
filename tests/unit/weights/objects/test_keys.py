"""Keys of dictionaries: whatever they are, different keys are different entries."""

from __future__ import annotations

import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch


class Kind(enum.Enum):
    """Keys of a kind of their own."""

    FIRST = 1
    SECOND = 2


@pytest.mark.parametrize(
    "a, b",
    [
        (b"k", b"j"),
        (("a", "x" * 80), ("a", "y" * 80)),
        (tuple(range(20)), tuple(range(1, 21))),
        (Kind.FIRST, Kind.SECOND),
        (2**300, 2**300 + 1),
        (0, "0"),
        (None, "None"),
        (1, True),
        (frozenset({1, 2}), frozenset({1, 3})),
    ],
    ids=str,
)
def test_another_key_is_another_entry(a: Any, b: Any, tmp_path: Path, diff: Callable[..., Any]) -> None:
    for name, key in (("a", a), ("b", b)):
        torch.save({"w": torch.ones(2), "state": {key: 3}}, tmp_path / f"{name}.pt")
    assert diff(tmp_path / "a.pt", tmp_path / "a.pt").code == 0
    assert diff(tmp_path / "a.pt", tmp_path / "b.pt").code == 1


def test_a_list_is_no_dictionary_of_numbers(tmp_path: Path, diff: Callable[..., Any]) -> None:
    torch.save({"w": [torch.ones(2)]}, tmp_path / "a.pt")
    torch.save({"w": {0: torch.ones(2)}}, tmp_path / "b.pt")
    answer = diff(tmp_path / "a.pt", tmp_path / "b.pt")
    assert answer.code == 1
    assert "w.(keys)" in answer.text


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_the_protocol_changes_nothing(protocol: int, is_zip: bool, tmp_path: Path, diff: Callable[..., Any]) -> None:
    """Protocol 2 writes `__builtin__.long` for int, makes bytes by calls, and module classes with their source."""
    tree = {"w": torch.ones(2), "kind": int, "none": b"", "some": b"x", "array": bytearray(b"yz"), "range": range(3)}
    tree["layer"] = torch.nn.ReLU()
    torch.save(tree, tmp_path / "a.pt", pickle_protocol=2)
    torch.save(tree, tmp_path / "b.pt", pickle_protocol=protocol, _use_new_zipfile_serialization=is_zip)
    answer = diff(tmp_path / "a.pt", tmp_path / "b.pt")
    assert answer.code == 0, answer.text

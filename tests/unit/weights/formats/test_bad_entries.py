"""One bad or unknown tensor is one entry: not read, or compared by its parts. The rest of the file is sound."""

from __future__ import annotations

import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bigsci_launch.weights.files.elements import read_elements
from bigsci_launch.weights.files.pool import FilePool
from bigsci_launch.weights.files.sources import CheckpointMetadata, Source
from bigsci_launch.weights.formats.contents import read_contents

GOOD = torch.arange(4.0)


class Rebuilt:
    """Pickles as a tensor with a layout that torch would not write."""

    def __init__(self, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.layout = (offset, shape, strides)

    def __reduce__(self) -> tuple[Any, ...]:
        storage = torch.storage.TypedStorage(wrap_storage=GOOD.untyped_storage(), dtype=torch.float32, _internal=True)
        return torch._utils._rebuild_tensor_v2, (storage, *self.layout, False, OrderedDict())


def rewritten(path: Path, change: Callable[[str, bytes], bytes | None]) -> Path:
    """Change the records of a zip; None removes one."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            changed = change(name.partition("/")[2], data)
            if changed is not None:
                archive.writestr(name, changed)
    return path


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (Rebuilt(0, (-1,), (1,)), "impossible"),
        (Rebuilt(0, (2, 2), (1,)), "impossible"),
        (Rebuilt(0, (5,), (1,)), "shorter than the tensor"),
        (Rebuilt(3, (2,), (1,)), "shorter than the tensor"),
        (Rebuilt(-1, (2,), (1,)), "impossible"),
        (Rebuilt(0, (2,), (-1,)), "impossible"),
        (Rebuilt(0, (2**40, 2**40), (2**40, 1)), "shorter than the tensor"),
    ],
)
@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
def test_an_impossible_tensor_is_one_entry(tmp_path: Path, diff: Any, bad: Rebuilt, why: str, is_zip: bool) -> None:
    tree = {"good": torch.ones(3), "bad": bad, "lr": 0.1}
    for name in "ab":
        torch.save(tree, tmp_path / f"{name}.pt", _use_new_zipfile_serialization=is_zip)
    answer = diff(tmp_path / "a.pt", tmp_path / "b.pt", "--json")
    assert answer.code == 4
    document = answer.document
    assert (document["compared"], document["values_compared"], document["unreadable"]) == (1, 1, [])
    assert [entry["entry"] for entry in document["not_read"]] == ["bad", "bad"]
    assert why in document["not_read"][0]["why"]


@pytest.mark.parametrize(
    "change",
    [
        lambda name, data: None if name == "data/1" else data,
        lambda name, data: data[:-1] if name == "data/1" else data,
    ],
    ids=["missing", "short"],
)
def test_a_lost_storage_is_one_entry(tmp_path: Path, diff: Any, change: Any) -> None:
    for name in "ab":
        torch.save({"good": torch.ones(3), "bad": torch.zeros(3)}, tmp_path / f"{name}.pt")
    rewritten(tmp_path / "b.pt", change)
    answer = diff(tmp_path / "a.pt", tmp_path / "b.pt", "--json")
    assert answer.code == 4
    (entry,) = answer.document["not_read"]
    assert (entry["entry"], entry["type"], entry["file"]) == ("bad", "F32 [3]", str(tmp_path / "b.pt"))
    assert not answer.document["different"]
    assert answer.document["compared"] == 1


def renamed(old: bytes, new: bytes) -> Callable[[str, bytes], bytes]:
    assert len(old) == len(new)
    return lambda name, data: data.replace(old, new) if name == "data.pkl" else data


@pytest.mark.parametrize(
    ("dtype", "change"),
    [
        (torch.float8_e5m2, renamed(b"float8_e5m2", b"float8_e9m9")),
        (torch.float32, renamed(b"FloatStorage", b"FluidStorage")),
        (torch.float32, renamed(b"_rebuild_tensor_v2", b"_rebuild_tensor_v9")),
    ],
    ids=["dtype", "storage", "function"],
)
def test_what_nobody_knows_is_compared_by_its_parts(tmp_path: Path, diff: Any, dtype: torch.dtype, change: Any) -> None:
    values = torch.arange(1.0, 5)
    paths = []
    for name, number in (("a", 0), ("b", 0), ("c", 8)):
        path = tmp_path / f"{name}.pt"
        torch.save({"w": (values + number).to(dtype), "good": torch.ones(2, dtype=torch.float64)}, path)
        paths.append(rewritten(path, change))
    assert diff(paths[0], paths[1]).code == 0
    answer = diff(paths[0], paths[2], "--json")
    assert answer.code == 1
    assert all(entry["tensor"].startswith("w.") for entry in answer.document["different"])
    torch.save({"w": values.to(dtype)[:3], "good": torch.ones(2, dtype=torch.float64)}, tmp_path / "d.pt")
    assert diff(paths[0], rewritten(tmp_path / "d.pt", change)).code == 1


def test_what_follows_a_storage_of_unknown_length_is_not_read(tmp_path: Path, diff: Any) -> None:
    """The older container has its storages one after the other, and their lengths in elements."""
    good = {f"good {number}": torch.full((2,), number + 0.5, dtype=torch.float64) for number in range(12)}
    for name in "ab":
        path = tmp_path / f"{name}.pt"
        torch.save({"w": torch.ones(2), **good}, path, _use_new_zipfile_serialization=False)
        path.write_bytes(path.read_bytes().replace(b"FloatStorage", b"FluidStorage"))
    answer = diff(tmp_path / "a.pt", tmp_path / "b.pt", "--json")
    assert answer.code == 4
    assert "w.storage" in {entry["entry"] for entry in answer.document["not_read"]}
    contents = read_contents(Source(tmp_path / "a.pt", "a", "plain"), CheckpointMetadata())
    found = {tensor.name: tensor for tensor in contents.tensors}
    last = found.pop("record after the last storage")
    assert last.num_bytes
    for name, tensor in found.items():
        assert read_elements(tensor, 0, 2, FilePool()).tolist() == good[name].tolist()

"""Files of torch.save: what is read equals what torch wrote, and nothing in them runs."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from bigsci_launch.weights.files.elements import read_elements
from bigsci_launch.weights.files.mapped import UnreadableFile
from bigsci_launch.weights.files.pool import FilePool
from bigsci_launch.weights.files.tensors import NOWHERE
from bigsci_launch.weights.formats.torch_file import read_torch_file, stored, walk_tensors

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool, torch.complex64,
]  # fmt: skip


def bytes_read(path: Path) -> dict[str, bytes]:
    """Return every tensor of a file, by name, as the bytes of its elements in row-major order."""
    file, files = read_torch_file(path), FilePool()
    found = {name: stored(file, name, "weight", NOWHERE, node) for name, node in walk_tensors(file.tree)}
    return {name: read_elements(t, 0, t.num_elements, files).tobytes() for name, t in found.items()}


def bytes_of(tensor: torch.Tensor) -> bytes:
    raw: bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return raw


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
def test_every_dtype_and_layout_reads_as_torch_wrote_it(tmp_path: Path, is_zip: bool) -> None:
    base = torch.randn(6, 4)
    tree: dict[str, Any] = {str(dtype): (base * 3).to(dtype) for dtype in DTYPES}
    views = {"view": base[2:5], "transposed": base.t(), "every other": base[::2, 1::2], "scalar": torch.tensor(2.5)}
    tree |= views | {"empty": torch.empty(0, 3), "parameter": torch.nn.Parameter(base.clone())}
    torch.save(tree, tmp_path / "w.pt", _use_new_zipfile_serialization=is_zip)
    assert bytes_read(tmp_path / "w.pt") == {name: bytes_of(tensor) for name, tensor in tree.items()}


def test_tensors_inside_containers_are_found_by_their_path(tmp_path: Path) -> None:
    torch.save({"state": {0: {"m": torch.ones(2)}}, "list": [torch.zeros(3), 5], "lr": 0.1}, tmp_path / "w.pt")
    assert sorted(bytes_read(tmp_path / "w.pt")) == ["list.0", "state.0.m"]


class Bomb:
    """Writes a file when it is unpickled by an ordinary unpickler."""

    def __init__(self, target: Path) -> None:
        self.target = str(target)

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self.target}",))


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
def test_code_in_a_pickle_does_not_run(tmp_path: Path, is_zip: bool) -> None:
    victim = tmp_path / "victim"
    torch.save({"w": torch.ones(2), "bomb": Bomb(victim)}, tmp_path / "w.pt", _use_new_zipfile_serialization=is_zip)
    assert list(bytes_read(tmp_path / "w.pt")) == ["w"]
    assert not victim.exists()
    torch.load(tmp_path / "w.pt", weights_only=False)
    assert victim.exists(), "the file was harmless: the test shows nothing"


def test_builtins_and_attributes_of_modules_are_inert(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    code = f"open({str(victim)!r}, 'w')"
    pickles = (
        b"cbuiltins\neval\n(V" + code.encode() + b"\ntR.",
        b"\x80\x04\x8c\x08builtins\x8c\x04exec\x93(V" + code.encode() + b"\ntR.",
        b"c__builtin__\ngetattr\n(cos\nsystem\nV__call__\ntR(Vtouch " + str(victim).encode() + b"\ntR.",
    )
    for number, data in enumerate(pickles):
        path = tmp_path / f"{number}.pt"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", data)
        read_torch_file(path)
        assert not victim.exists()


def test_a_tree_that_holds_itself_ends(tmp_path: Path) -> None:
    tree: dict[str, Any] = {"w": torch.ones(2)}
    tree["self"] = tree
    torch.save(tree, tmp_path / "w.pt")
    assert list(bytes_read(tmp_path / "w.pt")) == ["w"]


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
def test_every_truncation_is_one_clear_error(tmp_path: Path, is_zip: bool) -> None:
    torch.save({"a": torch.randn(64), "b": torch.randn(64)}, tmp_path / "w", _use_new_zipfile_serialization=is_zip)
    whole = (tmp_path / "w").read_bytes()
    for length in range(0, len(whole) - 1, 37):
        path = tmp_path / "cut.pt"
        path.write_bytes(whole[:length])
        with pytest.raises(UnreadableFile) as caught:
            bytes_read(path)
        assert caught.value.path == path


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "empty file"),
        (b"hello", "not a torch.save file"),
        (pickle.dumps({"w": [1, 2]}), "not a torch.save file"),
    ],
)
def test_other_files_are_named_for_what_they_are(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "w.pt"
    path.write_bytes(content)
    with pytest.raises(UnreadableFile, match=why):
        read_torch_file(path)


def test_a_zip_of_something_else_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "w.pt", "w") as archive:
        archive.writestr("readme.txt", "no tensors here")
    with pytest.raises(UnreadableFile, match=r"no data\.pkl"):
        read_torch_file(tmp_path / "w.pt")


def test_a_tensor_that_leaves_its_storage_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(4)}, tmp_path / "w.pt")
    file = read_torch_file(tmp_path / "w.pt")
    (name, node) = next(walk_tensors(file.tree))
    for changes in ({"shape": (5,)}, {"offset": 1}, {"offset": -1}, {"strides": (-1,)}, {"storage": "7"}):
        from dataclasses import replace

        with pytest.raises(UnreadableFile):
            stored(file, name, "weight", NOWHERE, replace(node, **changes))


def test_half_a_character_in_a_file_can_be_shown(tmp_path: Path, diff: Any) -> None:
    for name, value in (("a.pt", 1), ("b.pt", 2)):
        torch.save({"w": torch.ones(2), "\udc80": value, "text": f"\udc80{value}"}, tmp_path / name)
    answer = diff(tmp_path / "a.pt", tmp_path / "b.pt")
    assert answer.code == 1
    assert "\\udc80" in answer.text

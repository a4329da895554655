"""Compressed records of zips: read as if they were not, unless they are damaged, too large, or there is no room."""

from __future__ import annotations

import errno
import io
import os
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bigsci_launch.weights.compare import work
from bigsci_launch.weights.formats import inflate
from bigsci_launch.weights.formats.torch_file import read_torch_file

pytestmark = pytest.mark.slow

Tree = dict[str, Any]
Change = Callable[[bytes], bytes]


def tree() -> Tree:
    torch.manual_seed(0)
    return {
        "w": torch.randint(0, 256, (300, 40), dtype=torch.uint8),
        "rows": torch.arange(60.0).reshape(6, 10).t(),
        "b": torch.zeros(70_000),
        "none": torch.zeros(0, 3),
        "step": 7,
    }


def packed(path: Path, held: Tree | io.BytesIO, method: int = zipfile.ZIP_DEFLATED) -> Path:
    """Write a file of torch, its records compressed; given a stream, the file in it."""
    stream = held if isinstance(held, io.BytesIO) else io.BytesIO()
    if stream is not held:
        torch.save(held, stream)
    with zipfile.ZipFile(stream) as source, zipfile.ZipFile(path, "w", method) as target:
        for info in source.infolist():
            # Compressed, the hash of the contents would not have one length.
            is_hash = info.filename.endswith("serialization_id")
            target.writestr(info.filename, b"0" if is_hash else source.read(info))
    return path


def plain(path: Path, held: Tree) -> Path:
    torch.save(held, path)
    return path


def deflated(data: bytes) -> bytes:
    deflater = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return deflater.compress(data) + deflater.flush()


def with_record(path: Path, name: str, change: Change) -> Path:
    """Write a zip of one deflated record and data.pkl again, the bytes of that record changed as they are stored."""
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(name)
    raw = path.read_bytes()
    at = info.header_offset + 30 + len(name)
    assert raw[at - len(name) : at] == name.encode()
    new = change(raw[at : at + info.compress_size])
    assert len(new) == info.compress_size
    path.write_bytes(raw[:at] + new + raw[at + info.compress_size :])
    return path


def names(document: Any, kind: str) -> set[str]:
    return {entry["tensor" if kind == "different" else "entry"] for entry in document[kind]}


def test_a_compressed_file_is_read_as_one_that_is_not(tmp_path: Path, diff: Any) -> None:
    a, b = packed(tmp_path / "a.pt", tree()), plain(tmp_path / "b.pt", tree())
    assert a.stat().st_size < b.stat().st_size
    other = tree()
    other["w"][3, 5] += 1
    other["rows"][4, 2] += 1
    for first, second in ((a, b), (b, a), (a, a), (a, packed(tmp_path / "again.pt", tree()))):
        answer = diff(first, second, "--json")
        assert (answer.code, answer.document["compared"]) == (0, 4)
    for second in (packed(tmp_path / "c.pt", other), plain(tmp_path / "d.pt", other)):
        answer = diff(a, second, "--json")
        assert answer.code == 1
        assert names(answer.document, "different") == {"w", "rows"}
        found = {entry["tensor"]: (entry["fraction"], entry["first_at"]) for entry in answer.document["different"]}
        assert found == {"w": (1 / 12_000, [3, 5]), "rows": (1 / 60, [4, 2])}
    assert diff("--audit", a).code == 0


def test_compressed_arrays_of_numpy_are_read(tmp_path: Path, diff: Any) -> None:
    rows = np.asfortranarray(np.arange(12.0).reshape(3, 4))
    arrays: Tree = {"w": np.arange(9000.0), "order": rows, "none": np.zeros(0)}
    np.savez_compressed(tmp_path / "a.npz", **arrays)
    np.savez(tmp_path / "b.npz", **arrays)
    assert diff(tmp_path / "a.npz", tmp_path / "b.npz").code == 0
    arrays["order"][2, 1] += 1
    np.savez_compressed(tmp_path / "c.npz", objects=np.array([{"a": 1}], dtype=object), **arrays)
    document = diff(tmp_path / "a.npz", tmp_path / "c.npz", "--json").document
    (entry,) = document["different"]
    assert (entry["tensor"], entry["first_at"], document["not_read"]) == ("order", [2, 1], [])
    assert "objects.0.a" in {entry["value"] for entry in document["values"]}


def test_a_compressed_checkpoint_of_deepspeed_is_read_as_another(tmp_path: Path, tiny: Any, diff: Any) -> None:
    """The optimizer's step is read apart from the comparison. Flat tensors of other ranks begin elsewhere."""
    folder = tiny(optimizer_step=3.0).write(tmp_path / "a")
    questions = (("--audit", folder), (folder, tiny(optimizer_step=3.0, dp=3).write(tmp_path / "b")))
    before = [diff(*question, "--json").document for question in questions]
    for path in folder.glob("*.pt"):
        packed(path, io.BytesIO(path.read_bytes()))
    assert [diff(*question, "--json").document for question in questions] == before
    assert before[0]["findings"][0]["pattern"] == "optimizer step restarted" and before[1]["equal"]


DAMAGES: dict[str, Change] = {
    "other data": lambda data: deflated(bytes(range(256))).ljust(len(data), b"\0"),
    "another end": lambda data: data[:-2] + bytes([data[-2] ^ 0x40, data[-1]]),
    "one bit of what cannot be compressed": lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:],
    "first block": lambda data: b"\xff" + data[1:],
    "bytes behind the end": lambda data: data[:-9] + deflated(b"")[:9].ljust(9, b"\1"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_is_never_equal(tmp_path: Path, diff: Any, damage: str) -> None:
    """Neither to a sound file nor to the same damage; its other tensors are compared."""
    sound = plain(tmp_path / "sound.pt", tree())
    a, b = (with_record(packed(tmp_path / f"{name}.pt", tree()), "archive/data/0", DAMAGES[damage]) for name in "ab")
    for first, second in ((a, sound), (sound, a), (a, b), (a, a)):
        answer = diff(first, second, "--json")
        assert answer.code == 4, answer.text
        assert names(answer.document, "not_read") == {"w"}
        assert "damaged" in answer.document["not_read"][0]["why"]
        assert answer.document["compared"] == 3
    assert diff("--audit", a).code == 4


def test_bytes_after_the_end_of_the_deflated_data_are_a_damage(tmp_path: Path, diff: Any) -> None:
    """Another reader could see them, and nothing would compare them."""
    data = np.arange(50, dtype=np.uint8).tobytes()
    for name, extra in (("a", b"one"), ("b", b"two")):
        np.savez_compressed(tmp_path / f"{name}.npz", w=np.arange(50))
        with zipfile.ZipFile(tmp_path / f"{name}.npz", "w") as archive:
            archive.writestr("w.npy", data)
        raw = bytearray((tmp_path / f"{name}.npz").read_bytes())
        stored = deflated(data) + extra
        body, directory = raw.index(data), raw.index(b"PK\x01\x02")
        made = bytearray(raw[:body] + stored + raw[directory:])
        moved = len(stored) - len(data)
        for at, field in ((0, 8), (directory + moved, 10)):
            struct.pack_into("<H", made, at + field, zipfile.ZIP_DEFLATED)
            struct.pack_into("<L", made, at + field + 10, len(stored))
        struct.pack_into("<L", made, len(made) - 6, directory + moved)
        (tmp_path / f"{name}.npz").write_bytes(made)
    answer = diff(tmp_path / "a.npz", tmp_path / "b.npz")
    assert (answer.code, "damaged" in answer.text) == (4, True)


def test_a_method_that_is_not_deflate_is_named(tmp_path: Path, diff: Any) -> None:
    answer = diff(packed(tmp_path / "a.pt", tree(), zipfile.ZIP_LZMA), plain(tmp_path / "b.pt", tree()))
    assert (answer.code, "compressed by method 14" in answer.text) == (4, True)


def test_without_room_there_is_one_line(tmp_path: Path, diff: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w+b", buffering=0) as full:
        monkeypatch.setattr(tempfile, "TemporaryFile", lambda: full)
        answer = diff(packed(tmp_path / "a.pt", tree()), plain(tmp_path / "b.pt", tree()))
    assert (answer.code, "a.pt: " in answer.text, os.strerror(errno.ENOSPC).lower() in answer.text) == (4, True, True)


def test_the_temporary_file_has_no_name_and_goes_with_the_last_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    file = read_torch_file(packed(tmp_path / "a.pt", tree()))
    mapped = f"{folder}/"
    assert not list(folder.iterdir())
    assert mapped in Path("/proc/self/maps").read_text()
    del file
    assert mapped not in Path("/proc/self/maps").read_text()


def test_what_is_inflated_is_read_in_small_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a record may be in the last bytes of a step, or of a portion of the file."""
    path = packed(tmp_path / "a.pt", tree())
    whole = read_torch_file(path)
    for chunk in (1, 7, 1000):
        monkeypatch.setattr(inflate, "CHUNK", chunk)
        found = read_torch_file(path)
        for key in "0123":
            one, other = whole.records[key].inflated, found.records[key].inflated
            assert (one is None) == (other is None)
            assert one is None or other is None or other.memory[:] == one.memory[:]


def test_portions_of_the_files_say_nothing_about_what_is_inflated(
    tmp_path: Path, diff: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two files may be the same where a tensor is in the temporary file, and differ where it is stored."""
    monkeypatch.setattr(work, "PORTION_BYTES", 512)
    noise = np.random.default_rng(0).integers(0, 256, (8, 200)).astype(np.uint8)
    a = packed(tmp_path / "a.pt", {f"w{row}": torch.tensor(noise[row]) for row in range(8)})
    for row in range(8):
        other = noise.copy()
        other[row, 7] ^= 1
        b = packed(tmp_path / "b.pt", {f"w{row}": torch.tensor(other[row]) for row in range(8)})
        assert a.stat().st_size == b.stat().st_size
        answer = diff(a, b, "--json")
        assert (answer.code, names(answer.document, "different")) == (1, {f"w{row}"})

"""Hostile files end with a sentence that names them and exit code 4, whatever they are compared with."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .hostile_files import (
    DIGEST_FILES,
    EIGHT,
    ENTRY,
    SAFETENSORS,
    SOUND,
    TEXTS,
    TORCH,
    legacy,
    safetensors,
    storage,
    tensor,
    torch_zip,
    tree,
)

LONGEST_ANSWER = 3000


def require_refusal(diff: Any, path: Path, sound: Path, *, file: Path | None = None) -> None:
    """Require exit code 4 and the name of the file, against a sound file, against itself, and from an audit."""
    named = str(file or path)
    for arguments in ((path, sound), (sound, path), (path, path), ("--audit", path)):
        answer = diff(*arguments)
        said = answer.text + answer.talk
        assert answer.code == 4, said
        assert named in said
        assert len(said) < LONGEST_ANSWER, said
        assert said.replace("\n", "").replace("─", "").isascii(), said


def put(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("case", SAFETENSORS)
def test_headers_of_safetensors(tmp_path: Path, diff: Any, case: str) -> None:
    sound = put(tmp_path, "sound.safetensors", SOUND[".safetensors"])
    require_refusal(diff, put(tmp_path, "w.safetensors", SAFETENSORS[case]()), sound)


@pytest.mark.slow
@pytest.mark.parametrize("case", TORCH)
def test_zips_and_pickles(tmp_path: Path, diff: Any, case: str) -> None:
    sound = put(tmp_path, "sound.pt", SOUND[".pt"])
    require_refusal(diff, put(tmp_path, "w.pt", TORCH[case]()), sound)


@pytest.mark.parametrize("case", DIGEST_FILES)
def test_digests(tmp_path: Path, diff: Any, case: str) -> None:
    sound = put(tmp_path / "sound", "rank-0000.digests.json", SOUND[".digests.json"])
    path = put(tmp_path / "bad", "rank-0000.digests.json", DIGEST_FILES[case])
    require_refusal(diff, path.parent, sound.parent, file=path)


@pytest.mark.parametrize("case", TEXTS)
def test_printed_tensors(tmp_path: Path, diff: Any, case: str) -> None:
    sound = put(tmp_path, "sound.txt", SOUND[".txt"])
    require_refusal(diff, put(tmp_path, "w.txt", TEXTS[case]), sound)


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(path))  # a socket's name has at most 107 characters


def make_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_loop(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".txt"])
@pytest.mark.parametrize("make", [make_fifo, make_socket, make_device, make_loop, Path.mkdir, Path.touch])
def test_what_is_no_file_of_bytes(tmp_path: Path, diff: Any, make: Callable[[Path], object], suffix: str) -> None:
    path = tmp_path / f"w{suffix}"
    make(path)
    require_refusal(diff, path, put(tmp_path, f"sound{suffix}", SOUND[suffix]))


# What a file contains, and bytes in it that decide a value: one of them is changed.
ODD = {
    "expanded.pt": (torch_zip(tree(w=tensor((2**36,), (0,)))), EIGHT),
    "expanded rows.pt": (torch_zip(tree(w=tensor((2**36, 2), (0, 1)))), EIGHT),
    "complex128.pt": (torch_zip(tree(w=tensor((1,), (1,), kind="ComplexDoubleStorage")), b"complex128 value"), b"x128"),
    "no elements.pt": (torch_zip(tree(w=tensor((0, 2**62), (1, 1)))), b"nothing"),
    "32 dimensions.safetensors": (safetensors({"w": {**ENTRY, "shape": [1] * 31 + [2]}}), EIGHT),
    "more bytes.pt": (legacy(tree(w=tensor((2,), (1,))), data=struct.pack("<q", 2) + EIGHT + b"more"), b"more"),
    "storage.pt": (torch_zip(tree(w=storage())), EIGHT),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_files_that_are_sound(tmp_path: Path, diff: Any, name: str) -> None:
    data, decisive = ODD[name]
    path, copy = put(tmp_path, name, data), put(tmp_path / "copy", name, data)
    assert [diff(path, copy).code, diff("--audit", path).code] == [0, 0]
    if decisive in data:
        at = data.index(decisive)
        put(tmp_path / "copy", name, data[:at] + b"\x05" + data[at + 1 :])
        assert diff(path, copy).code == 1


def test_a_name_cannot_change_what_a_terminal_shows(tmp_path: Path, diff: Any) -> None:
    for side, name in (("a", "\x1b[31mred\r\n\ud800"), ("b", "\\x1b[31mred\\r\\n\\ud800")):
        put(tmp_path, f"{side}.safetensors", safetensors({name: ENTRY}))
    answer = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert answer.code in (1, 4)
    assert "\x1b" not in answer.text + answer.talk
    assert diff(tmp_path / "a.safetensors", tmp_path / "a.safetensors").code == 0

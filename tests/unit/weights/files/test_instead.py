"""What takes the place of a file of weights is named, with what to do: LFS pointers, web pages, zeros."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.errors import CheckpointError
from bigsci_launch.weights.files.instead import BLOCK_BYTES, what_instead
from bigsci_launch.weights.locate.locate import open_weights
from tests.support.texts import has_parts

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d" * 32 + b"\nsize 8388608\n"
PAGE = b"\n<!DOCTYPE html>\n<html lang='en'><body>Sign in</body></html>\n"
SAYS = {
    POINTER: ("Git LFS pointer", "8.0 MiB", "git lfs pull"),
    POINTER[:43] + b"oid sha256:12\n": ("Git LFS pointer", "git lfs pull"),
    PAGE: ("web page", "download it again"),
    b"\xef\xbb\xbf<html><head>": ("web page",),
    b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>': ("a server", "download it again"),
    b'{"error":"Repository not found"}': ("a server",),
    bytes(4096): ("4.0 KiB of zeros",),
    bytes(BLOCK_BYTES + 5): ("1.0 MiB of zeros",),
}
WEIGHTS = [
    b"",
    b"x",
    bytes(4095) + b"\1",
    bytes(BLOCK_BYTES) + b"\1",
    b"<",
    b"{}",
    b"version",
    b"<p>",
    b"PK\3\4" + bytes(9),
]


@pytest.mark.parametrize("content", SAYS, ids=lambda content: repr(content[:16]))
def test_what_takes_the_place_of_weights_is_named(content: bytes) -> None:
    assert has_parts(what_instead(content) or "", *SAYS[content])


@pytest.mark.parametrize("content", WEIGHTS, ids=lambda content: repr(content[:16]))
def test_anything_else_is_left_to_its_reader(content: bytes) -> None:
    assert what_instead(content) is None


@given(st.binary(max_size=200), st.sampled_from([*SAYS]), st.integers(0, 80))
def test_any_bytes_are_looked_at(noise: bytes, known: bytes, at: int) -> None:
    for content in (noise, known[:at] + noise + known[at:200]):
        found = what_instead(content)
        assert found is None or "\n" not in found


@pytest.mark.parametrize("name", ["w.safetensors", "w.bin", "w.pt", "w.npy", "w.npz", "w.jit"])
def test_every_reader_says_it(diff: Any, tmp_path: Path, name: str) -> None:
    for content in (POINTER, PAGE, bytes(100)):
        (tmp_path / name).write_bytes(content)
        if name == "w.jit":
            with pytest.raises(CheckpointError) as caught:
                open_weights(tmp_path / name)
            assert has_parts(caught.value.message, name, *SAYS.get(content, ("zeros",)))
            continue
        answer = diff(tmp_path / name, tmp_path / name)
        assert answer.code == 4 and has_parts(answer.text + answer.talk, name, *SAYS.get(content, ("zeros",)))


def test_shards_that_an_index_names_and_the_index_itself(
    diff: Any, tmp_path: Path, save_arrays: Callable[..., Path]
) -> None:
    save_arrays(tmp_path / "a.safetensors", {"v": np.ones(2)})
    (tmp_path / "b.safetensors").write_bytes(POINTER)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"v": "a.safetensors", "w": "b.safetensors"}}))
    for named in (tmp_path, index):
        found = diff(named, named, "--json").document["unreadable"]
        assert {Path(each["file"]).name for each in found} == {"b.safetensors"}
        assert all("git lfs pull" in each["why"] for each in found)
    index.write_bytes(POINTER)
    with pytest.raises(CheckpointError, match="git lfs pull"):
        open_weights(index)


def test_weights_that_are_zero_are_weights(diff: Any, tmp_path: Path, save_arrays: Callable[..., Path]) -> None:
    save_arrays(tmp_path / "a.safetensors", {"v": np.zeros(2048)})
    np.savez_compressed(tmp_path / "b.npz", v=np.zeros(2048))
    for name in ("a.safetensors", "b.npz"):
        assert diff(tmp_path / name, tmp_path / name).code == 0

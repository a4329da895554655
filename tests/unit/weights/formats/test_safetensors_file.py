"""Headers of safetensors files: read as the library wrote them, and refused if they promise more data than there is."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bigsci_launch.weights.files.mapped import UnreadableFile
from bigsci_launch.weights.formats.safetensors_file import read_safetensors


def write(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_entries_lie_where_the_library_put_them(tmp_path: Path, save_arrays: Callable[..., Path]) -> None:
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(4, dtype=np.int64)}
    path = save_arrays(tmp_path / "w.safetensors", arrays, {"rank": "3"})
    file, raw = read_safetensors(path), path.read_bytes()
    assert file.metadata == {"rank": "3"}
    for name, array in arrays.items():
        segment = file.entries[name].segment
        assert file.entries[name].shape == array.shape
        assert raw[segment.offset : segment.offset + segment.num_bytes] == array.tobytes()


@pytest.mark.parametrize(
    ("header", "data", "why"),
    [
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234", "truncated: its header promises"),
        ({"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, b"12345678", r"8 bytes for F32 \[3\]"),
        ({"w": {"dtype": "F31", "shape": [3], "data_offsets": [0, 8]}}, b"12345678", "unknown dtype F31 share bytes"),
        ({"w": {"dtype": "F32", "shape": [2]}}, b"", "data_offsets"),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}, b"", "broken safetensors header"),
        ([1, 2], b"", "not an object"),
        (b"{nonsense", b"", "not JSON"),
    ],
)
def test_broken_headers_are_named(tmp_path: Path, header: object, data: bytes, why: str) -> None:
    with pytest.raises(UnreadableFile, match=why):
        read_safetensors(write(tmp_path / "w.safetensors", header, data))


def test_files_cut_short_are_named(tmp_path: Path, save_arrays: Callable[..., Path]) -> None:
    path = save_arrays(tmp_path / "w.safetensors", {"a": np.arange(100, dtype=np.float32)})
    whole = path.read_bytes()
    for length in (0, 5, 30, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(UnreadableFile):
            read_safetensors(path)


def test_a_header_of_absurd_length_is_no_safetensors_file(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(UnreadableFile, match="not a safetensors file"):
        read_safetensors(tmp_path / "w.safetensors")


def test_metadata_are_values_but_what_every_library_writes(
    tmp_path: Path, save_arrays: Callable[..., Path], diff: Callable[..., Any]
) -> None:
    arrays = {"a": np.arange(3, dtype=np.float32)}
    bare = save_arrays(tmp_path / "bare.safetensors", arrays)
    usual = save_arrays(tmp_path / "usual.safetensors", arrays, {"format": "pt"})
    other = save_arrays(tmp_path / "other.safetensors", arrays, {"format": "flax"})
    odd = save_arrays(tmp_path / "odd.safetensors", arrays, {"tp": "first"})
    assert diff(bare, usual).code == 0
    assert diff(usual, other).code == 1
    assert diff(usual, odd).code == 1


def test_dumps_of_other_ranks_under_one_name_differ(
    tmp_path: Path, save_arrays: Callable[..., Path], diff: Callable[..., Any]
) -> None:
    arrays = {"a": np.arange(3, dtype=np.float32)}
    for side, first in (("a", "0"), ("b", "1")):
        for rank, tp in ((0, first), (1, "1")):
            metadata = {"pp": "0", "tp": tp, "dp": "0"}
            save_arrays(tmp_path / side / f"rank-{rank:04d}.safetensors", arrays, metadata)
    answer = diff(tmp_path / "a", tmp_path / "b")
    assert answer.code == 1
    assert "coordinate" in answer.text


def test_a_dump_with_an_impossible_coordinate_is_not_read(
    tmp_path: Path, save_arrays: Callable[..., Path], diff: Callable[..., Any]
) -> None:
    for rank, tp in ((0, "0"), (1, "1?")):
        metadata = {"pp": "0", "tp": tp, "dp": "0"}
        save_arrays(tmp_path / f"rank-{rank:04d}.safetensors", {"a": np.ones(2)}, metadata)
    answer = diff(tmp_path, tmp_path)
    assert answer.code == 4
    assert "impossible coordinate ('1?')" in answer.text


def test_a_rank_whose_dump_is_missing_is_a_difference(
    tmp_path: Path, save_arrays: Callable[..., Path], diff: Callable[..., Any]
) -> None:
    """Its shards have other shapes than the first rank's, so that they form no common whole."""
    for side, ranks in (("a", 2), ("b", 1)):
        for rank in range(ranks):
            metadata = {"pp": "0", "tp": str(rank), "dp": "0"}
            array = np.ones((2, 2)) if rank else np.ones(3)
            save_arrays(tmp_path / side / f"rank-{rank:04d}.safetensors", {"a": array}, metadata)
    assert diff(tmp_path / "a", tmp_path / "b").code == 1
    assert diff(tmp_path / "b", tmp_path / "a").code == 1


def test_metadata_that_only_one_side_has_is_a_difference_in_a_folder_with_other_files(
    tmp_path: Path, save_arrays: Callable[..., Path], diff: Callable[..., Any]
) -> None:
    arrays = {"a": np.arange(3, dtype=np.float32)}
    for side, metadata in (("a", None), ("b", {"trained_by": "somebody"})):
        save_arrays(tmp_path / side / "model.safetensors", arrays, metadata)
        torch.save({"last_epoch": 3}, tmp_path / side / "scheduler.pt")
    assert diff(tmp_path / "a", tmp_path / "b").code == 1

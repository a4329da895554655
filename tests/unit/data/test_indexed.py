"""The indexed dataset: what is written is read back, and damage is reported."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bigsci_launch.data.indexed import IndexedWriter, bin_path, idx_path, open_dataset, token_dtype
from bigsci_launch.errors import DataError

documents = st.lists(st.lists(st.integers(0, 65535), min_size=1, max_size=20), min_size=1, max_size=8)


def write(prefix: Path, texts: list[list[int]], dtype: type = np.uint16) -> None:
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for tokens in texts:
            writer.add_document(tokens)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=documents, dtype=st.sampled_from([np.uint16, np.int32, np.int64]))
def test_what_is_written_comes_back(tmp_path: Path, texts: list[list[int]], dtype: type) -> None:
    write(tmp_path / "d", texts, dtype)
    dataset = open_dataset(tmp_path / "d")
    assert [dataset.sequence(i).tolist() for i in range(len(texts))] == texts
    assert dataset.tokens.tolist() == [token for text in texts for token in text]
    assert dataset.num_documents == len(texts)
    assert dataset.documents.tolist() == list(range(len(texts) + 1))


def test_layout_is_megatrons(tmp_path: Path) -> None:
    write(tmp_path / "d", [[1, 2, 3], [4]])
    index = idx_path(tmp_path / "d").read_bytes()
    assert index == (
        b"MMIDIDX\x00\x00"
        + struct.pack("<Q", 1)
        + struct.pack("<B", 8)
        + struct.pack("<QQ", 2, 3)
        + struct.pack("<2i", 3, 1)
        + struct.pack("<2q", 0, 6)
        + struct.pack("<3q", 0, 1, 2)
    )
    assert bin_path(tmp_path / "d").read_bytes() == struct.pack("<4H", 1, 2, 3, 4)


def test_dtype_follows_megatrons_limit() -> None:
    assert token_dtype(65499) == np.uint16
    assert token_dtype(65500) == np.int32


def test_a_failed_write_leaves_the_old_dataset_and_no_litter(tmp_path: Path) -> None:
    write(tmp_path / "d", [[1, 2]])
    with pytest.raises(RuntimeError), IndexedWriter(tmp_path / "d", np.dtype(np.uint16)) as writer:
        writer.add_document([7])
        raise RuntimeError("the disk is on fire")
    assert open_dataset(tmp_path / "d").tokens.tolist() == [1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.bin", "d.idx"]


def truncate(path: Path, by: int) -> None:
    path.write_bytes(path.read_bytes()[:-by])


def patch(path: Path, offset: int, content: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[offset : offset + len(content)] = content
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: idx_path(p).unlink(), r"d\.idx: no such file"),
        (lambda p: bin_path(p).unlink(), r"d\.bin: no such file"),
        (lambda p: patch(idx_path(p), 0, b"PK"), r"d\.idx: .*bad magic"),
        (lambda p: patch(idx_path(p), 9, b"\x02"), r"version 2"),
        (lambda p: patch(idx_path(p), 17, b"\x07"), r"dtype code 7"),
        (lambda p: idx_path(p).write_bytes(idx_path(p).read_bytes()[:20]), r"d\.idx: "),
        (lambda p: truncate(idx_path(p), 3), r"d\.idx: .* 79 .* 2 .* 3 .* 82"),
        (lambda p: truncate(bin_path(p), 2), r"d\.bin: .* 6 .* 8"),
        (lambda p: bin_path(p).write_bytes(b""), r"d\.bin: .* 0 "),
    ],
)
def test_each_damage_is_one_clear_error(tmp_path: Path, damage, message: str) -> None:  # type: ignore[no-untyped-def]
    prefix = tmp_path / "d"
    write(prefix, [[1, 2, 3], [4]])
    damage(prefix)
    with pytest.raises(DataError, match=message):
        open_dataset(prefix)


def test_an_empty_dataset_opens(tmp_path: Path) -> None:
    write(tmp_path / "d", [])
    assert open_dataset(tmp_path / "d").num_tokens == 0

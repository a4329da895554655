"""Mapped files: bytes compared wherever they are cut, files closed when they must be, changes noticed."""

from __future__ import annotations

import ctypes
import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.weights.files.mapped import MappedFile, UnreadableFile
from bigsci_launch.weights.files.pool import FilePool, equal_segments
from bigsci_launch.weights.files.tensors import Segment, cut_segments


def num_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def cut(path: Path, data: bytes, cuts: list[int]) -> tuple[Segment, ...]:
    path.write_bytes(b"head" + data)
    edges = sorted({0, len(data), *(at % (len(data) + 1) for at in cuts)})
    return tuple(Segment(path, 4 + a, b - a) for a, b in itertools.pairwise(edges))


@given(
    data=st.binary(min_size=1, max_size=300),
    cuts_a=st.lists(st.integers(0, 300), max_size=5),
    cuts_b=st.lists(st.integers(0, 300), max_size=5),
    change=st.one_of(st.none(), st.integers(0, 299)),
)
def test_segments_are_equal_when_their_bytes_are(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, cuts_a: list[int], cuts_b: list[int], change: int | None
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    other = bytearray(data)
    if change is not None:
        other[change % len(other)] ^= 1
    a, b = cut(folder / "a", data, cuts_a), cut(folder / "b", bytes(other), cuts_b)
    assert equal_segments(a, b, FilePool()) == (change is None)
    assert not equal_segments(a, b[:-1], FilePool())
    files = FilePool()
    first = min(len(data), 3)
    taken = b"".join(files.get(s.path).memory[s.offset : s.offset + s.num_bytes] for s in cut_segments(a, 1, first))
    assert taken == data[1:first]


def test_a_file_that_became_shorter_is_named_not_read(tmp_path: Path) -> None:
    path = tmp_path / "w"
    path.write_bytes(b"x" * 100)
    whole = (Segment(path, 0, 100),)
    path.write_bytes(b"x" * 50)
    with pytest.raises(UnreadableFile, match="shorter than a moment ago"):
        equal_segments(whole, whole, FilePool())


def test_a_file_that_becomes_shorter_while_it_is_mapped_is_not_touched(tmp_path: Path) -> None:
    """Without the check, the system would end this process."""
    path = tmp_path / "w"
    path.write_bytes(b"x" * 100_000)
    files, whole = FilePool(), (Segment(path, 0, 100_000),)
    assert equal_segments(whole, whole, files)
    with path.open("r+b") as stream:
        stream.truncate(0)
    with pytest.raises(UnreadableFile, match="shorter than a moment ago"):
        equal_segments(whole, whole, files)


def test_a_pool_with_a_limit_holds_that_many_files(tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(40)]
    for path in paths:
        path.write_bytes(path.name.encode())
    before = num_open()
    files = FilePool(limit=5)
    for path in paths * 2:
        assert files.get(path).memory[:] == path.name.encode()
    assert num_open() <= before + 5
    files.close_all()
    assert num_open() <= before


def test_a_file_in_use_is_not_the_one_that_goes(tmp_path: Path) -> None:
    """The first file is always one side: opening the other may not close it."""
    paths = [tmp_path / str(number) for number in range(9)]
    for path in paths:
        path.write_bytes(b"same")
    files = FilePool(limit=2)
    for path in paths:
        assert equal_segments((Segment(paths[0], 0, 4),), (Segment(path, 0, 4),), files)


def test_an_address_is_that_of_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(b"hello weights")
    with MappedFile(tmp_path / "w") as file:
        assert ctypes.string_at(file.address, len(file)) == b"hello weights"

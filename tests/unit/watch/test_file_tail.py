"""What was appended to a file that others write, rotate, truncate or flood."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest

from bigsci_launch.watch.read.tail import LONGEST_LINE, MOST_BYTES, FileTail


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "main_log.txt"
    path.write_text("one\n")
    return path


def append(path: Path, text: str) -> None:
    with path.open("a") as stream:
        stream.write(text)


def test_only_what_is_new_is_read(log: Path) -> None:
    tail = FileTail(log)
    assert tail.read().lines == ("one",)
    assert not tail.read().grown
    append(log, "two\nthree\n")
    assert tail.read().lines == ("two", "three")


def test_a_torn_line_is_a_sign_of_life_and_waits_for_its_end(log: Path) -> None:
    tail = FileTail(log)
    tail.read()
    append(log, "iteration 12/ 100 | lm lo")
    torn = tail.read()
    assert (torn.lines, torn.grown) == ((), True)
    append(log, "ss: 2.5 |\nnext")
    assert tail.read().lines == ("iteration 12/ 100 | lm loss: 2.5 |",)


def test_a_rotated_file_is_read_from_its_beginning(log: Path) -> None:
    tail = FileTail(log)
    tail.read()
    log.rename(log.with_suffix(".1"))
    log.write_text((line := "a new file, longer than the old one") + "\n")
    found = tail.read()
    assert (found.lines, found.is_new_file) == ((line,), True)


def test_a_rotated_file_may_begin_as_the_old_one(log: Path) -> None:
    tail = FileTail(log)
    tail.read()
    log.rename(log.with_suffix(".1"))
    log.write_text("one\ntwo\n")
    assert tail.read().lines == ("one", "two")


@pytest.mark.parametrize("text", ["x\n", "another text that is longer than what was there\n"])
def test_a_file_that_was_truncated_and_written_again_is_noticed(log: Path, text: str) -> None:
    tail = FileTail(log)
    tail.read()
    inode = log.stat().st_ino
    log.write_text(text)
    assert log.stat().st_ino == inode
    found = tail.read()
    assert (found.lines, found.is_new_file) == ((text.strip(),), True)


def test_of_a_flood_of_progress_bars_the_end_is_read(log: Path) -> None:
    tail = FileTail(log)
    tail.read()
    with log.open("ab") as stream:
        stream.truncate(1 << 30)  # a gigabyte, sparse
        stream.seek(0, os.SEEK_END)
        stream.write(b"\r 41%| 41/100\r 42%| 42/100\nlast\n")
    found = tail.read()
    assert found.lines[-3:] == (" 41%| 41/100", " 42%| 42/100", "last")
    assert found.num_skipped > (1 << 30) - 2 * MOST_BYTES
    assert sum(map(len, found.lines)) <= MOST_BYTES


def test_a_line_that_never_ends_does_not_fill_the_memory(log: Path) -> None:
    tail = FileTail(log)
    tail.read()
    tracemalloc.start()
    for _ in range(64):
        append(log, "x" * LONGEST_LINE)
        assert tail.read().grown
    append(log, "the end\n")
    (line,) = tail.read().lines
    assert tracemalloc.get_traced_memory()[1] < 16 * LONGEST_LINE
    tracemalloc.stop()
    assert len(line) == LONGEST_LINE and line.endswith("the end")


def test_only_the_end_of_an_old_file_is_read(log: Path) -> None:
    append(log, "".join(f"line {number}\n" for number in range(10000)))
    found = FileTail(log, history=95).read()
    assert found.lines[-1] == "line 9999"
    assert all(line.startswith("line ") for line in found.lines), "a line was cut"
    assert found.num_skipped == log.stat().st_size - 95


def test_binary_junk_is_no_trouble(log: Path) -> None:
    tail = FileTail(log)
    tail.read()
    with log.open("ab") as stream:
        stream.write(bytes(range(256)) + b"\n")
    assert tail.read().trouble is None


def test_a_file_that_cannot_be_read_is_said_to_be_so(log: Path) -> None:
    tail = FileTail(log)
    tail.read()
    log.unlink()
    found = tail.read()
    assert found.trouble is not None and "No such file" in found.trouble
    log.mkdir()
    assert "directory" in (tail.read().trouble or "")

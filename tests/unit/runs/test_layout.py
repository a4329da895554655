"""The run directory: order of attempts, and files that are whole or absent."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bigsci_launch.errors import BslError, RunDirError
from bigsci_launch.pages import write_page
from bigsci_launch.runs.layout import RunDir, find_runs, open_run, rank_files, read_json, write_json
from bigsci_launch.typed_path import write_typed

from ..other_users import AS_ROOT, MALLORY, acting_as, make_shared


def make_run(path: Path) -> RunDir:
    run = RunDir(path)
    write_json(run.record, {"name": path.name})
    return run


def test_attempts_are_ordered_with_their_requeues(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for name in ("0010", "0002", "0002.r10", "0002.r9", "0001"):
        run.attempt(name).make()
    assert [attempt.name for attempt in run.attempts()] == ["0001", "0002", "0002.r9", "0002.r10", "0010"]
    assert run.next_attempt_name() == "0011"


@pytest.mark.parametrize("write", [write_typed, write_page])
def test_a_failed_write_leaves_the_old_file(tmp_path: Path, write: Callable[[Path, str], None]) -> None:
    path = tmp_path / "file"
    write(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write(path, "new \ud800")
    assert path.read_text() == "old"
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


def test_a_link_stays_and_what_is_open_in_this_process_is_written_into(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_typed(link, "new")
    assert (link.is_symlink(), target.read_text()) == (True, "new")

    for place in ("/dev/fd", "/proc/self/fd"):
        reader, writer = os.pipe()
        link.unlink()
        link.symlink_to(f"{place}/{writer}")
        write_typed(link, "through")
        assert os.read(reader, 100) == b"through"
        os.close(reader)
        os.close(writer)
    write_typed(Path(os.devnull), "away")
    with pytest.raises(OSError, match="No such file"):
        write_typed(Path("/dev/fd/status.html"), "x")


@pytest.mark.parametrize("has_reader", [True, False])
def test_nothing_is_written_into_a_pipe_that_somebody_has_put_there(tmp_path: Path, has_reader: bool) -> None:
    pipe = tmp_path / "status.html"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK) if has_reader else None
    with pytest.raises(BslError, match="not a regular file" if has_reader else "no such device"):
        write_page(pipe, "page")
    assert pipe.is_fifo()
    if reader is not None:
        assert os.read(reader, 100) == b""
        os.close(reader)


@AS_ROOT
def test_a_link_that_a_colleague_has_made_is_not_followed(tmp_path: Path) -> None:
    shared, victim, own = make_shared(tmp_path / "shared", 0o3775), tmp_path / ".bashrc", tmp_path / "own"
    victim.write_text("old")
    with acting_as(MALLORY):
        (shared / "status.html").symlink_to(victim)
    own.symlink_to(shared / "status.html")
    for link in (shared / "status.html", own):
        with pytest.raises(BslError, match=str(link)):
            write_page(link, "page")
    assert victim.read_text() == "old" and own.is_symlink()
    os.chown(shared, 0, 0)
    shared.chmod(0o755)
    write_page(own, "page")
    assert victim.read_text() == "page", "nobody else may have put the link where it is"


def test_only_run_directories_are_found(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    (tmp_path / "b").mkdir()
    assert [run.name for run in find_runs(tmp_path)] == ["a"]
    assert find_runs(tmp_path / "missing") == []
    with pytest.raises(RunDirError, match=str(tmp_path / "b")):
        open_run(tmp_path / "b")


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"a":' * 300 + "0" + "}" * 300, '{"a": 1e999}', '["\\ud800"]'])
def test_a_broken_document_is_one_clear_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(RunDirError, match=str(path)):
        read_json(path)
    with pytest.raises(RunDirError, match="No such file"):
        read_json(tmp_path / "y.json")


def test_files_of_ranks_come_in_the_order_of_ranks(tmp_path: Path) -> None:
    for name in ("rank-10000.json", "rank-9999.json", "rank-0003.json", "rank-0003.log", ".rank-4.json.x", "run.json"):
        (tmp_path / name).touch()
    assert list(rank_files(tmp_path, ".json").items()) == [
        (3, tmp_path / "rank-0003.json"),
        (9999, tmp_path / "rank-9999.json"),
        (10000, tmp_path / "rank-10000.json"),
    ]
    assert rank_files(tmp_path / "missing", ".json") == {}


def test_no_umask_opens_a_folder_that_a_record_needs(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        write_json(tmp_path / "requests" / "done.json", {})
    finally:
        os.umask(before)
    assert (tmp_path / "requests").stat().st_mode & 0o777 == 0o755

"""Files that others may touch: whole or absent, of exactly one mode, and never through a link; JSON, with bounds."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch import safe_files
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.safe_files import (
    open_folder,
    open_lock,
    open_stream,
    parse_json,
    read_file,
    read_json,
    write_file,
    write_in,
)
from bigsci_launch.train.rank.events import RankReport
from bigsci_launch.train.rank.identity import RankIdentity

from .house.conftest import standalone
from .other_users import ALICE, AS_ROOT, MALLORY, PROJECT, acting_as, make_shared


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


# ------------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o077])
def test_files_and_folders_have_their_mode_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    with umask(mask):
        write_file(tmp_path / "a", "text", 0o640)
        safe_files.append_line(tmp_path / "b", "line")
        safe_files.make_folder(tmp_path / "c", 0o750)
    assert [mode_of(tmp_path / name) for name in "abc"] == [0o640, 0o644, 0o750]


def test_a_link_is_replaced_and_its_target_stays(tmp_path: Path) -> None:
    target = tmp_path / "private.rc"
    target.write_text("export MYTOKEN=abc")
    target.chmod(0o600)
    (tmp_path / "nodes.json").symlink_to(target)
    write_file(tmp_path / "nodes.json", "{}")
    assert (target.read_text(), mode_of(target)) == ("export MYTOKEN=abc", 0o600)
    assert not (tmp_path / "nodes.json").is_symlink()


def test_nobody_can_foresee_the_temporary_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    with open_folder(tmp_path) as folder:
        real = os.rename
        monkeypatch.setattr(os, "rename", lambda a, b, **where: (names.append(a), real(a, b, **where)))
        for _ in range(2):
            write_in(folder, "file", "text")
    assert len(set(names)) == 2 and str(os.getpid()) not in {name.rpartition(".")[2] for name in names}


def test_files_and_their_folder_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(stat.S_IFMT(os.fstat(handle).st_mode)))
    write_file(tmp_path / "file", "text")
    assert synced == [stat.S_IFREG, stat.S_IFDIR]


def test_what_a_recovery_waits_for_does_not_wait_for_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exit record of the runner, and why a rank has left the step."""

    def stand_still(_handle: int) -> None:
        raise AssertionError("a full journal keeps whoever syncs for seconds")

    monkeypatch.setattr(os, "fsync", stand_still)
    run = RunDir(tmp_path)
    attempt = run.attempt("0001")
    RankReport(RankIdentity(1, 2, "host", "node", run, attempt)).fail(RuntimeError("a peer is gone"))
    with standalone() as load:
        load("rank_process").write_record(attempt.exit_file(0), {"code": 7})
    assert read_json(attempt.error_file(1))["message"] == "a peer is gone"
    assert read_json(attempt.exit_file(0)) == {"code": 7}


def test_a_full_disk_leaves_the_old_file_and_nothing_else(small_disk: Path) -> None:
    path = small_disk / "file"
    write_file(path, "old")
    with pytest.raises(OSError, match="No space left"):
        write_file(path, "x" * 1_000_000)
    assert (path.read_text(), names_in(small_disk)) == ("old", ["file"])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 KiB."""
    argv = ["mount", "-t", "tmpfs", "-o", "size=64k", "bsl-test", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(argv, capture_output=True).returncode != 0:
        pytest.skip("only root can mount a small disk, and not everywhere")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_readers_never_see_half_a_file(tmp_path: Path) -> None:
    path, over = tmp_path / "file", threading.Event()
    texts = {letter * 50_000 for letter in "abc"}
    write_file(path, "a" * 50_000)

    def write(text: str) -> None:
        while not over.is_set():
            write_file(path, text)

    writers = [threading.Thread(target=write, args=(text,)) for text in texts]
    for writer in writers:
        writer.start()
    try:
        seen = [read_file(path).decode() for _ in range(100)]
    finally:
        over.set()
        for writer in writers:
            writer.join()
    assert set(seen) <= texts
    assert names_in(tmp_path) == ["file"]


# ------------------------------------------------------------------------------------------- reading


@pytest.mark.timeout(10)
def test_only_regular_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(__file__)
    os.mkfifo(tmp_path / "pipe")
    for path, why in ((tmp_path / "link", "symbolic link"), (tmp_path / "pipe", "regular"), (Path("/dev/zero"), "reg")):
        with pytest.raises(OSError, match=why):
            read_file(path)
    (tmp_path / "large").write_bytes(b"x" * 11)
    with pytest.raises(OSError, match="larger than 10 bytes"):
        read_file(tmp_path / "large", 10)


@pytest.mark.timeout(10)
def test_a_stream_is_opened_without_waiting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("one\ntwo\n")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for name in ("pipe", "socket", "/dev/zero"):
            for follow in (False, True):
                with pytest.raises(OSError, match="not a regular file"):
                    open_stream(tmp_path / name, follow=follow)
    with pytest.raises(IsADirectoryError):
        open_stream(tmp_path)
    with pytest.raises(OSError, match="symbolic link"):
        open_stream(tmp_path / "link")
    with open_stream(tmp_path / "link", follow=True) as stream:
        assert list(stream) == [b"one\n", b"two\n"] and os.get_blocking(stream.fileno())
    with safe_files.open_folder(tmp_path) as folder, open_stream("file", folder=folder) as stream:
        assert stream.read(3) == b"one"


@pytest.mark.timeout(10)
def test_nothing_stays_open_of_what_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(50):
        with pytest.raises(OSError):
            open_stream(tmp_path / "pipe")
    assert len(list(Path("/proc/self/fd").iterdir())) < before + 50


@pytest.mark.timeout(10)
def test_lines_are_only_appended_to_regular_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(OSError):
            safe_files.append_line(tmp_path / name, "line")
    assert (tmp_path / "file").read_text() == ""


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(NotADirectoryError), open_folder(tmp_path / "link"):
        pass
    with open_folder(tmp_path / "link", follow=True) as folder:
        assert os.stat("link", dir_fd=folder)


# ------------------------------------------------------------------------------------------- JSON

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.sampled_from(['[{"', '\\"]']),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)
pieces = st.sampled_from(["[", "]", "{", "}", '"', "\\", '"a":', ",", "1e999", "-1", "NaN", '"\\ud800"', " ", "\x00"])


def outcome(read: Any, text: str | bytes) -> Any:
    try:
        return repr(read(text))
    except ValueError:
        return ValueError


@given(values, st.booleans())
def test_json_is_read_as_json_reads_it(value: Any, is_ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii)
    assert outcome(lambda text: parse_json(text, allow_nan=True), text) == outcome(json.loads, text)
    assert outcome(parse_json, text) in (outcome(json.loads, text), ValueError)


@given(st.lists(pieces, max_size=300).map("".join))
def test_odd_texts_are_read_as_json_reads_them_or_refused(text: str) -> None:
    assert outcome(parse_json, text) in (outcome(json.loads, text), ValueError)
    assert outcome(parse_json, text.encode()) in (outcome(json.loads, text), ValueError)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "[" * 300, '{"a":' * 100_000, "[" * 201 + "]" * 201, '[{"":' * 101 + "0" + "}]" * 101, "]" * 300,
     "1e999", "-1e999", "[NaN]", "-Infinity", '"\\ud800"', '{"\\udfff": 1}', "", "{", b"\xff", b"\x00", "9" * 5000],
    ids=lambda text: repr(text[:12]),
)  # fmt: skip
def test_what_nobody_should_read_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


@pytest.mark.parametrize(
    "text",
    ["[" * 200 + "]" * 200, json.dumps(["]" * 300, "[" * 300, '\\"[' * 300]), json.dumps([[[]]] * 500),
     '"\\ud83d\\ude00"'],
    ids=lambda text: repr(text[:12]),
)  # fmt: skip
def test_brackets_count_only_outside_of_strings(text: str) -> None:
    assert parse_json(text) == json.loads(text)


def test_a_closing_bracket_in_a_string_hides_no_depth() -> None:
    hidden = '["]",' * 300 + "0" + ',"["]' * 300
    assert json.loads(hidden)
    with pytest.raises(ValueError, match="deeper"):
        parse_json(hidden)


def test_losses_may_be_nan_where_that_is_said() -> None:
    assert repr(parse_json("[NaN, 1e999]", allow_nan=True)) == "[nan, inf]"
    with pytest.raises(ValueError):
        parse_json("[" * 100_000, allow_nan=True)


def test_a_file_is_bounded(tmp_path: Path) -> None:
    write_file(tmp_path / "file", "[1, 2]")
    assert read_json(tmp_path / "file") == [1, 2]
    with pytest.raises(OSError):
        read_json(tmp_path / "file", 3)
    with pytest.raises(ValueError):
        parse_json("[1, 2]", 3)


def test_it_starts_without_what_takes_long_to_import() -> None:
    code = "import sys, safe_files; print(*sys.modules)"
    folder = Path(safe_files.__file__).parents[1] / "diagnostics"
    argv = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(folder)!r}); {code}"]
    loaded = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
    assert not {"json", "contextlib", "pathlib", "typing", "random"} & set(loaded)


# ------------------------------------------------------------------------------------------- locks of a folder


@AS_ROOT
@pytest.mark.parametrize("mask", [0o002, 0o022, 0o077])
@pytest.mark.parametrize("mode", [0o2775, 0o775])
def test_each_member_of_a_folder_may_lock_it(tmp_path: Path, mask: int, mode: int) -> None:
    lock = make_shared(tmp_path / "shared", mode) / ".nodes.json.lock"
    for user in (ALICE, MALLORY):
        with acting_as(user, mask):
            os.close(open_lock(lock))
    assert (mode_of(lock), lock.stat().st_gid) == (0o660, PROJECT)


@AS_ROOT
def test_a_lock_that_only_its_owner_may_write_still_locks(tmp_path: Path) -> None:
    lock = make_shared(tmp_path / "shared") / ".nodes.json.lock"
    lock.touch()
    lock.chmod(0o644)
    with acting_as(MALLORY):
        os.close(open_lock(lock))


def test_a_lock_of_a_private_folder_is_private_and_no_link(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    os.close(open_lock(tmp_path / "lock"))
    assert mode_of(tmp_path / "lock") == 0o600
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(OSError):
        open_lock(tmp_path / "link")
    assert not (tmp_path / "target").exists()

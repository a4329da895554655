"""The cluster's directory: where it is, who owns it, and that only one command at a time works in it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import bigsci_launch.minicluster.directory as cluster_directory
from bigsci_launch.errors import ClusterError
from bigsci_launch.minicluster.directory import MAX_PATH_LENGTH, ClusterDir, default_directory


def test_the_variable_names_the_directory_and_home_is_the_default():
    assert default_directory({"BSL_CLUSTER_DIR": "/tmp/here", "HOME": "/root"}).path == Path("/tmp/here")
    assert default_directory({"HOME": "/root"}).path == Path("/root/.bsl-cluster")
    assert default_directory({"BSL_CLUSTER_DIR": "", "HOME": "/root"}).path == Path("/root/.bsl-cluster")


def test_a_relative_directory_is_relative_to_the_caller(monkeypatch):
    monkeypatch.chdir("/tmp")
    assert default_directory({"BSL_CLUSTER_DIR": "here"}).path == Path("/tmp/here")


def test_a_path_that_is_too_long_for_sockets_is_refused():
    with pytest.raises(ClusterError, match=f"at most {MAX_PATH_LENGTH}") as caught:
        default_directory({"BSL_CLUSTER_DIR": "/tmp/" + "x" * MAX_PATH_LENGTH})
    assert "BSL_CLUSTER_DIR" in str(caught.value.hint)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("path", ["/tmp/a b", "/tmp/%n", "/tmp/x;y", "/tmp/a'b", "/tmp/a\nb", "/tmp/é", "/tmp/#c"])
def test_a_path_that_slurm_would_misread_is_refused(path: str):
    with pytest.raises(ClusterError, match="letters, digits"):
        default_directory({"BSL_CLUSTER_DIR": path})


@pytest.fixture
def directory(tmp_path: Path) -> ClusterDir:
    return ClusterDir(tmp_path / "cluster")


def test_a_claimed_directory_is_a_cluster_until_it_is_removed(directory: ClusterDir):
    with directory.locked():
        assert not directory.is_cluster
        directory.claim()
        assert directory.is_cluster
        directory.logs.mkdir()
        directory.output("slurmd").write_text("words\n")
        directory.remove()
    assert not directory.path.exists()


def test_a_directory_is_claimed_once(directory: ClusterDir):
    with directory.locked():
        directory.claim()
        with pytest.raises(ClusterError, match="already"):
            directory.claim()


def test_a_directory_with_other_files_is_neither_claimed_nor_removed(directory: ClusterDir):
    directory.path.mkdir()
    (directory.path / "thesis.tex").write_text("x")
    with directory.locked():
        with pytest.raises(ClusterError, match="not empty"):
            directory.claim()
        with pytest.raises(ClusterError, match="nothing was removed"):
            directory.remove_if_empty()
    assert (directory.path / "thesis.tex").read_text() == "x"


def test_removal_does_not_follow_links(directory: ClusterDir, tmp_path: Path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("x")
    with directory.locked():
        directory.claim()
        (directory.path / "state").symlink_to(tmp_path / "precious")
        directory.remove()
    assert (tmp_path / "precious" / "file").exists()


def test_two_commands_do_not_work_in_one_directory(directory: ClusterDir):
    with directory.locked(), pytest.raises(ClusterError, match="another `bsl cluster` is running"), directory.locked():
        pass
    with directory.locked():
        pass


def test_a_directory_that_was_removed_meanwhile_is_not_worked_in(directory: ClusterDir, monkeypatch):
    import fcntl

    flock = fcntl.flock

    def quicker_down(handle: int, how: int) -> None:
        directory.path.rmdir()
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", quicker_down)
    with pytest.raises(ClusterError, match="is running"), directory.locked():
        pass


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ClusterError, match="Not a directory"), ClusterDir(tmp_path / "file" / "c").locked():
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a folder of another user")
def test_a_folder_of_somebody_else_is_not_worked_in(directory: ClusterDir):
    directory.path.mkdir()
    os.chown(directory.path, 65534, -1)
    with pytest.raises(ClusterError, match="not yours alone \\(uid 65534"), directory.locked():
        pass


@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_a_folder_that_others_may_write_is_not_worked_in(directory: ClusterDir, mode: int):
    directory.path.mkdir()
    directory.path.chmod(mode)
    with pytest.raises(ClusterError, match=f"not yours alone .*{mode:04o}"), directory.locked():
        pass


def test_an_ordinary_user_s_folder_is_private(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(cluster_directory, "is_root", lambda: False)
    made, wider = ClusterDir(tmp_path / "a" / "made"), ClusterDir(tmp_path / "wider")
    before = os.umask(0)
    try:
        with made.locked():
            made.claim()
        wider.path.mkdir(mode=0o711)
    finally:
        os.umask(before)
    assert made.path.stat().st_mode & 0o777 == 0o700
    assert made.path.parent.stat().st_mode & 0o777 == 0o755
    with wider.locked(), pytest.raises(ClusterError, match=r"mode 0711"):
        wider.claim()
    assert not wider.is_cluster


def test_a_place_where_others_may_exchange_the_folder_is_refused(tmp_path: Path):
    shared = tmp_path / "shared"
    shared.mkdir()
    directory = ClusterDir(shared / "new" / "c")
    directory.require_safe_place()
    shared.chmod(0o1777)
    directory.require_safe_place()
    for mode in (0o2775, 0o777):
        shared.chmod(mode)
        with pytest.raises(ClusterError, match=f"below {shared}, where others may exchange it"):
            directory.require_safe_place()
    (tmp_path / "link").symlink_to(shared)
    with pytest.raises(ClusterError, match="exchange it"):
        ClusterDir(tmp_path / "link" / "c").require_safe_place()

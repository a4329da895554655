"""The folder of rings is in one that others may write: what they put there is neither used, changed nor deleted."""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from .recorded_ranks import DIAGNOSTICS, Ranks

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a folder of another user")
USUAL = f"bsl-rings-{os.getuid()}"
LONG_AGO = time.time() - 30 * 86400


@pytest.fixture
def rank_rings(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(DIAGNOSTICS))
    return importlib.import_module("rank_rings")


@needs_root
def test_where_the_usual_name_is_taken_another_one_serves(ranks: Ranks, tmp_path: Path) -> None:
    theirs = tmp_path / "base" / USUAL
    theirs.mkdir(parents=True)
    os.chown(theirs, 65534, 65534)
    for _ in range(2):
        ranks.start([sys.executable, "-c", "import os; print('in', os.environ['BSL_RING_DIR'])"], 1, str(theirs.parent))
        assert ranks.wait()[-1] == 0
        assert list(theirs.iterdir()) == [] and theirs.stat().st_mode & 0o777 == 0o755
    (ours,) = (folder for folder in theirs.parent.iterdir() if folder != theirs)
    assert ours.name.startswith(f"{USUAL}-") and len(ours.name) == len(USUAL) + 17
    assert ranks.log(0).count(f"in {ours}/") == 2 and list(ours.iterdir()) == []


def test_a_link_in_its_place_is_not_followed(rank_rings: Any, tmp_path: Path) -> None:
    precious = tmp_path / "work"
    (precious / "7654321-results").mkdir(parents=True)
    precious.chmod(0o700)
    os.utime(precious / "7654321-results", (LONG_AGO, LONG_AGO))
    (tmp_path / USUAL).symlink_to(precious)
    rings = rank_rings.Rings(str(tmp_path), tmp_path / "run" / "attempts" / "0001", "rank-0000")
    assert rings.folder.parent.name != USUAL and rings.folder.is_dir()
    assert precious.stat().st_mode & 0o777 == 0o700
    assert [each.name for each in precious.iterdir()] == ["7654321-results"]


def test_what_is_exchanged_later_is_not_touched(rank_rings: Any, tmp_path: Path) -> None:
    """Somebody who may write the folder above takes the folder away, and puts a link to another one there."""
    rings = rank_rings.Rings(str(tmp_path), tmp_path / "run" / "attempts" / "0001", "rank-0000")
    name, precious = rings.folder.name, tmp_path / "precious"
    (precious / name).mkdir(parents=True)
    (precious / name / "file").write_text("x")
    (tmp_path / USUAL).rename(tmp_path / "away")
    (tmp_path / USUAL).symlink_to(precious)
    rings.remove()
    assert (precious / name / "file").exists() and not (tmp_path / "away" / name).exists()


def test_only_old_folders_of_runners_that_have_ended_are_removed(rank_rings: Any, tmp_path: Path) -> None:
    gone, alive = 4194305, os.getpid()  # no process has a number above 2^22
    removed = [f"{gone}-17-rank-0003", f"{gone}-17-slot-0001", f"{gone}-17-rank-10000"]
    kept = [f"{alive}-17-rank-0003", f"{gone}-results", f"{gone}-17-rank-0003-copy", f"{gone}-17-rank-", f"{gone}"]
    above = tmp_path / USUAL
    for name in (*removed, *kept):
        (above / name / "inside").mkdir(parents=True)
        (above / name / "link").symlink_to(tmp_path)
        os.utime(above / name, (LONG_AGO, LONG_AGO))
    (above / f"{gone}-17-rank-0009").mkdir()  # not old
    (above / f"{gone}-17-rank-0008").symlink_to(tmp_path)
    rings = rank_rings.Rings(str(tmp_path), tmp_path / "run" / "attempts" / "0001", "rank-0000")
    left = {each.name for each in above.iterdir()}
    assert left == {*kept, f"{gone}-17-rank-0009", f"{gone}-17-rank-0008", rings.folder.name}


def test_a_copy_replaces_a_link_and_not_what_it_names(rank_rings: Any, tmp_path: Path) -> None:
    attempt = tmp_path / "run" / "attempts" / "0001"
    (attempt / "rings").mkdir(parents=True)
    (tmp_path / "precious").write_text("x")
    (attempt / "rings" / "rank-0000.calls").symlink_to(tmp_path / "precious")
    rings = rank_rings.Rings(str(tmp_path), attempt, "rank-0000")
    (rings.folder / "7.calls").write_text("calls")
    assert rings.keep_traces(7) is None
    assert (tmp_path / "precious").read_text() == "x"
    assert (attempt / "rings" / "rank-0000.calls").read_text() == "calls"
    assert [each.name for each in (attempt / "rings").iterdir()] == ["rank-0000.calls"]

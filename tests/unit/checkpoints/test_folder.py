"""Checkpoints on disk: `latest` always names a complete one, and every problem is reported."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from bigsci_launch.checkpoints.folder import (
    CheckpointRecord,
    CheckpointsDir,
    begin_checkpoint,
    commit_checkpoint,
    find_checkpoint,
    finish_interrupted,
    list_files,
    read_record,
    require_complete,
    write_record,
)
from bigsci_launch.errors import CheckpointError
from bigsci_launch.file_names import checkpoint_tag
from tests.support.texts import has_parts

RECORD = CheckpointRecord(
    step=20,
    consumed_samples=320,
    topology={"tp": 2, "pp": 2, "dp": 2},
    precision="bf16",
    model={"num_layers": 4, "vocab_size": 512},
    files={},
)


def save(checkpoints: CheckpointsDir, step: int, content: bytes = b"weights", passed: bool | None = None) -> Path:
    tag = checkpoint_tag(step)
    staging = begin_checkpoint(checkpoints, tag)
    (staging / tag / "mp_rank_00_model_states.pt").write_bytes(content)
    (staging / "zero_to_fp32.py").write_text("# recovers weights\n")
    health = None if passed is None else {"passed": passed, "step": step, "findings": []}
    write_record(staging / tag, replace(RECORD, step=step, files=list_files(staging / tag), health=health))
    commit_checkpoint(checkpoints, tag, step)
    return checkpoints.folder(tag)


def newest(checkpoints: CheckpointsDir) -> tuple[Path, CheckpointRecord]:
    folder = find_checkpoint("auto", checkpoints)
    assert folder is not None
    record = read_record(folder)
    require_complete(folder, record)
    return folder, record


@pytest.fixture
def checkpoints(tmp_path: Path) -> CheckpointsDir:
    return CheckpointsDir(tmp_path / "checkpoints")


def test_a_saved_checkpoint_is_the_newest(checkpoints: CheckpointsDir) -> None:
    save(checkpoints, 9)
    folder = save(checkpoints, 20)
    assert newest(checkpoints) == (folder, replace(RECORD, files={"mp_rank_00_model_states.pt": 7}))
    assert checkpoints.latest.read_text() == "global_step20"
    assert checkpoints.latest_iteration.read_text() == "20\n"
    assert checkpoints.tags() == ["global_step9", "global_step20"]
    assert not checkpoints.stagings()
    assert (checkpoints.path / "zero_to_fp32.py").is_file()


def test_a_checkpoint_may_be_replaced(checkpoints: CheckpointsDir) -> None:
    save(checkpoints, 20)
    folder = save(checkpoints, 20, b"other weights")
    assert newest(checkpoints)[0] == folder
    assert (folder / "mp_rank_00_model_states.pt").read_bytes() == b"other weights"


def test_a_run_without_checkpoints_starts_at_0(checkpoints: CheckpointsDir) -> None:
    assert find_checkpoint("auto", checkpoints) is None
    checkpoints.path.mkdir()
    assert find_checkpoint("auto", checkpoints) is None
    save(checkpoints, 20)
    assert find_checkpoint("none", checkpoints) is None


def test_a_path_may_be_a_checkpoint_or_a_folder_of_them(checkpoints: CheckpointsDir, tmp_path: Path) -> None:
    older, newer = save(checkpoints, 10), save(checkpoints, 20)
    elsewhere = CheckpointsDir(tmp_path / "other-run")
    assert find_checkpoint(str(older), elsewhere) == older
    assert find_checkpoint(str(checkpoints.path), elsewhere) == newer


def test_a_run_begins_elsewhere_once_and_goes_on_from_its_own(checkpoints: CheckpointsDir, tmp_path: Path) -> None:
    origin = CheckpointsDir(tmp_path / "other-run")
    begin = save(origin, 20)
    assert find_checkpoint(str(begin), checkpoints) == begin
    older, own = save(checkpoints, 25), save(checkpoints, 30)
    assert find_checkpoint(str(begin), checkpoints) == own
    assert find_checkpoint(str(older), checkpoints) == older


def test_what_is_not_there_is_an_error_not_step_0(checkpoints: CheckpointsDir, tmp_path: Path) -> None:
    save(checkpoints, 20)
    checkpoints.latest.write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"latest: "):
        find_checkpoint("auto", checkpoints)
    for outside in ("/etc", "../../..", "global_step20/../..", "."):
        checkpoints.latest.write_text(outside)
        with pytest.raises(CheckpointError, match=r"latest: "):
            find_checkpoint("auto", checkpoints)
    for garbage in ("\x1b[2J\x07" + 150 * "x", 3000 * "x"):
        checkpoints.latest.write_text(garbage)
        with pytest.raises(CheckpointError) as refused:
            find_checkpoint("auto", checkpoints)
        assert refused.value.message.isprintable() and len(refused.value.message) < 400
    checkpoints.latest.unlink()
    os.mkfifo(checkpoints.latest)
    with pytest.raises(CheckpointError, match=r"latest: "):
        find_checkpoint("auto", checkpoints)
    nowhere = tmp_path / "nowhere"
    with pytest.raises(CheckpointError, match=r"checkpoint.load: .*nowhere"):
        find_checkpoint(str(nowhere), CheckpointsDir(tmp_path / "new-run"))


def test_a_torn_record_is_named(checkpoints: CheckpointsDir) -> None:
    folder = save(checkpoints, 20)
    (folder / "checkpoint.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"checkpoint.json"):
        read_record(folder)


def test_differences_name_both_sides() -> None:
    other = replace(RECORD, topology={"tp": 1, "pp": 2, "dp": 4}, model={"num_layers": 4}, step=3)
    tp, dp, vocabulary = RECORD.differences(other)
    assert has_parts(tp, "tp", 2, 1) and has_parts(dp, "dp", 2, 4) and has_parts(vocabulary, "vocab_size", 512)
    assert RECORD.differences(replace(RECORD, step=3, files={"a": 1})) == []


def test_what_a_killed_save_left_is_removed(checkpoints: CheckpointsDir) -> None:
    save(checkpoints, 10)
    begin_checkpoint(checkpoints, "global_step20")
    finish_interrupted(checkpoints)
    assert not checkpoints.stagings()
    assert newest(checkpoints)[1].step == 10


def test_what_a_kill_left_of_the_files_that_name_the_newest_is_removed(checkpoints: CheckpointsDir) -> None:
    save(checkpoints, 10)
    mine = [checkpoints.path / f".{name}.{'0a' * 8}" for name in ("latest", "latest_checkpointed_iteration.txt")]
    others = [checkpoints.path / name for name in (".latest.swp", f".later.{'0a' * 8}", f".latest.{'0a' * 9}")]
    for path in (*mine, *others):
        path.write_text("global_st")
    if os.geteuid() == 0:
        others.append(checkpoints.path / f".latest.{'0b' * 8}")
        others[-1].write_text("of somebody else")
        os.chown(others[-1], 12345, -1)
    others.append(checkpoints.path / f".latest.{'0c' * 8}")
    others[-1].symlink_to(checkpoints.latest)
    finish_interrupted(checkpoints)
    assert [path.exists() for path in mine] == [False, False]
    assert all(path.exists() for path in others) and newest(checkpoints)[1].step == 10


def test_one_that_failed_its_guards_is_never_the_newest(checkpoints: CheckpointsDir) -> None:
    good = save(checkpoints, 20, passed=True)
    assert save(checkpoints, 30, passed=False).is_dir()
    assert newest(checkpoints)[0] == good
    assert checkpoints.latest_iteration.read_text() == "20\n"
    assert save(checkpoints, 40, passed=None) == newest(checkpoints)[0]


def test_one_that_failed_replaces_none_that_did_not(checkpoints: CheckpointsDir) -> None:
    good = save(checkpoints, 20, b"good", passed=True)
    save(checkpoints, 20, b"bad", passed=False)
    assert (good / "mp_rank_00_model_states.pt").read_bytes() == b"good"
    assert newest(checkpoints)[0] == good
    assert checkpoints.stagings() == []
    bad = save(checkpoints, 30, b"bad", passed=False)
    save(checkpoints, 30, b"worse", passed=False)
    assert (bad / "mp_rank_00_model_states.pt").read_bytes() == b"worse"
    save(checkpoints, 30, b"good", passed=True)
    assert newest(checkpoints)[0] == bad


def test_if_all_failed_the_run_says_so(checkpoints: CheckpointsDir) -> None:
    save(checkpoints, 20, passed=False)
    with pytest.raises(CheckpointError, match="global_step20; global_step20 "):
        find_checkpoint("auto", checkpoints)

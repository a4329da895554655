"""Which checkpoints are sound, and which may be deleted."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import bigsci_launch.checkpoints.verify as verify
from bigsci_launch.checkpoints.folder import (
    CheckpointRecord,
    CheckpointsDir,
    begin_checkpoint,
    commit_checkpoint,
    digests_path,
    list_files,
    read_record,
    record_path,
    write_digests,
    write_record,
)
from bigsci_launch.checkpoints.verify import (
    CheckpointState,
    choose_prunable,
    delete_checkpoint,
    file_digest,
    find_damage,
    find_disagreements,
    finish_deletions,
    list_checkpoints,
    mark_verified,
    pin_path,
    prune_checkpoints,
    remark,
    verifying,
    with_digest,
)
from bigsci_launch.cli.main import bsl
from bigsci_launch.file_names import checkpoint_tag
from bigsci_launch.runs.layout import RunDir
from tests.support.texts import CheckText, has_parts

SHARD = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"


def save(checkpoints: CheckpointsDir, step: int, passed: bool | None = None, pp: int = 1) -> Path:
    tag = checkpoint_tag(step)
    staged = begin_checkpoint(checkpoints, tag) / tag
    shard = staged / SHARD
    shard.write_bytes(bytes(range(256)) * 100 + str(step).encode())
    for rank in range(pp):
        files = {SHARD: file_digest(shard)} if rank == 0 else {}
        document = {"step": step, "optimizer": {"decay.step": step, "decay.master": "0f"}, "files": files}
        write_digests(staged, rank, document)
    health = {"passed": passed, "step": step, "findings": ["exp_avg is 1e34"] if passed is False else []}
    shape = {"tp": 1, "pp": pp, "dp": 1}
    record = CheckpointRecord(step, step * 16, shape, "bf16", {}, list_files(staged), health=health)
    write_record(staged, with_digest(staged, record))
    commit_checkpoint(checkpoints, tag, step)
    return checkpoints.folder(tag)


@pytest.fixture
def checkpoints(tmp_path: Path) -> CheckpointsDir:
    run = RunDir(tmp_path / "demo")
    run.attempt("0001").make()
    run.record.write_text("{}")
    return CheckpointsDir(run.checkpoints)


def test_one_byte_is_found(checkpoints: CheckpointsDir, check_text: CheckText) -> None:
    folder = save(checkpoints, 10)
    assert find_damage(folder) == []
    shard = folder / SHARD
    content = bytearray(shard.read_bytes())
    content[12345] ^= 1
    shard.write_bytes(content)
    found = find_damage(folder)
    shard.write_bytes(content[:-1])
    found += find_damage(folder)
    digests_path(folder, 0).write_text("{}" + " " * (list_files(folder)["digests/rank-0000.digests.json"] - 2))
    shard.write_bytes(content)
    check_text(*found, *find_damage(folder))


def test_every_file_that_is_wrong_is_named(checkpoints: CheckpointsDir, check_text: CheckText) -> None:
    folder = save(checkpoints, 10)
    (folder / "rng_rank_0000.pt").write_bytes(b"1234")
    shard = folder / SHARD
    shard.unlink()
    shard.mkdir()
    record = read_record(folder)
    sizes = {**record.files, SHARD: shard.stat().st_size, "rng_rank_0000.pt": 5, "layer_00.pt": 7}
    write_record(folder, replace(record, files=sizes))
    check_text(*find_damage(folder))
    digests_path(folder, 0).unlink()
    assert len(find_damage(folder)) == 3


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d" * 32 + b"\nsize 25602\n"


def test_what_is_in_the_place_of_a_file_is_named(checkpoints: CheckpointsDir, check_text: CheckText) -> None:
    """A folder that came by git or from a server, or whose bytes were lost."""
    folder = save(checkpoints, 10)
    shard = folder / SHARD
    found = []
    for content in (POINTER, bytes(shard.stat().st_size), b"<!DOCTYPE html><html>Sign in</html>", b"PK"):
        shard.write_bytes(content)
        found += find_damage(folder)
    os.mkfifo(shard.with_suffix(".fifo"))
    shard.with_suffix(".fifo").rename(shard)
    found += find_damage(folder)
    record_path(folder).write_bytes(POINTER)
    check_text(*found, *find_damage(folder))


def test_half_a_checkpoint_is_no_lost_run(checkpoints: CheckpointsDir) -> None:
    folder = save(checkpoints, 10)
    record_path(folder).unlink()
    result = CliRunner().invoke(bsl, ["checkpoint", "verify", str(folder)])
    assert result.exit_code == 1 and has_parts(result.stdout, folder, "checkpoint.json")


def test_a_checkpoint_that_cannot_be_marked_is_verified_all_the_same(checkpoints: CheckpointsDir) -> None:
    folder = save(checkpoints, 10)
    (folder / "verified.json" / "in the way").mkdir(parents=True)
    result = CliRunner().invoke(bsl, ["checkpoint", "verify", str(folder)])
    assert result.exit_code == 0 and "global_step10" in result.stdout


def test_a_mark_holds_until_a_file_changes(checkpoints: CheckpointsDir) -> None:
    folder = save(checkpoints, 10)
    assert [state.is_verified for state in list_checkpoints(checkpoints)] == [False]
    mark_verified(folder)
    assert [state.is_verified for state in list_checkpoints(checkpoints)] == [True]
    assert find_damage(folder) == []
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes())
    assert [state.is_verified for state in list_checkpoints(checkpoints)] == [False]


def change(path: Path, **fields: object) -> None:
    """Edit a JSON document as somebody by hand would."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}, indent=2) + "\n")


@pytest.mark.parametrize(
    "edit", [{"consumed_samples": 0}, {"precision": "fp32"}, {"code": {"revision": "x"}}, {"health": {"passed": True}}]
)
def test_an_edited_record_is_found(checkpoints: CheckpointsDir, edit: dict[str, object]) -> None:
    folder = save(checkpoints, 10)
    change(record_path(folder), **edit)
    (problem,) = find_damage(folder)
    assert has_parts(problem, record_path(folder), "digest")


def test_an_edited_step_is_found_even_without_a_digest(checkpoints: CheckpointsDir, check_text: CheckText) -> None:
    folder = save(checkpoints, 10)
    change(record_path(folder), step=5, digest=None)
    check_text(*find_damage(folder))


def mix(folder: Path, source: Path, ranks: list[int]) -> None:
    """Take the files of some ranks from another checkpoint, with their digests, as a torn copy would."""
    for rank in ranks:
        shutil.copyfile(digests_path(source, rank), digests_path(folder, rank))
    sizes = list_files(folder)
    change(record_path(folder), files=sizes)


def test_two_steps_in_one_checkpoint_are_named(checkpoints: CheckpointsDir, check_text: CheckText) -> None:
    folder, later = save(checkpoints, 10, pp=2), save(checkpoints, 12, pp=2)
    mix(folder, later, [1])
    check_text(*find_damage(folder))


def test_exchanged_digests_are_found_when_all_counters_agree(checkpoints: CheckpointsDir) -> None:
    folder = save(checkpoints, 10, pp=2)
    document = json.loads(digests_path(folder, 1).read_text())
    document["optimizer"]["decay.master"] = "f0"
    digests_path(folder, 1).write_text(json.dumps(document) + "\n")
    (problem,) = find_damage(folder)
    assert has_parts(problem, record_path(folder), "digest")


def test_an_optimizer_step_that_only_some_ranks_have_is_named(checkpoints: CheckpointsDir) -> None:
    folder = save(checkpoints, 10, pp=3)
    change(digests_path(folder, 2), optimizer={"decay.step": 3})
    found = find_disagreements(folder, read_record(folder))
    assert any(has_parts(each, folder, "step is 3 on rank 2 (dp0 pp2 tp0), 10 on") for each in found), found


def test_what_is_not_known_is_said(checkpoints: CheckpointsDir, check_text: CheckText) -> None:
    folder = save(checkpoints, 10, passed=True)
    assert remark(read_record(folder)) == []
    change(record_path(folder), digest=None, health=None)
    assert find_damage(folder) == []
    older, unchecked = remark(read_record(folder))
    result = CliRunner().invoke(bsl, ["checkpoint", "verify", str(folder)])
    assert result.stderr.splitlines() == [f"global_step10: {older}", f"global_step10: {unchecked}"]
    failed = save(checkpoints, 20, passed=False)
    check_text(older, unchecked, *remark(read_record(failed)))


def test_the_newest_that_passed_is_never_deleted(checkpoints: CheckpointsDir) -> None:
    for step, passed in ((10, True), (20, True), (30, False), (40, False), (50, False)):
        save(checkpoints, step, passed)
    assert checkpoints.latest.read_text() == "global_step20"
    states = list_checkpoints(checkpoints)
    assert [each.passed for each in states] == [True, True, False, False, False]
    assert [each.step for each in choose_prunable(states, 1)] == [10, 30, 40]
    # Somebody has set `latest` to one that failed.
    checkpoints.latest.write_text("global_step50")
    assert [each.step for each in choose_prunable(list_checkpoints(checkpoints), 1)] == [10, 30, 40]


def state(step: int, marks: str = "") -> CheckpointState:
    flags = [letter in marks for letter in "lpvh"]
    return CheckpointState(Path(f"global_step{step}"), step, 1, *flags)


@pytest.mark.parametrize(
    ("marks", "keep", "doomed"),
    [
        (["", "", "", "l"], 1, [10, 20, 30]),
        (["", "", "", "l"], 3, [10]),
        (["", "p", "", "l"], 1, [10, 30]),
        # What follows the last verified one is not known to be good; what precedes it is not needed.
        (["", "v", "", "l"], 1, [10, 30]),
        (["v", "v", "", "l"], 1, [10, 30]),
        (["h", "", "h", "l"], 1, [20]),
        # `latest` may have been set back by hand.
        (["l", "", "", ""], 1, [20, 30]),
    ],
)
def test_what_may_go(marks: list[str], keep: int, doomed: list[int]) -> None:
    states = [state(10 * (number + 1), mark) for number, mark in enumerate(marks)]
    assert [each.step for each in choose_prunable(states, keep)] == doomed


def test_what_is_being_verified_or_has_changed_since_is_kept(checkpoints: CheckpointsDir) -> None:
    begun, changed, sound = save(checkpoints, 10), save(checkpoints, 20), save(checkpoints, 30)
    save(checkpoints, 40)
    with pytest.raises(KeyboardInterrupt), verifying(begun):
        raise KeyboardInterrupt
    for folder in (changed, sound):
        with verifying(folder):
            assert list_checkpoints(checkpoints)[1 if folder is changed else 2].is_half_verified
        mark_verified(folder)
    (changed / SHARD).write_bytes((changed / SHARD).read_bytes())
    assert [each.is_half_verified for each in list_checkpoints(checkpoints)] == [True, True, False, False]
    assert choose_prunable(list_checkpoints(checkpoints), 1) == []
    with verifying(begun):
        pass
    assert [each.step for each in choose_prunable(list_checkpoints(checkpoints), 1)] == [10]


def test_an_interrupted_deletion_leaves_no_checkpoint(checkpoints: CheckpointsDir) -> None:
    save(checkpoints, 10)
    folder = save(checkpoints, 20)
    folder.rename(folder.with_name(".deleting-global_step20"))
    assert checkpoints.tags() == ["global_step10"]
    finish_deletions(checkpoints)
    assert not list(checkpoints.path.glob(".deleting-*"))
    delete_checkpoint(checkpoints.folder("global_step10"))
    assert checkpoints.tags() == []


def test_an_archived_checkpoint_is_unlinked_and_stays(checkpoints: CheckpointsDir, tmp_path: Path) -> None:
    folder = save(checkpoints, 10)
    archived = shutil.move(folder, tmp_path / "archived")
    folder.symlink_to(archived)
    old = checkpoints.path / ".deleting-global_step5"  # an older version left it so
    old.symlink_to(archived)
    save(checkpoints, 20)
    assert prune_checkpoints(checkpoints, 1) == []
    assert checkpoints.tags() == ["global_step20"]
    assert not list(checkpoints.path.glob(".deleting-*"))
    assert (archived / SHARD).exists()


def test_a_step_saved_again_replaces_the_link_to_its_archive(checkpoints: CheckpointsDir, tmp_path: Path) -> None:
    folder = save(checkpoints, 10)
    archived = shutil.move(folder, tmp_path / "archived")
    folder.symlink_to(archived)
    save(checkpoints, 10)
    assert not folder.is_symlink() and (folder / SHARD).exists()
    assert (archived / SHARD).exists()
    assert not list(checkpoints.path.glob(".*-*"))


def test_what_cannot_be_deleted_is_reported_and_tried_again(checkpoints: CheckpointsDir) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make a folder that nobody can delete")
    folder = save(checkpoints, 10)
    (folder / "held").mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "bsl-test", str(folder / "held")], check=False)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        save(checkpoints, 20)
        (problem,) = prune_checkpoints(checkpoints, 1)
        assert str(folder) in problem and "cannot be deleted" in problem and "busy" in problem
        save(checkpoints, 10)  # the same step again
        assert len(prune_checkpoints(checkpoints, 1)) == 1
        assert checkpoints.tags() == ["global_step10", "global_step20"]
    finally:
        held = next(checkpoints.path.glob("*/held"), None) or next(checkpoints.path.glob(".*/held"))
        subprocess.run(["umount", str(held)], check=True)
    assert prune_checkpoints(checkpoints, 1) == []
    assert not list(checkpoints.path.glob(".deleting-*"))


def test_a_file_server_that_is_gone_does_not_end_a_training(checkpoints: CheckpointsDir, monkeypatch) -> None:
    def gone(*_: object) -> list[CheckpointState]:
        raise OSError(errno.ESTALE, "Stale file handle", str(checkpoints.latest))

    monkeypatch.setattr(verify, "list_checkpoints", gone)
    (problem,) = prune_checkpoints(checkpoints, 1)
    assert has_parts(problem, checkpoints.path, checkpoints.latest, "Stale file handle")


def test_the_command(checkpoints: CheckpointsDir) -> None:
    for step in (10, 20, 30):
        save(checkpoints, step)
    run = str(checkpoints.path.parent)

    def call(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(bsl, ["checkpoint", arguments[0], run, *arguments[1:]], catch_exceptions=False)
        return result.exit_code, result.stdout

    code, text = call("verify", "--step", "20")
    assert code == 0 and "global_step20" in text
    assert call("pin", "--step", "10") == (0, "global_step10: pinned\n")
    assert pin_path(checkpoints.folder("global_step10")).exists()
    lines = call("list")[1].splitlines()
    assert [line.split()[3:] for line in lines] == [["pinned"], ["verified"], ["latest"]]
    assert call("prune", "--keep", "1", "--dry-run") == (0, "nothing to delete\n")
    assert call("pin", "--step", "10", "--undo")[0] == 0
    assert call("prune", "--keep", "1", "--dry-run") == (0, "would delete global_step10\n")
    killed = checkpoints.path / ".deleting-global_step5"
    killed.mkdir()
    assert call("prune", "--keep", "1", "--dry-run")[0] == 0
    assert killed.exists()
    assert call("prune", "--keep", "1") == (0, "deleted global_step10\n")
    assert not killed.exists()
    document = json.loads(call("list", "--json")[1])
    assert [each["step"] for each in document["checkpoints"]] == [20, 30]
    (checkpoints.folder("global_step30") / SHARD).write_bytes(b"")
    code, text = call("verify")
    assert (code, "0 bytes, but" in text) == (1, True)

"""A killed save: `latest` names a complete checkpoint, whatever the moment of the kill."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

# Forks a child that saves step 10, then step 20 twice (the second replaces what `latest` names), and kills itself just
# before its n-th call that touches a file. Repeats this for every n until the child survives. Prints what each left.
PROGRAM = """
import json, os, shutil, signal, sys
from pathlib import Path

from bigsci_launch.file_names import checkpoint_tag
from bigsci_launch.errors import BslError
from bigsci_launch.checkpoints.folder import (
    CheckpointRecord, CheckpointsDir, begin_checkpoint, commit_checkpoint, find_checkpoint,
    finish_interrupted, list_files, read_record, require_complete, write_record,
)

checkpoints = CheckpointsDir(Path(sys.argv[1]))
CALLS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree")


def save(step):
    tag = checkpoint_tag(step)
    staged = begin_checkpoint(checkpoints, tag) / tag
    for number in range(2):
        (staged / f"mp_rank_{number:02d}_model_states.pt").write_bytes(bytes(1000))
    write_record(staged, CheckpointRecord(step, 16 * step, {"tp": 1}, "fp32", {}, list_files(staged)))
    commit_checkpoint(checkpoints, tag, step)


def save_and_die(at):
    num_calls = 0

    def count(event, arguments):
        nonlocal num_calls
        if event in CALLS:
            num_calls += 1
            if num_calls == at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    for step in (10, 20, 20):
        save(step)
    os._exit(0)


def state():
    try:
        folder = find_checkpoint("auto", checkpoints)
        if folder is not None:
            require_complete(folder, read_record(folder))
        return folder and folder.name
    except BslError as error:
        return f"broken: {error}"


at = 0
while True:
    at += 1
    shutil.rmtree(checkpoints.path, ignore_errors=True)
    if (child := os.fork()) == 0:
        save_and_die(at)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        break
    tags = checkpoints.tags()
    if checkpoints.path.exists():
        finish_interrupted(checkpoints)
    print(json.dumps([at, state(), tags, [path.name for path in checkpoints.stagings()]]))
"""


def test_kill_at_every_moment_of_a_save(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path / "checkpoints"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    found = [outcome[1] for outcome in outcomes]
    assert len(found) > 40
    # First nothing, then step 10, then always step 20; never a broken checkpoint, never an older one.
    order = [name for name, after in zip(found, [*found[1:], "end"], strict=True) if name != after]
    assert order == [None, "global_step10", "global_step20"], outcomes
    assert all(stagings == [] for _, _, _, stagings in outcomes)

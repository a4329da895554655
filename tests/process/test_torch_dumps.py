"""Dumps of torch's own recorder: where programs write them, and who finds them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bigsci_launch.runs.layout import AttemptDir
from bigsci_launch.spy.look.collect import collect
from bigsci_launch.spy.look.target import Target
from tests.support.waiting import wait_until

from .recorded_ranks import HOOK, Ranks
from .test_spy_dumps import dump

SHOW = """
import json, os
print(json.dumps({name: os.environ[name] for name in os.environ if name.startswith(("TORCH_FR", "TORCH_NCCL"))}))
"""
THEIRS = {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/their/dump_", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}


@pytest.mark.parametrize("theirs", [{}, THEIRS])
def test_dumps_of_torch_go_to_the_attempt_unless_the_user_says_where(ranks: Ranks, theirs: dict[str, str]) -> None:
    ranks.start([sys.executable, "-c", SHOW], 1, **theirs)
    assert ranks.wait() == [0]
    prefix = str(AttemptDir(ranks.attempt).recorder_dumps)
    ours = dict.fromkeys(("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), prefix)
    assert json.loads(ranks.log(0).split(" ", 1)[1]) == (theirs or {**ours, "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"})
    files = ["/their/dump_0"] if theirs else [f"{prefix}0"]
    assert ranks.record(0)["recorder_files"] == files and (ranks.attempt / "recorder").is_dir() == (not theirs)


@pytest.mark.parametrize(("version", "kept"), [("2.4.1+cu121", "2000"), ("2.13.0+cpu", None), ("weird", None)])
def test_an_old_torch_is_told_to_record(tmp_path: Path, version: str, kept: str | None) -> None:
    program = f"import sys, types; sys.modules['torch'] = types.SimpleNamespace(__version__={version!r})\n" + HOOK
    program += "print(os.environ.get('TORCH_NCCL_TRACE_BUFFER_SIZE'))"
    given = {name: value for name, value in os.environ.items() if name != "TORCH_NCCL_TRACE_BUFFER_SIZE"}
    argv = [sys.executable, "-c", program]
    done = subprocess.run(argv, env=given, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == f"{kept}\n"


def test_a_dump_in_the_attempt_is_found(ranks: Ranks) -> None:
    ranks.start([sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(600)"], 1)
    wait_until(lambda: "ready" in ranks.log(0))
    time.sleep(0.5)
    Path(ranks.record(0)["recorder_files"][0]).write_bytes(dump())
    target = Target(label="dumps", request={"pid_files": str(ranks.attempt / "pids")})
    sample = collect(target).nodes[0]["ranks"][0]["samples"][-1]
    assert sample["recorder"]["last_sequence"] == {"0": 8}, sample
    assert sample["recorder_file"] == str(AttemptDir(ranks.attempt).recorder_dumps) + "0"

"""What people ask of a run, on real ranks: they save after the same step, and are ended if they hang.

That they stop after exactly the step that was named is in tests/train/test_asked.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.runs.events import read_events
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.runs.signs import find_last_step, read_rank_events
from bigsci_launch.runs.watching.ledger import Act, read_acts
from tests.support.command import run_bsl
from tests.support.texts import has_parts
from tests.support.waiting import wait_until

pytestmark = pytest.mark.torch
HANDLER = Path(__file__).parent / "programs" / "serve_requests.py"
RANKS = range(2)
CONFIG = {
    "run": {"name": "run"},
    "slurm": {"site": "local"},
    "parallelism": {"data_parallel_size": 2},
    "model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "sequence_length": 8, "vocab_size": 512},
    "training": {"steps": 5000, "micro_batch_size": 1, "global_batch_size": 2, "precision": "fp32", "device": "cpu"},
    "monitor": {"watch": "off"},
}
SLOW = {"kind": "slow", "rank": 1, "step": 1, "seconds": 0.05}


class Asked:
    """A run of two ranks, and what is asked of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = RunDir(folder / "runs" / "run")
        self.processes: list[subprocess.Popen[str]] = []

    def bsl(self, *words: str, rc: int = 0) -> str:
        done = run_bsl(self.folder, *words, rc=rc)
        return done.stdout + done.stderr

    def begin(self, *faults: dict[str, Any]) -> None:
        """Start an attempt, and wait for its first steps."""
        config = {**CONFIG, "data": {"prefix": str(self.folder / "corpus")}, "faults": [*faults]}
        (self.folder / "run.yaml").write_text(json.dumps(config))
        name = self.run.next_attempt_name()
        self.popen("-m", "bigsci_launch", "submit", "run.yaml")
        wait_until(lambda: self.run.attempt(name).job.exists() and self.step() >= 1)

    def handler(self, *words: str) -> subprocess.Popen[str]:
        return self.popen(str(HANDLER), str(self.run.path), *words)

    def popen(self, *words: str) -> subprocess.Popen[str]:
        with (self.folder / "output").open("a") as output:
            argv = [sys.executable, *words]
            process = subprocess.Popen(argv, cwd=self.folder, text=True, stdout=output, stderr=subprocess.STDOUT)
        self.processes.append(process)
        return process

    def step(self) -> int:
        attempt = self.run.latest_attempt()
        last = find_last_step(attempt, read_rank_events(attempt)) if attempt else None
        return last.step if last else 0

    def events(self, attempt: str, rank: int, kind: str) -> list[dict[str, Any]]:
        return [each for each in read_events(self.run.attempt(attempt).event_file(rank)) if each["kind"] == kind]

    def lines(self, what: str) -> list[Act]:
        return [act for act in read_acts(self.run) if act.what == what]

    def wait_for_end(self, attempt: str) -> dict[str, Any]:
        path = self.run.attempt(attempt).exit
        wait_until(lambda: path.exists() and json.loads(path.read_text())["exit_code"] is not None)
        return json.loads(path.read_text())


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[Asked]:
    asked = Asked(tmp_path)
    source = Path(json.__file__).parent
    asked.bsl("data", "prepare", str(source), "--output", "corpus", "--vocab-size", "512", "--glob", "*.py")
    yield asked
    for process in asked.processes:
        process.terminate()
        process.wait(180)


def test_ranks_save_as_asked_and_are_ended_when_they_hang_while_the_watcher_is_killed_again_and_again(
    asked: Asked,
) -> None:
    asked.begin(SLOW)
    assert "no watcher runs for run" in asked.bsl("control", "run", "save", "--why", "before the upgrade")
    assert asked.handler("100", "1").wait(180) == -signal.SIGKILL
    assert [act.stage for act in asked.lines("save")] == ["", "asked"], "it died before the save was seen"
    watcher = asked.handler("100")
    stranger = is_left_by_a_stranger(asked.run.control / "kill")
    wait_until(lambda: asked.lines("save")[-1].state != "begun")
    assert (asked.lines("save")[-1].state, asked.lines("save")[-1].why) == ("done", "before the upgrade")
    if stranger:
        wait_until(lambda: asked.lines("kill") != [])
        assert (asked.lines("kill")[-1].state, asked.lines("kill")[-1].who) == ("refused", "nobody")
    watcher.kill()

    os.kill(json.loads(asked.run.attempt("0001").pid_file(1).read_text())["pid"], signal.SIGSTOP)
    (asked.run.control / "exit").write_text("it hangs\x1b[31m,\nand nobody is here\n")
    assert asked.handler("5", "8").wait(180) == -signal.SIGKILL, "killed while it looks, or waits for the ranks"
    watcher = asked.handler("5")
    ended = asked.wait_for_end("0001")
    assert watcher.wait(180) == 0
    assert ended["reason"] == "cancelled" and has_parts(ended["evidence"][0], "root", "hangs?[31m, and nobody")
    lines = asked.lines("exit")
    assert len({act.key for act in lines}) == 1 and lines[-1].state == "done"
    (told,) = [act for act in lines if act.stage == "ended" and act.state == "begun"]
    assert "rank 1" in told.words and "stopped" in told.words, "the verdict on the ranks"
    by = json.loads(asked.run.attempt("0001").ended_by.read_text())
    assert (by["continues"], Path(by["bundle"]).parent) == (False, asked.run.bundles)
    saves = [[(each["step"], each.get("request")) for each in asked.events("0001", rank, "save")] for rank in RANKS]
    assert saves[0] == [(saves[0][0][0], asked.lines("save")[0].key)], "one save, as asked"
    assert saves[1] == [(saves[0][0][0], None)], "and after the same step on the other rank"


def is_left_by_a_stranger(path: Path) -> bool:
    """Write a plain request of a user who is not in the run's group, if this user can."""
    beside = path.with_name(".new")
    beside.touch()
    try:
        os.chown(beside, 65534, -1)
    except PermissionError:
        return False
    beside.rename(path)
    return True

"""Ages where the clocks of hosts differ, and where the next attempt of a run begins: nothing false is said."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bigsci_launch.checkpoints.resume import find_next_start
from bigsci_launch.cli.main import bsl
from bigsci_launch.runs.layout import write_json
from bigsci_launch.runs.signs import RankSign, clock_differs, judge_node
from bigsci_launch.scheduler.job import NodeInfo
from bigsci_launch.status.ending import START
from bigsci_launch.status.read import read_status
from bigsci_launch.units import OTHER_CLOCK, age_s, ago

pytestmark = pytest.mark.slow

HOUR = 3600.0


@pytest.fixture
def document(fake_slurm: Any) -> Any:
    fake = fake_slurm("squeue", "sinfo")
    fake.answer("squeue", "12|RUNNING|root|debug|4|n[0-3]|None|N/A|N/A|1:00|N/A|trial|(null)\n")
    fake.answer("sinfo", "")
    return lambda: json.loads(CliRunner().invoke(bsl, ["status", "trial", "--json"]).stdout)


def test_a_moment_that_lies_ahead_has_no_age() -> None:
    assert (age_s(100.0, 103.0), age_s(100.0, 99.0), age_s(100.0 + HOUR, 100.0)) == (3.0, 0.0, None)
    assert ago(100.0 + HOUR, 100.0) == ago(50.0, 100.0, differs=True) == OTHER_CLOCK


def test_a_record_may_be_late_in_its_file_but_not_early() -> None:
    assert not clock_differs(100.0, None) and not clock_differs(100.0, 190.0)
    assert clock_differs(100.0 + HOUR, 100.0) and clock_differs(100.0, 100.0 + HOUR)


@pytest.mark.parametrize("ahead_s", [HOUR, -HOUR])
def test_ranks_whose_clock_jumped_have_no_age(document: Any, trial: Any, ahead_s: float) -> None:
    for rank in range(8):
        trial.event(rank, "heartbeat", 20.0 - ahead_s if rank == 5 else 5.0, phase="step", step=8)
    trial.event(5, "step", 20.0 - ahead_s, step=9, loss=4.0)
    os.utime(trial.attempt.event_file(5), (trial.now - 20.0, trial.now - 20.0))
    found = document()
    assert (found["slowest_rank"]["rank"], found["slowest_rank"]["heartbeat_age_s"]) == (5, None)
    assert (found["step"]["step"], found["step"]["clock_differs"], found["step"]["age_s"]) == (9, True, None)
    status = read_status(trial.run)
    assert status.slowest is not None and trial.now - status.slowest.time == pytest.approx(20.0, abs=1.0)
    os.utime(trial.attempt.event_file(5), (trial.now, trial.now))
    listed = json.loads(CliRunner().invoke(bsl, ["list", "--json"]).stdout)["runs"][0]["last_sign"]
    assert listed == pytest.approx(trial.now, abs=10.0)


def test_files_of_a_server_that_is_ahead_have_no_age(document: Any, trial: Any) -> None:
    folder = trial.run.checkpoints / "global_step5"
    folder.mkdir(parents=True)
    (folder.parent / "latest").write_text("global_step5")
    os.utime(folder.parent / "latest", (trial.now + HOUR, trial.now + HOUR))
    trial.log(3, "hello\n")
    os.utime(trial.attempt.log_file(3), (trial.now + HOUR, trial.now + HOUR))
    found = document()
    assert (found["checkpoint"]["age_s"], found["last_output"]["age_s"]) == (None, None)


def test_a_sign_from_the_future_does_not_make_a_node_alive() -> None:
    ahead = RankSign(4, "n2", "dp1", 100.0 + HOUR, "step", 8, has_ended=False)
    judged = judge_node(NodeInfo("n2", "mixed*", "Not responding"), [ahead], 100.0)
    assert (judged.fate, judged.sign_age_s) == ("unknown", None)


def write_config(path: Path, load: str = "auto", command: list[str] | None = None) -> None:
    text = {
        "run": {"name": "trial", **({"command": command} if command else {})},
        "parallelism": {"data_parallel_size": 2},
        "model": {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "sequence_length": 8, "vocab_size": 64},
        "training": {"steps": 10, "micro_batch_size": 1, "global_batch_size": 2},
        "data": {"prefix": "none"},
        "slurm": {"site": "local"},
        "checkpoint": {"load": load},
    }
    path.write_text(json.dumps(text))


def test_where_the_next_attempt_begins(trial: Any, tmp_path: Path) -> None:
    attempt = trial.attempt
    assert find_next_start(trial.run, attempt) == "unknown", "nothing says what it runs"
    write_config(attempt.config)
    assert find_next_start(trial.run, attempt) == "beginning"
    trial.event(0, "save", 3, path="x", step=5)
    assert find_next_start(trial.run, attempt) == "unknown", "its checkpoint is lost: the start would be refused"
    folder = trial.run.checkpoints / "global_step5"
    folder.mkdir(parents=True)
    assert find_next_start(trial.run, attempt) == "unknown", "nothing names the newest"
    (folder.parent / "latest").write_text("global_step5")
    assert find_next_start(trial.run, attempt) == "checkpoint"
    write_config(attempt.config, load="none")
    assert find_next_start(trial.run, attempt) == "beginning"
    write_config(attempt.config, command=["./train.sh"])
    assert find_next_start(trial.run, attempt) == "unknown"


def test_the_advice_says_where_it_begins(fake_slurm: Any, trial: Any) -> None:
    fake_slurm("squeue").answer("squeue", "12|FAILED|root|debug|4|n[0-3]|None|N/A|N/A|1:00|N/A|trial|(null)\n")
    cause = "No space left on device: it could not be written"
    write_json(trial.attempt.exit, {"reason": "crashed", "exit_code": 1, "first_failure": None, "cause": cause})
    write_config(trial.attempt.config)
    assert read_status(trial.run).next_start == "beginning"
    assert START["beginning"] in CliRunner().invoke(bsl, ["status", "trial"]).stdout.splitlines()[-1]

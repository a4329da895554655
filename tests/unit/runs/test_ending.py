"""How `bsl status` and `bsl list` show an attempt whose batch script could write no exit.json."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bigsci_launch.cli.main import bsl
from bigsci_launch.procfs import user_name
from bigsci_launch.runs.layout import write_json
from tests.support.texts import CheckText, has_parts, without_ages

pytestmark = pytest.mark.slow

Install = Callable[..., Any]
GONE = "slurm_load_jobs error: Invalid job id specified\n"
NODES = "n0|down*|Not responding\nn1|down|drained for repair\nn2|idle|none\nn3|idle|none\n"


def invoke(*words: str) -> str:
    done = CliRunner().invoke(bsl, list(words))
    assert done.exit_code == 0, done.output
    return done.stdout


def told(*words: str) -> Any:
    return json.loads(invoke(*words, "--json"))


def line(state: str) -> str:
    return f"12|{state}|me|debug|4|n[0-3]|None|2026-11-21T01:02:03|2026-11-21T01:09:03|1:00|N/A|trial|(null)\n"


@pytest.fixture
def slurm(fake_slurm: Install, trial: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("bigsci_launch.runs.ownership._owner_of", lambda _: ())
    fake = fake_slurm("squeue", "sinfo")
    fake.answer("sinfo", NODES)
    return fake


def ends(trial: Any, *ranks: int, code: int | None = None, signal: str | None = None, **more: Any) -> None:
    for rank in ranks:
        record = {**trial.identity(rank), "code": code, "signal": signal, "terminated": None, "time": trial.now}
        write_json(trial.attempt.exit_file(rank), {**record, **more})


def told_to_end(trial: Any, *ranks: int) -> None:
    ends(trial, *ranks, signal="SIGTERM", terminated=trial.now - 1)


def test_the_node_of_a_lost_batch_host_is_named(slurm: Any, trial: Any, check_text: CheckText) -> None:
    slurm.answer("squeue", line("NODE_FAIL"))
    told_to_end(trial, *range(2, 8))
    found = told("status")["exit"]
    assert (found["reason"], found["failed_ranks"], found["exit_code"]) == ("node_failure", [], None)
    assert (found["first_failure"]["rank"], found["first_failure"]["node"]) == (0, "n0")
    assert has_parts(found["evidence"][0], "n0", "down*", "sinfo", "Not responding")
    assert not any("n1" in text for text in found["evidence"]), "n1 is down, but its ranks ended on their own"
    assert found["reconstructed"]["source"] == "records"
    check_text(without_ages(invoke("status")))
    assert not trial.attempt.exit.exists()


def test_a_run_that_slurm_has_forgotten(slurm: Any, trial: Any) -> None:
    slurm.answer("squeue", stderr=GONE, rc=1)
    told_to_end(trial, 0, 1, 2, 3, 6, 7)
    [run] = told("list")["runs"]
    assert (run["state"], run["is_worked_out"]) == ("NODE_FAIL", True)
    assert "NODE_FAIL (reconstructed)" in invoke("list")
    assert told("status")["exit"]["first_failure"]["node"] == "n2"
    ends(trial, 4, 5, code=0)
    told_to_end(trial, 4, 5)
    assert told("list")["runs"][0]["state"] == "UNKNOWN"
    assert told("status")["exit"] is None
    ends(trial, *range(8), code=0)
    assert (told("list")["runs"][0]["state"], told("status")["exit"]["exit_code"]) == ("COMPLETED", 0)


def test_a_rank_that_failed_before_the_script_was_killed(slurm: Any, trial: Any) -> None:
    slurm.answer("squeue", line("FAILED"))
    ends(trial, 5, code=7, time=trial.now - 5)
    told_to_end(trial, *(rank for rank in range(8) if rank != 5))
    found = told("status")["exit"]
    assert (found["reason"], found["exit_code"], found["first_failure"]["rank"]) == ("crashed", 7, 5)


@pytest.mark.parametrize(
    ("state", "reason"), [("CANCELLED", "cancelled"), ("TIMEOUT", "time_limit"), ("COMPLETED", "finished")]
)
def test_slurm_knows_what_the_ranks_do_not(slurm: Any, trial: Any, state: str, reason: str) -> None:
    slurm.answer("squeue", line(state))
    told_to_end(trial, *range(8))
    found = told("status")["exit"]
    assert (found["reason"], found["exit_code"]) == (reason, 0 if state == "COMPLETED" else None)


def test_who_cancelled_the_job_is_said_or_said_to_be_unknown(
    slurm: Any, trial: Any, fake_slurm: Install, tmp_path: Path, check_text: CheckText
) -> None:
    slurm.answer("squeue", line("CANCELLED"))
    trial.ended("cancelled", 143)
    text = invoke("status")
    assert told("status")["cancelled_by"] is None
    trial.attempt.cancel_mark.write_text("bsl cancel\n")
    assert told("status")["cancelled_by"] == user_name(os.geteuid())
    trial.attempt.cancel_mark.unlink()
    (tmp_path / "fake-slurm" / "bin" / "sacct").symlink_to(Path(__file__).parents[2] / "slurm_fake" / "fake")
    slurm.answer("sacct", "CANCELLED\n")
    assert invoke("status") == text
    slurm.answer("sacct", "CANCELLED by 0\n")
    check_text(text, invoke("status"))
    assert told("status")["cancelled_by"] == "root"
    slurm.answer("sacct", "CANCELLED by 4123456\n")
    assert told("status")["cancelled_by"] == "uid 4123456"


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING", "PENDING"])
def test_nothing_is_worked_out_while_the_job_may_run(slurm: Any, trial: Any, state: str) -> None:
    slurm.answer("squeue", line(state))
    told_to_end(trial, *range(2, 8))
    assert told("status")["exit"] is None


def test_nothing_is_worked_out_while_slurm_is_silent(slurm: Any, trial: Any) -> None:
    slurm.answer("squeue", stderr="Unable to contact slurm controller (connect failure)\n", rc=1)
    told_to_end(trial, *range(2, 8))
    assert told("status")["exit"] is None
    assert "ended" not in invoke("status")


def test_the_record_that_a_full_disk_refused_is_read_from_the_output(
    slurm: Any, trial: Any, check_text: CheckText
) -> None:
    slurm.answer("squeue", stderr=GONE, rc=1)
    failure = {"rank": 5, "node": "n2", "coordinate": None, "code": 7, "signal": None, "error": "no space left"}
    record = {"reason": "crashed", "exit_code": 7, "attempt": "0001", "first_failure": failure}
    other = {**record, "attempt": "0001.r1", "exit_code": 9}
    printed = [f"exit_reason: record exit {json.dumps(each)}" for each in (record, other)]
    trial.attempt.job_output.write_text("\n".join(["noise", *printed, 'exit_reason: record exit {"torn', ""]))
    found = told("status")
    assert (found["job"]["state"], found["job"]["source"]) == ("FAILED", "exit.json")
    assert (found["exit"]["exit_code"], found["exit"]["reconstructed"]["source"]) == (7, "job.out")
    check_text(without_ages(invoke("status")))
    trial.attempt.job_output.chmod(0o664)  # then anybody of the group may have written it
    assert told("status")["exit"] is None
    trial.attempt.job_output.chmod(0o644)
    trial.ended("cancelled", None)  # provisional: written before the disk was full
    assert told("status")["exit"]["exit_code"] == 7
    trial.ended("crashed", 3)
    assert told("status")["exit"]["exit_code"] == 3

"""The program that carries a run on, as the job script runs it, on real directories and with commands that answer."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.runs.attempts import JobRecord, read_job, write_job
from bigsci_launch.runs.chain.records import ChainRecord, NextRecord, read_chain, read_next, write_chain
from bigsci_launch.runs.layout import AttemptDir, RunDir, write_json
from bigsci_launch.runs.watching.ended import EndedBy, write_ended_by
from tests.support.texts import has_parts

from .attempt_records import program_argv

SCRIPT = """#!/bin/bash
# Run it's mine, attempt {name}, written by bsl submit. Its config is in the same folder.
#SBATCH --output={folder}/attempts/{name}/job.out
run_dir={folder}
first_attempt={name}
"""


class Carried:
    """A run of `bsl train` with 60 steps, whose starts a test writes."""

    def __init__(self, path: Path, slurm: Any) -> None:
        self.run, self.slurm = RunDir(path), slurm
        self.rc = 0

    def start(self, name: str, *, by: str = "requeue", step: int | None = None, **bounds: Any) -> AttemptDir:
        attempt = self.run.attempt(name)
        attempt.make()
        values = {"max_starts": 50, "max_hours": None, "total_steps": 60, "only_preempted": False, "first": "0001"}
        write_chain(attempt, ChainRecord(by=by, **{**values, **bounds}))  # type: ignore[arg-type]
        write_job(attempt, JobRecord("slurm", time.time(), job_id="12", total_steps=60))
        attempt.script.write_text(SCRIPT.format(folder=self.run.path, name=name.partition(".")[0]))
        attempt.tools.mkdir(exist_ok=True)
        if step is not None:
            attempt.event_file(0).write_text(json.dumps({"kind": "step", "step": step, "time": 1.0}) + "\n")
        return attempt

    def saved(self, step: int) -> None:
        self.run.checkpoints.mkdir(exist_ok=True)
        self.run.checkpoints.joinpath("latest").write_text(f"global_step{step}")

    def ended(self, attempt: AttemptDir, reason: str) -> None:
        write_json(attempt.exit, {"reason": reason, "exit_code": 1})

    def call(self, moment: str, attempt: AttemptDir, restarts: int = 0) -> NextRecord | None:
        argv = [*program_argv(), moment, "--attempt-dir", str(attempt.path), "--job-id", "12"]
        done = subprocess.run(
            [*argv, "--restart-count", str(restarts)], capture_output=True, text=True, timeout=300, check=False
        )
        self.rc, self.said = done.returncode, done.stderr
        return read_next(attempt)

    def asked(self, command: str) -> list[list[str]]:
        return [call["argv"][1:] for call in self.slurm.calls(command)]


@pytest.fixture
def carried(tmp_path: Path, fake_slurm: Callable[..., Any]) -> Carried:
    slurm = fake_slurm("squeue", "scontrol", "sbatch", "scancel")
    slurm.answer("squeue", "RUNNING 0\n")
    slurm.answer("sbatch", "13;bsl\n")
    path = tmp_path / "runs" / "it's mine"
    path.mkdir(parents=True)
    return Carried(path, slurm)


def test_a_start_that_was_stopped_requeues_its_job(carried: Carried) -> None:
    attempt = carried.start("0001", step=19)
    assert carried.call("gate", attempt) is None and carried.rc == 0
    chain = read_chain(attempt)
    assert chain is not None and chain.num_starts == 1
    carried.saved(19)
    carried.ended(attempt, "stopped")
    found = carried.call("end", attempt)
    assert found is not None and found.continues and found.next_attempt == "0001.r1"
    assert carried.asked("scontrol") == [["requeue", "12"]]
    assert has_parts(carried.said, "start 0001", "stopped", "step 19")


def test_a_refused_requeue_is_told(carried: Carried) -> None:
    words = "Requested operation is presently disabled"
    carried.slurm.answer("scontrol", stderr=words, rc=1)
    attempt = carried.start("0001", step=19)
    carried.ended(attempt, "stopped")
    found = carried.call("end", attempt)
    assert found is not None and (found.action, found.asked, found.continues) == ("continue", False, False)
    assert found.words == words and words in carried.said


@pytest.mark.parametrize(("answer", "asked"), [("COMPLETING 0\n", False), ("PENDING 1\n", True)])
def test_a_job_that_somebody_ended_or_slurm_requeued_is_left_alone(carried: Carried, answer: str, asked: bool) -> None:
    carried.slurm.answer("squeue", answer)
    attempt = carried.start("0001", step=19)
    carried.ended(attempt, "node_failure")
    found = carried.call("end", attempt)
    assert found is not None and found.asked is asked
    assert carried.asked("scontrol") == []


def test_slurm_is_not_asked_when_no_step_was_made(carried: Carried) -> None:
    first = carried.start("0001", step=19)
    carried.call("gate", first)
    carried.saved(15)
    carried.ended(first, "crashed")
    second = carried.start("0001.r1", step=19)
    assert carried.call("gate", second, restarts=1) is None and carried.rc == 0
    carried.ended(second, "crashed")
    found = carried.call("end", second, restarts=1)
    assert found is not None and (found.action, found.progress) == ("stop", "none")
    assert has_parts(found.sentence, "step 19")
    assert carried.asked("scontrol") == []
    # Slurm starts it all the same, as after the death of the batch host: the gate ends the start.
    third = carried.start("0001.r2")
    found = carried.call("gate", third, restarts=2)
    assert carried.rc == 11 and found is not None and found.action == "stop"
    assert json.loads(third.exit.read_text())["reason"] == "not_started"


def test_the_gate_ends_a_start_of_a_finished_run(carried: Carried) -> None:
    first = carried.start("0001", step=60)
    carried.ended(first, "finished")
    carried.saved(60)
    second = carried.start("0001.r1")
    assert carried.call("gate", second, restarts=1) is not None
    assert carried.rc == 10
    ended = json.loads(second.exit.read_text())
    assert (ended["reason"], ended["exit_code"]) == ("finished", 0)


def test_only_a_preemption_is_continued_without_a_chain(carried: Carried) -> None:
    attempt = carried.start("0001", step=19, only_preempted=True)
    assert carried.call("gate", attempt) is None and carried.rc == 0
    carried.ended(attempt, "stopped")
    assert carried.call("end", attempt) is None
    assert carried.asked("scontrol") == []
    carried.ended(attempt, "preempted")
    found = carried.call("end", attempt)
    assert found is not None and found.continues
    assert carried.asked("scontrol") == [["requeue", "12"]]


def test_an_expedited_job_that_fails_is_not_held(carried: Carried) -> None:
    """Slurm would hold it in the queue. What came from outside, it judges itself: a lost node starts the job again."""
    attempt = carried.start("0001", step=19, only_preempted=True, is_expedited=True)
    for reason, state, asked in (
        ("node_failure", "RUNNING 0", []),
        ("cancelled", "CANCELLED 0", []),
        ("crashed", "RUNNING 0", [["update", "JobId=12", "Requeue=0"]]),
    ):
        carried.slurm.answer("squeue", f"{state}\n")
        carried.ended(attempt, reason)
        carried.call("end", attempt)
        assert carried.asked("scontrol") == asked
    carried.slurm.answer("squeue", "EXPEDITING 0\n")
    carried.ended(attempt, "preempted")
    found = carried.call("end", attempt)
    assert found is not None and found.continues and len(carried.asked("scontrol")) == 1


def test_what_bsl_cancel_ended_does_not_come_back(carried: Carried) -> None:
    attempt = carried.start("0001.r1", step=19)
    carried.run.attempt("0001").path.mkdir()
    attempt.cancel_mark.write_text("")
    carried.ended(attempt, "preempted")
    found = carried.call("end", attempt)
    assert found is not None and found.action == "stop"
    assert has_parts(found.sentence, "`bsl cancel`")
    assert carried.asked("scontrol") == []


def test_a_megatron_program_is_judged_by_its_lines_and_checkpoints(carried: Carried) -> None:
    attempt = carried.start("0001", total_steps=None)
    line = "2026-11-23T03:00:00.000000Z  iteration       50/     100 | lm loss: 4.5E+00 |\n"
    attempt.log_file(3).write_text(line)
    carried.ended(attempt, "finished")
    found = carried.call("end", attempt)
    assert found is not None and (found.action, found.step) == ("continue", 50)
    attempt.log_file(3).write_text("training\n")
    found = carried.call("end", attempt)
    assert found is not None and found.action == "finished"
    carried.ended(attempt, "crashed")
    found = carried.call("end", attempt)
    assert found is not None and (found.action, found.progress) == ("continue", "unknown")
    carried.run.checkpoints.mkdir()
    carried.run.checkpoints.joinpath("latest_checkpointed_iteration.txt").write_text("40\n")
    found = carried.call("end", attempt)
    assert found is not None and (found.action, found.progress, found.step) == ("continue", "made", 40)


def test_the_next_attempt_is_queued_from_inside(carried: Carried) -> None:
    first = carried.start("0001", by="queue", step=19)
    assert carried.call("gate", first) is not None and carried.rc == 0
    assert carried.asked("sbatch") == [], "bsl submit queues the second one"
    carried.ended(first, "stopped")
    found = carried.call("end", first)
    assert found is not None and (found.next_attempt, found.next_job_id, found.continues) == ("0002", "13", True)
    second = carried.run.attempt("0002")
    assert carried.asked("sbatch") == [["--parsable", "--dependency=afterany:12", str(second.script)]]
    assert [each.name for each in carried.run.attempts()] == ["0001"], "it has not started"
    assert [each.name for each in carried.run.queued_attempts()] == ["0002"]
    text = second.script.read_text()
    assert "0001" not in text and "first_attempt=0002\n" in text and "attempts/0002/job.out" in text
    assert second.job_output.stat().st_mode & 0o022 == 0, "Slurm would make it as the umask says"
    assert json.loads(second.job.read_text())["job_id"] == "13"
    chain = read_chain(second)
    assert chain is not None and (chain.first, chain.after, chain.num_starts) == ("0001", "0001", None)
    carried.slurm.answer("squeue", "PENDING\n")
    found = carried.call("end", first)
    assert found is not None and found.next_job_id == "13"
    assert len(carried.asked("sbatch")) == 1, "one waits already"


def test_a_refused_submission_leaves_nothing(carried: Carried) -> None:
    carried.slurm.answer("sbatch", stderr="sbatch: error: Access/permission denied", rc=1)
    attempt = carried.start("0001", by="queue", step=19)
    carried.ended(attempt, "stopped")
    found = carried.call("end", attempt)
    assert found is not None and (found.action, found.asked, found.next_attempt) == ("continue", False, None)
    assert "Access/permission denied" in (found.words or "") and "`bsl submit`" in carried.said
    assert [path.name for path in carried.run.attempts_folder.iterdir()] == ["0001"]


def test_a_submission_without_an_answer_is_looked_for_at_the_next_decision(carried: Carried) -> None:
    carried.slurm.answer("sbatch", stderr="sbatch: error: Socket timed out on send/recv operation", rc=1)
    attempt = carried.start("0001", by="queue", step=19)
    carried.ended(attempt, "stopped")
    carried.call("end", attempt)
    [queued] = carried.run.queued_attempts()
    carried.slurm.answer("squeue", f"31|{queued.script}\n")
    found = carried.call("end", attempt)
    assert found is not None and (found.next_attempt, found.next_job_id) == ("0002", "31")
    assert len(carried.asked("sbatch")) == 1


def test_a_finished_run_withdraws_what_waits_behind_it(carried: Carried) -> None:
    first, second = carried.start("0001", by="queue", step=60), carried.start("0002", by="queue")
    second.queued_mark.write_text("")
    carried.ended(first, "finished")
    carried.saved(60)
    carried.slurm.answer("squeue", "PENDING\n")
    found = carried.call("end", first)
    assert found is not None and found.action == "finished"
    assert carried.asked("scancel") == [["12"]]
    assert not second.path.exists()


def test_the_last_start_that_is_allowed_queues_none(carried: Carried) -> None:
    carried.ended(carried.start("0001", by="queue", step=19, max_starts=2), "stopped")
    second = carried.start("0002", by="queue", max_starts=2)
    found = carried.call("gate", second)
    assert carried.rc == 0 and found is not None
    assert has_parts(found.words or "", "start 2", "slurm.chain.max_starts is 2")
    assert carried.asked("sbatch") == []


def test_a_person_who_asked_to_exit_ends_the_chain_and_a_restart_continues_it(carried: Carried) -> None:
    attempt = carried.start("0001", step=19)
    carried.saved(19)
    carried.ended(attempt, "stopped")
    write_ended_by(attempt, EndedBy("exit", "alice", "NaN", continues=False))
    found = carried.call("end", attempt)
    assert found is not None and found.action == "stop" and has_parts(found.sentence, "alice", "NaN")
    assert carried.asked("scontrol") == []
    write_ended_by(attempt, EndedBy("restart", "bob", "new revision", continues=True, step=19))
    found = carried.call("end", attempt)
    assert found is not None and found.continues and has_parts(found.sentence, "bob", "step 19", "new revision")
    assert carried.asked("scontrol") == [["requeue", "12"]]


# ------------------------------------------------------------------------------------------- several links


def link(carried: Carried, name: str, job_id: str | None) -> AttemptDir:
    """Queue an attempt behind the others; without a job ID its submission was killed before job.json."""
    attempt = carried.start(name, by="queue", links=3)
    attempt.queued_mark.write_text("")
    if job_id is None:
        attempt.job.unlink()
    else:
        write_job(attempt, JobRecord("slurm", time.time(), job_id=job_id, total_steps=60))
    return attempt


def test_a_start_tops_up_what_waits_behind_it(carried: Carried) -> None:
    carried.slurm.answer("squeue", "PENDING|Dependency\n")
    carried.ended(carried.start("0001", by="queue", step=19), "stopped")
    second = carried.start("0002", by="queue", step=20, links=3)
    link(carried, "0003", "31")
    found = carried.call("gate", second)
    assert carried.rc == 0 and found is not None and (found.next_attempt, found.next_job_id) == ("0003", "31")
    # Each waits for all before it: the one in the middle may be cancelled by hand.
    waits = [call[1] for call in carried.asked("sbatch")]
    assert waits == ["--dependency=afterany:12:31", "--dependency=afterany:12:31:13"]
    assert [each.name for each in carried.run.queued_attempts()] == ["0003", "0004", "0005"]
    chain = read_chain(carried.run.attempt("0005"))
    assert chain is not None and (chain.links, chain.first, chain.num_starts) == (3, "0001", None)
    assert has_parts(carried.said, "31, 13, 13", "0003, 0004, 0005")
    carried.ended(second, "stopped")
    assert carried.call("end", second) is not None
    assert len(carried.asked("sbatch")) == 2, "nothing is missing"


def test_the_bound_of_starts_bounds_what_waits(carried: Carried) -> None:
    carried.ended(carried.start("0001", by="queue", step=19), "stopped")
    second = carried.start("0002", by="queue", links=3, max_starts=4)
    carried.slurm.answer("squeue", "PENDING|Dependency\n")
    assert carried.call("gate", second) is not None and carried.rc == 0
    assert [each.name for each in carried.run.queued_attempts()] == ["0003", "0004"]


def test_a_link_that_somebody_cancelled_or_that_can_never_start_is_replaced(carried: Carried) -> None:
    first = carried.start("0001", by="queue", step=19)
    carried.ended(first, "stopped")
    link(carried, "0002", "31")
    carried.slurm.answer("squeue", "CANCELLED|None\n")
    found = carried.call("end", first)
    assert found is not None and (found.next_attempt, found.next_job_id) == ("0002", "13"), "its name is free again"
    carried.slurm.answer("squeue", "PENDING|DependencyNeverSatisfied\n")
    assert carried.call("end", first) is not None
    assert carried.asked("scancel") == [["13"]] and len(carried.asked("sbatch")) == 2
    carried.slurm.answer("squeue", "PENDING|JobHeldUser\n")
    assert carried.call("end", first) is not None
    assert "job 13 is held (JobHeldUser)" in carried.said and len(carried.asked("sbatch")) == 2


def test_a_site_that_takes_some_links_only_is_said(carried: Carried) -> None:
    first = carried.start("0001", by="queue", step=19, links=3)
    carried.ended(first, "stopped")
    link(carried, "0002", "31")
    carried.slurm.answer("squeue", "PENDING|Dependency\n")
    carried.slurm.answer("sbatch", stderr="sbatch: error: QOSMaxSubmitJobPerUserLimit", rc=1)
    found = carried.call("end", first)
    assert found is not None and (found.asked, found.next_job_id) == (True, "31")
    assert found.words == "sbatch: error: QOSMaxSubmitJobPerUserLimit"
    assert has_parts(carried.said, "job 31", "0002", "1 of 3", found.words)
    assert [each.name for each in carried.run.queued_attempts()] == ["0002"]


def test_a_job_whose_submission_was_killed_is_found_again(carried: Carried) -> None:
    first = carried.start("0001", by="queue", step=19)
    carried.ended(first, "stopped")
    second = link(carried, "0002", None)
    carried.slurm.answer("squeue", f"9|/other/script.sh\n31|{second.script}\n")
    carried.call("end", first)
    record = read_job(second)
    assert record is not None and (record.job_id, record.total_steps) == ("31", 60)
    # Slurm has no such job: nothing was submitted, and another attempt takes the name.
    second = link(carried, "0002", None)
    carried.slurm.answer("squeue", "")
    before = len(carried.asked("sbatch"))
    found = carried.call("end", first)
    assert found is not None and len(carried.asked("sbatch")) == before, "it may still be in submission"
    os.utime(second.path, (0, 0))
    found = carried.call("end", first)
    assert found is not None and (found.next_attempt, found.next_job_id) == ("0002", "13")


def test_a_start_whose_submission_was_killed_notes_its_own_job(carried: Carried) -> None:
    carried.ended(carried.start("0001", by="queue", step=19), "stopped")
    second = carried.start("0002", by="queue")
    second.job.unlink()
    assert carried.call("gate", second) is not None
    record = read_job(second)
    assert record is not None and (record.job_id, record.scheduler) == ("12", "slurm")


def test_all_links_are_withdrawn_the_last_one_first(carried: Carried) -> None:
    first = carried.start("0001", by="queue", step=60, links=2)
    link(carried, "0002", "31")
    link(carried, "0003", "32")
    carried.ended(first, "finished")
    carried.slurm.answer("squeue", "PENDING|Dependency\n")
    found = carried.call("end", first)
    assert found is not None and found.action == "finished"
    assert carried.asked("scancel") == [["32"], ["31"]]
    assert carried.run.queued_attempts() == []

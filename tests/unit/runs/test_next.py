"""What `bsl status` says about the next start of a run, from records on disk and a fake squeue."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
from click.testing import CliRunner

from bigsci_launch.cli.main import bsl
from bigsci_launch.errors import RunDirError
from bigsci_launch.launch.decide import find_turn, require_silent
from bigsci_launch.procfs import start_ticks
from bigsci_launch.runs.attempts import JobRecord, read_job, write_job
from bigsci_launch.runs.chain.records import ChainRecord, NextRecord, write_chain
from bigsci_launch.runs.layout import write_json
from bigsci_launch.scheduler.lease import is_renewed, kept_lease
from bigsci_launch.scheduler.local import Launcher
from tests.support.texts import CheckText, has_parts, without_ages
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

SENTENCE = "start 0001 ended: stopped; it reached step 19"


def line(state: str, job_id: str = "12", start: str = "N/A") -> str:
    return f"{job_id}|{state}|root|debug|4|n[0-3]|None|{start}|N/A|1:00|N/A|trial|(null)\n"


@pytest.fixture
def slurm(fake_slurm: Callable[..., Any]) -> Any:
    fake = fake_slurm("squeue", "sinfo", "scancel")
    fake.answer("squeue", line("RUNNING"))
    fake.answer("sinfo", "")
    return fake


def chain(by: str = "requeue", **more: Any) -> ChainRecord:
    values = {"max_starts": 50, "max_hours": None, "total_steps": 20, "only_preempted": False, "first": "0001"}
    return ChainRecord(by=by, **{**values, **more})  # type: ignore[arg-type]


def decide(trial: Any, **more: Any) -> None:
    """Write what the job script decided."""
    values: dict[str, Any] = {"attempt": "0001", "action": "continue", "sentence": SENTENCE, "progress": "made"}
    values |= {"step": 19, "by": "requeue", "num_starts": 1, "max_starts": 50, "next_attempt": "0001.r1"}
    values |= {"next_job_id": "12", "asked": True, "words": None, "decided": trial.now}
    write_json(trial.attempt.next, asdict(NextRecord(**{**values, **more})))


def command(trial: Any) -> None:
    words = ["/opt/bin/bsl", "submit", "my run.yaml", "--set", "training.steps=20"]
    write_json(trial.attempt.provenance, {"command": words})


def status(*words: str) -> Any:
    done = CliRunner().invoke(bsl, ["status", "trial", *words])
    assert done.exit_code == 0, done.output
    return done.stdout


def said(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith("next start")]
    return lines[0].removeprefix("next start").strip() if lines else ""


def test_a_running_chain(slurm: Any, trial: Any, check_text: CheckText) -> None:
    assert said(status()) == "" and json.loads(status("--json"))["next"] is None
    write_chain(trial.attempt, chain())
    always = said(status())
    write_chain(trial.attempt, chain(only_preempted=True))
    check_text(always, said(status()))


def test_a_job_that_was_requeued_says_when_and_as_what_it_starts(slurm: Any, trial: Any) -> None:
    write_chain(trial.attempt, chain())
    trial.ended("stopped", 0)
    decide(trial)
    slurm.answer("squeue", line("PENDING", start="2099-11-23T10:32:05"))
    assert has_parts(said(status()), "10:32:05", "0001.r1", SENTENCE)
    found = json.loads(status("--json"))["next"]
    assert (found["attempt"], found["job_id"], found["submit_again"]) == ("0001.r1", "12", None)
    assert json.loads(CliRunner().invoke(bsl, ["list", "--json"]).stdout)["runs"][0]["state"] == "PENDING"


def test_a_chain_that_stopped_says_why_and_how_to_go_on(slurm: Any, trial: Any, check_text: CheckText) -> None:
    write_chain(trial.attempt, chain())
    command(trial)
    slurm.answer("squeue", line("COMPLETED"))
    trial.ended("stopped", 0)
    decide(trial, action="stop", sentence="it is enough", next_attempt=None)
    texts = [status()]
    slurm.answer("squeue", line("COMPLETING"))
    texts.append(said(status()))
    slurm.answer("squeue", line("COMPLETED"))
    decide(trial, action="stop", sentence="no step", progress="none")
    check_text(*texts, status())


def test_a_refusal_of_slurm_is_shown(slurm: Any, trial: Any, check_text: CheckText) -> None:
    write_chain(trial.attempt, chain())
    slurm.answer("squeue", line("COMPLETED"))
    trial.ended("preempted", 0)
    decide(trial, asked=False, words="Requested operation is presently disabled")
    check_text(status())


@pytest.mark.parametrize("reason", ["stopped", "preempted", "time_limit"])
def test_a_run_without_a_chain_is_submitted_again(slurm: Any, trial: Any, reason: str) -> None:
    command(trial)
    slurm.answer("squeue", line("COMPLETED"))
    trial.ended(reason, 0)
    assert said(status()) == ""
    assert has_parts(status().splitlines()[-1], "next: ", "bsl submit 'my run.yaml' --set training.steps=20")
    trial.attempt.cancel_mark.write_text("")
    assert "next:" not in status()


def test_what_waits_behind_a_run_is_shown_and_cancelled_with_it(slurm: Any, trial: Any, check_text: CheckText) -> None:
    write_chain(trial.attempt, chain("queue"))
    trial.queue("0002", "13")
    slurm.answer("squeue", line("RUNNING") + line("PENDING", "13"))
    texts = [said(status())]
    with pytest.raises(RunDirError, match=r"0002 .*13"):
        find_turn(trial.run, chain("queue"))
    slurm.answer("squeue", line("COMPLETED") + line("PENDING", "13"))
    check_text(*texts, said(status()))
    slurm.answer("squeue", line("COMPLETED") + line("CANCELLED", "13"))
    assert said(status()) == "" and find_turn(trial.run, chain("queue")) is None
    assert trial.run.next_attempt_name() == "0003"


def test_a_chain_by_queue_with_nothing_behind_it_names_the_command(
    slurm: Any, trial: Any, check_text: CheckText
) -> None:
    write_chain(trial.attempt, chain("queue"))
    command(trial)
    trial.log(0, "training\n")
    decide(trial, by="queue", asked=False, words="sbatch: command not found on n0", next_attempt=None)
    check_text(without_ages(status()))


def test_only_a_chain_by_queue_may_wait_behind_an_active_attempt(slurm: Any, trial: Any) -> None:
    active = find_turn(trial.run, chain("queue"))
    assert active is not None and active.attempt.name == "0001"
    for refused in (None, chain("requeue")):
        with pytest.raises(RunDirError, match="0001") as caught:
            find_turn(trial.run, refused)
        assert "slurm.chain.by=queue" in str(caught.value.hint)


def test_the_number_of_jobs_that_wait_is_said(slurm: Any, trial: Any, check_text: CheckText) -> None:
    write_chain(trial.attempt, chain(by="queue", links=3))
    trial.queue("0002", "13")
    trial.queue("0003", "14")
    slurm.answer("squeue", line("RUNNING") + line("PENDING", "13") + line("PENDING", "14"))
    texts = [said(status())]
    assert json.loads(status("--json"))["next"]["num_queued"] == 2
    decide(trial, by="queue", next_attempt="0002", next_job_id="13", words="QOSMaxSubmitJobPerUserLimit")
    check_text(*texts, said(status()))
    # Two of three wait: `bsl submit` queues the third behind all of them.
    turn = find_turn(trial.run, chain(by="queue", links=3))
    assert turn is not None and (turn.attempt.name, turn.jobs) == ("0003", ("12", "13", "14"))
    assert (turn.num_starts, turn.num_waiting) == (3, 2)
    with pytest.raises(RunDirError, match=r"0002 .*13.*0003 .*14"):
        find_turn(trial.run, chain(by="queue", links=2))


def on_another_host(trial: Any) -> None:
    launcher = Launcher(os.getpid(), start_ticks(os.getpid()) or 0, "elsewhere")
    write_job(trial.attempt, JobRecord("local", trial.now, launcher=launcher))


def test_an_attempt_that_may_run_on_another_host_is_followed_only_with_force(trial: Any) -> None:
    on_another_host(trial)
    with pytest.raises(RunDirError, match=r"0001 .* elsewhere"):
        find_turn(trial.run, None)
    assert find_turn(trial.run, None, force=True) is None


def test_one_that_renews_its_lease_is_not_followed_whatever_is_forced(
    trial: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_another_host(trial)
    monkeypatch.setattr("bigsci_launch.scheduler.lease.RENEW_S", 0.1)
    with kept_lease(trial.attempt.lease), pytest.raises(RunDirError):
        require_silent(trial.run)
    wait_until(lambda: "lease" not in [thread.name for thread in threading.enumerate()])
    assert not is_renewed(trial.attempt.lease, within_s=0.4)
    trial.ended("crashed", 1)
    require_silent(trial.run)


def test_a_job_on_a_cluster_that_was_not_asked_may_still_run(fake_slurm: Any, trial: Any) -> None:
    slurm = fake_slurm("squeue", "scontrol")
    record = read_job(trial.attempt)
    assert record is not None
    write_job(trial.attempt, replace(record, cluster="sun"))
    slurm.answer("squeue", "")
    slurm.answer("scontrol", "ClusterName = moon\n")
    with pytest.raises(RunDirError, match="cluster sun"):
        find_turn(trial.run, None)
    slurm.answer("scontrol", "ClusterName = sun\n")
    assert find_turn(trial.run, None) is None

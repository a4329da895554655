"""How far a chain carries a run, and what a watcher says of it: from records on disk and a fake squeue."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest

from bigsci_launch.runs.chain.outlook import NOTHING_QUEUED, Outlook, chain_outlook
from bigsci_launch.runs.chain.records import ChainRecord, NextRecord, write_chain
from bigsci_launch.runs.layout import AttemptDir, read_json, write_json
from tests.support.texts import has_parts

CHAIN = ChainRecord("queue", 5, None, 20, only_preempted=False, first="0001", num_starts=1, links=2)
REFUSED = "sbatch: error: Access/permission denied"


@pytest.fixture
def slurm(fake_slurm: Callable[..., Any]) -> Any:
    fake = fake_slurm("squeue")
    fake.answer("squeue", waiting("13"))
    return fake


def waiting(job_id: str, reason: str = "Dependency") -> str:
    return f"{job_id}|PENDING|root|debug|4||{reason}|N/A|N/A|1:00|N/A|trial|(null)\n"


def decide(attempt: AttemptDir, **more: Any) -> None:
    values: dict[str, Any] = {"attempt": attempt.name, "action": "continue", "sentence": "it has just started"}
    values |= {"progress": "unknown", "step": None, "by": "queue", "num_starts": 1, "max_starts": 5, "words": None}
    values |= {"next_attempt": None, "next_job_id": None, "asked": True, "decided": time.time()}
    write_json(attempt.next, asdict(NextRecord(**{**values, **more})))


def kinds(found: Outlook) -> list[str]:
    return [warning.kind for warning in found.warnings]


def test_what_is_left_and_what_waits(slurm: Any, trial: Any) -> None:
    write_chain(trial.attempt, replace(CHAIN, num_starts=2, max_hours=10.0))
    began = time.time() - 4 * 3600
    write_json(trial.attempt.chain, {**read_json(trial.attempt.chain), "started": began})
    trial.queue("0002", "13")
    found = chain_outlook(trial.run, trial.attempt)
    assert (found.starts_left, [each.job.job_id for each in found.links]) == (3, ["13"])
    assert found.hours_left == pytest.approx(6.0, abs=0.1)
    assert (found.is_last, found.warnings, found.why_last) == (False, (), None)
    asked = len(slurm.calls("squeue"))
    assert len(chain_outlook(trial.run, trial.attempt, ask_slurm=False).links) == 1
    assert len(slurm.calls("squeue")) == asked


def test_the_last_start_is_announced(slurm: Any, trial: Any) -> None:
    attempt = trial.attempt
    assert "slurm.chain" in str(chain_outlook(trial.run, attempt).why_last)
    assert kinds(chain_outlook(trial.run, attempt)) == [], "nobody expects another start"
    write_chain(attempt, replace(CHAIN, num_starts=5))
    found = chain_outlook(trial.run, attempt)
    [warning] = found.warnings
    assert warning.kind == "last_link" and has_parts(warning.sentence, "start 5", "slurm.chain.max_starts")
    write_chain(attempt, replace(CHAIN, max_hours=1.0))
    write_json(attempt.chain, {**read_json(attempt.chain), "started": time.time() - 7200})
    assert "slurm.chain.max_hours" in str(chain_outlook(trial.run, attempt).why_last)
    write_chain(attempt, replace(CHAIN, only_preempted=True, by="requeue"))
    assert "slurm.chain does" in str(chain_outlook(trial.run, attempt).why_last)


def test_a_site_that_refuses_to_queue_is_the_last_link_and_what_was_not_tried_is_not(slurm: Any, trial: Any) -> None:
    attempt = trial.attempt
    write_chain(attempt, CHAIN)
    decide(attempt, asked=False, words=REFUSED)
    assert REFUSED in str(chain_outlook(trial.run, attempt).why_last)
    decide(attempt, asked=False, words=NOTHING_QUEUED)
    found = chain_outlook(trial.run, attempt)
    assert (found.why_last, kinds(found)) == (None, []), "`bsl submit` may be about to queue one"
    decide(attempt, asked=False, words=NOTHING_QUEUED, decided=time.time() - 600)
    found = chain_outlook(trial.run, attempt)
    assert (found.why_last, kinds(found)) == (None, ["no_link"])
    trial.queue("0002", "13")
    assert kinds(chain_outlook(trial.run, attempt)) == []


def test_jobs_that_wait_for_nothing_are_said(slurm: Any, trial: Any) -> None:
    write_chain(trial.attempt, CHAIN)
    trial.queue("0002", "13")
    decide(trial.attempt, action="finished", sentence="the run is finished: step 20")
    [warning] = chain_outlook(trial.run, trial.attempt).warnings
    assert warning.kind == "finished_but_queued" and has_parts(warning.sentence, "jobs 13", "`bsl cancel trial`")
    decide(trial.attempt)
    for reason, words in (("DependencyNeverSatisfied", "job 13"), ("JobHeldUser", "scontrol release 13")):
        slurm.answer("squeue", waiting("13", reason))
        [warning] = chain_outlook(trial.run, trial.attempt).warnings
        assert warning.kind == "stuck_link" and words in warning.sentence


def test_two_failures_at_one_step_are_a_storm(slurm: Any, trial: Any) -> None:
    ends = {"0001": ("made", 45), "0002": ("none", 45)}
    for name, (progress, step) in ends.items():
        attempt = trial.attempt if name == "0001" else trial.add_attempt(name)
        write_json(attempt.exit, {"reason": "hang", "exit_code": 143})
        decide(attempt, progress=progress, step=step)
    third = trial.add_attempt("0003")
    write_chain(third, CHAIN)
    [warning] = chain_outlook(trial.run, third).warnings
    assert warning.kind == "restart_storm" and has_parts(warning.sentence, "0001", "0002", "step 45", "hang")
    decide(trial.run.attempt("0002"), progress="made", step=45)
    assert kinds(chain_outlook(trial.run, third)) == [], "it left a newer checkpoint"
    decide(trial.run.attempt("0002"), progress="none", step=45)
    write_json(trial.run.attempt("0001").exit, {"reason": "time_limit", "exit_code": 143})
    assert kinds(chain_outlook(trial.run, third)) == [], "it did not fail there"

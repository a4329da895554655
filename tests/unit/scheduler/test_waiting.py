"""Why a job waits, in plain words."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from bigsci_launch.scheduler.job import JobInfo, JobState
from bigsci_launch.scheduler.waiting import REASONS, STATES, advice_for, find_reason, meaning_of


def waiting(reason: str) -> JobInfo:
    return JobInfo("12", JobState.PENDING, "PENDING", "squeue", partition="gpu,gpu2", reason=reason)


SEEN = """
Priority; Resources; ; QOSMaxGRESPerUser; QOSMaxJobsPerUserLimit; QOSGrpNodeLimit; QOSMaxWallDurationPerJobLimit;
AssocGrpGRES; AssocMaxJobsLimit; PartitionNodeLimit; PartitionTimeLimit; BeginTime; Dependency; Licenses; NodeDown;
DependencyNeverSatisfied; JobHeldUser; JobHeldAdmin; ReqNodeNotAvail, UnavailableNodes:n[1-2]; Reservation;
ReqNodeNotAvail, Reserved for maintenance; RequeueExit; RequeueHold; job requeued in held state;
Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions
"""


def test_the_common_reasons(check_text: Callable[..., None]) -> None:
    jobs = {reason: waiting(reason) for reason in map(str.strip, SEEN.split(";"))}
    check_text(*(f"{reason}: {meaning_of(job)}\n  {advice_for(job, 'demo')}" for reason, job in jobs.items()))


def test_a_word_of_tomorrow_is_not_translated() -> None:
    assert meaning_of(waiting("MoonPhase")) is None and advice_for(waiting("MoonPhase"), "demo") is None


def test_only_a_job_that_waits_has_a_reason_to_wait() -> None:
    assert meaning_of(JobInfo("12", JobState.FAILED, "FAILED", "squeue", reason="NodeDown")) is None


@pytest.mark.parametrize("state", STATES)
def test_some_states_say_more_than_the_reason_next_to_them(state: JobState) -> None:
    """Slurm 22.05 says `JobHeldUser` of a job that its cluster holds back for its exit code: its owner did not."""
    job = JobInfo("12", state, state.value, "squeue", reason="JobHeldUser")
    assert meaning_of(job) == STATES[state].meaning


def test_no_reason_hides_another() -> None:
    """The first pattern that matches decides: a name must not be swallowed by an earlier pattern."""
    for reason in REASONS:
        word = re.sub(r"\.\*|\*", "", reason.pattern.split("|")[0])
        assert find_reason(word) is reason, word


def test_a_job_of_nobody_is_advised_without_a_run() -> None:
    assert (advice_for(waiting("PartitionNodeLimit"), None) or "").startswith("scancel 12;")
    for reason in REASONS:
        if reason.advice:
            assert "{" not in reason.advice.format(job="1", partition="p", again="a")

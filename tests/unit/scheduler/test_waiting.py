"""Why a job waits, in plain words."""

from __future__ import annotations

import re

import pytest

from bigsci_launch.scheduler.job import JobInfo, JobState
from bigsci_launch.scheduler.waiting import REASONS, advice_for, find_reason, meaning_of


def waiting(reason: str) -> JobInfo:
    return JobInfo("12", JobState.PENDING, "PENDING", "squeue", partition="gpu,gpu2", reason=reason)


@pytest.mark.parametrize(
    ("reason", "words", "advice"),
    [
        ("Priority", "jobs with a higher priority come first", None),
        ("Resources", "waits until enough nodes are free", None),
        ("", "has not looked at it yet", None),
        ("QOSMaxGRESPerUser", "a limit of its QOS for each user", "sacctmgr show qos"),
        ("QOSMaxJobsPerUserLimit", "a limit of its QOS for each user", "sacctmgr show qos"),
        ("QOSGrpNodeLimit", "a limit of its QOS is reached", "sacctmgr show qos"),
        ("QOSMaxWallDurationPerJobLimit", "its QOS allows for a job", "sacctmgr show qos"),
        ("AssocGrpGRES", "a limit of its account or user", "sacctmgr show assoc"),
        ("AssocMaxJobsLimit", "a limit of its account or user", "sacctmgr show assoc"),
        (
            "PartitionNodeLimit",
            "than partition gpu allows: it will not start",
            "bsl cancel demo; then submit it again with",
        ),
        ("PartitionTimeLimit", "longer than partition gpu allows", "slurm.time_limit"),
        ("BeginTime", "after a requeue", None),
        ("Dependency", "waits for another job", "scontrol show job 12"),
        ("DependencyNeverSatisfied", "it will never start", "bsl cancel demo"),
        ("JobHeldUser", "its owner holds it back", "scontrol release 12"),
        ("JobHeldAdmin", "an administrator holds it back", "support"),
        ("ReqNodeNotAvail, UnavailableNodes:n[1-2]", "down, drained or reserved", "sinfo -R -p gpu"),
        ("ReqNodeNotAvail, Reserved for maintenance", "for maintenance", "slurm.time_limit"),
        (
            "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
            "too few nodes are usable",
            "sinfo -R -p gpu",
        ),
        ("Reservation", "its reservation to begin", "scontrol show reservation"),
        ("Licenses", "a licence", "scontrol show licenses"),
        ("NodeDown", "is down", "sinfo -R"),
    ],
)
def test_the_common_reasons(reason: str, words: str, advice: str | None) -> None:
    assert words in (meaning_of(waiting(reason)) or "")
    said = advice_for(waiting(reason), "demo")
    assert said is None if advice is None else advice in (said or "")


def test_a_word_of_tomorrow_is_not_translated() -> None:
    assert meaning_of(waiting("MoonPhase")) is None and advice_for(waiting("MoonPhase"), "demo") is None


def test_only_a_job_that_waits_has_a_reason_to_wait() -> None:
    assert meaning_of(JobInfo("12", JobState.FAILED, "FAILED", "squeue", reason="NodeDown")) is None


def test_no_reason_hides_another() -> None:
    """The first pattern that matches decides: a name must not be swallowed by an earlier pattern."""
    for reason in REASONS:
        word = re.sub(r"\.\*|\*", "", reason.pattern.split("|")[0])
        assert find_reason(word) is reason, word


def test_a_job_of_nobody_is_advised_without_a_run() -> None:
    assert (advice_for(waiting("PartitionNodeLimit"), None) or "").startswith("scancel 12; then submit it again")
    for reason in REASONS:
        if reason.advice:
            assert "{" not in reason.advice.format(job="1", partition="p", again="a")

from __future__ import annotations

import pytest

from bigsci_launch.errors import AmbiguousJob, JobNotFound
from bigsci_launch.scheduler.job import JobInfo, parse_job_line
from bigsci_launch.scheduler.job_ids import asked_as, ended_as, is_job_id, leaders_missing, named_jobs, only_job

# Recorded from squeue 22.05.8 with SQUEUE_FORMAT; the rest of each line is the same here.
ARRAY = (
    ("36_[2-9%2] 36", "PENDING", ""),
    ("36_0 37", "RUNNING", "n0"),
    ("36_1 38", "COMPLETED", "n1"),
)
HET = (("28+0 28", "RUNNING", "n[0-1]"), ("28+1 29", "RUNNING", "n2"))


def jobs(*rows: tuple[str, str, str]) -> list[JobInfo]:
    lines = (f"{ids}|{state}|root|debug|{2 if '-' in where else 1}|{where}|None|N/A|N/A|0:02|N/A|wrap|(null)"
             for ids, state, where in rows)  # fmt: skip
    return [job for line in lines if (job := parse_job_line(line, "squeue")) is not None]


@pytest.mark.parametrize("text", ["1234", "1234_5", "1234+1", "1234_[6-9%2]", "1234_[2,4,6-9]", "1234_[1-9:4]"])
def test_every_spelling_of_slurm_is_an_id(text: str) -> None:
    assert is_job_id(text)


@pytest.mark.parametrize("text", ["-1", "", "x", "12.0", "12_", "12+", "12_[2", "12;rm", "1 2", "12,13"])
def test_anything_else_is_refused_before_slurm_reads_it_as_an_option(text: str) -> None:
    assert not is_job_id(text)
    with pytest.raises(JobNotFound, match="is not the ID of a job"):
        asked_as(text)


def test_slurms_commands_are_asked_in_spellings_that_they_take() -> None:
    assert [asked_as(each) for each in ("36", "36_5", "36_[2-9%2]", "28+1")] == ["36", "36_5", "36", "28"]
    first = {wanted: named_jobs(wanted, jobs(*ARRAY, *HET))[0] for wanted in ("36", "36_[2-9%2]", "36_0", "37", "28+1")}
    assert {wanted: ended_as(wanted, job) for wanted, job in first.items()} == {
        "36": "36",
        "36_[2-9%2]": "36_[2-9]",
        "36_0": "36_0",
        "37": "36_0",  # scancel takes 37, and does nothing
        "28+1": "28+1",
    }


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("36_0", ["36_0"]),
        ("36_1", ["36_1"]),
        ("36_[2-9%2]", ["36_[2-9%2]"]),
        ("37", ["36_0"]),
        ("36", ["36_0"]),  # the only task that runs: arrays chain long trainings
        ("36_7", []),
        ("3", []),
    ],
)
def test_tasks_of_an_array(wanted: str, found: list[str]) -> None:
    assert [job.job_id for job in named_jobs(wanted, jobs(*ARRAY))] == found


def test_an_array_of_several_tasks_that_run_is_not_guessed_at() -> None:
    rows = (*ARRAY, ("36_10 46", "RUNNING", "n1"), ("36_9 45", "RUNNING", "n2"))
    with pytest.raises(AmbiguousJob) as caught:
        only_job("36", named_jobs("36", jobs(*rows)))
    assert "36_0, 36_9, 36_10 RUNNING" in caught.value.message and "36_0" in (caught.value.hint or "")
    over = jobs(("36 36", "CANCELLED", ""), ("36_0 37", "COMPLETED", "n0"), ("36_1 38", "CANCELLED", "n0"))
    with pytest.raises(AmbiguousJob, match="36_0 COMPLETED; 36_1 CANCELLED"):
        only_job("36", named_jobs("36", over))


@pytest.mark.parametrize("wanted", ["28", "28+0", "28+1", "29"])
def test_a_heterogeneous_job_is_one_job(wanted: str) -> None:
    job = only_job(wanted, named_jobs(wanted, jobs(*HET)))
    assert (job.job_id, job.number, job.hostlist, job.num_nodes) == ("28", "28", "n[0-1],n2", 3)
    assert {index: part.number for index, part in job.components.items()} == {0: "28", 1: "29"}


def test_a_component_that_came_alone_is_missing_its_leader() -> None:
    assert leaders_missing(jobs(HET[1])) == ["28"]
    assert leaders_missing(jobs(*HET, *ARRAY)) == []

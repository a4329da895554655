"""Which job an ID means, in any spelling that Slurm's commands print. Pure.

`1234` is a job, an array, or a heterogeneous job. `1234_5` is a task of an array, `1234_[6-9%2]` are its tasks that
still wait, and `1234+1` is a component of a heterogeneous job. Tasks and components have a number of their own as well:
srun takes only that, and `SLURM_JOB_ID` holds it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from bigsci_launch.errors import AmbiguousJob, JobNotFound
from bigsci_launch.scheduler.job import JobInfo, JobState

_JOB_ID = re.compile(r"(?P<base>[0-9]{1,19})(?:_[0-9]{1,19}|_\[[-0-9,:.%]+\]|\+[0-9]{1,9})?")
MAX_LISTED = 4


def is_job_id(text: str) -> bool:
    """Whether `text` is spelled as the ID of a job."""
    return _JOB_ID.fullmatch(text) is not None


def base_of(job_id: str) -> str:
    """Return the number that all tasks or components of a job share.

    Raises:
        JobNotFound: it is no ID of a job.
    """
    found = _JOB_ID.fullmatch(job_id)
    if found is None:
        raise JobNotFound(
            f"{job_id!r} is not the ID of a job",
            hint="squeue prints them: 1234, 1234_5 for a task of an array, 1234+1 in a heterogeneous job",
        )
    return found["base"]


def asked_as(job_id: str) -> str:
    """Return how to ask squeue about a job. A task that waits is in a range, unless squeue is asked for that task.

    Raises:
        JobNotFound: it is no ID of a job.
    """
    base = base_of(job_id)
    return job_id if job_id.removeprefix(f"{base}_").isdigit() else base


def ended_as(wanted: str, job: JobInfo) -> str:
    """Return how to name `wanted` to scancel; `job` is what it means, or the first task of an array.

    It takes no limit on tasks that run at once, and it ignores the number of a task without a word.
    """
    is_number_of_task = wanted == job.number and "_" in job.job_id and base_of(job.job_id) != wanted
    return job.job_id if is_number_of_task else re.sub(r"%[0-9]+(?=\]$)", "", wanted)


def leaders_missing(jobs: Iterable[JobInfo]) -> list[str]:
    """Return the heterogeneous jobs that were found without their first component."""
    found = {job.job_id for job in jobs}
    leaders = {base for base, plus, _ in (job_id.partition("+") for job_id in found) if plus}
    return sorted(base for base in leaders if f"{base}+0" not in found)


def named_jobs(wanted: str, jobs: Sequence[JobInfo]) -> list[JobInfo]:
    """Return the jobs that `wanted` means. Tasks of an array that do not run count only if none of them runs.

    A component stands for its whole heterogeneous job, whose ranks wait for each other.
    """
    # The record of an array has its number once none of its tasks waits.
    named = [job for job in jobs if wanted in (job.job_id, re.split(r"[_+]", job.job_id)[0])]
    named = named or [job for job in jobs if job.number == wanted]
    if named and "+" in named[0].job_id:
        return [_whole(named[0], jobs)]
    named = [job for job in named if "_" in job.job_id] or named
    return [job for job in named if job.state is JobState.RUNNING] or named


def _whole(part: JobInfo, jobs: Iterable[JobInfo]) -> JobInfo:
    """Return the heterogeneous job that has the component `part`."""
    base = part.job_id.partition("+")[0]
    found = {int(job.job_id.partition("+")[2]): job for job in jobs if job.job_id.startswith(f"{base}+")}
    parts = [found[index] for index in sorted(found)]
    return replace(
        parts[0],
        job_id=base,
        number=base,
        num_nodes=sum(each.num_nodes or 0 for each in parts) or None,
        hostlist=",".join(each.hostlist for each in parts if each.hostlist),
        components={index: found[index] for index in sorted(found)},
    )


def only_job(wanted: str, named: Sequence[JobInfo]) -> JobInfo:
    """Return the one job that was named.

    Raises:
        AmbiguousJob: there are several.
    """
    if len(named) == 1:
        return named[0]
    if len(clusters := sorted({job.cluster for job in named})) > 1:
        raise AmbiguousJob(f"job {wanted} is on clusters {', '.join(clusters)}", hint="set SLURM_CLUSTERS to one")
    first = min((job.job_id for job in named), key=_in_order)
    raise AmbiguousJob(f"job {wanted} is an array: {_describe(named)}", hint=f"name one of its tasks, such as {first}")


def _describe(jobs: Sequence[JobInfo]) -> str:
    """Return `6_0, 6_1 RUNNING; 6_[2-9] PENDING`."""
    by_state: dict[str, list[str]] = {}
    for job_id, state in sorted(((job.job_id, job.state.value) for job in jobs), key=lambda each: _in_order(each[0])):
        by_state.setdefault(state, []).append(job_id)
    return "; ".join(f"{_some(ids)} {state}" for state, ids in by_state.items())


def _in_order(job_id: str) -> tuple[int, str]:
    return len(job_id), job_id  # 6_9 comes before 6_10


def _some(ids: Sequence[str]) -> str:
    more = len(ids) - MAX_LISTED
    return ", ".join(ids) if more <= 1 else f"{', '.join(ids[:MAX_LISTED])} and {more} more"

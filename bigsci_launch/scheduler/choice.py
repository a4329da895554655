"""What `bsl spy` asks of that which started the ranks, and which schedulers can answer it."""

from __future__ import annotations

from typing import Protocol

from bigsci_launch.scheduler.here import Here
from bigsci_launch.scheduler.job import JobInfo, MonitorStep, NodeInfo, StepEnd
from bigsci_launch.scheduler.slurm import Slurm


class Scheduler(Protocol):
    """Finds a job and runs programs on its nodes. What those know of a job is in `diagnostics/node_scheduler.py`.

    `name` is what answers call it, `starter` its command that runs a program on nodes. `show_job` and `list_steps` are
    commands to type, with `{job_id}`.
    """

    name: str
    starter: str
    show_job: str
    list_steps: str

    def find_job(self, job_id: str) -> JobInfo:
        """Return the job that an ID means.

        Raises:
            JobNotFound, CollectError: there is none.
            SlurmUnavailable: the scheduler gave no answer.
        """

    def nodes_of(self, job: JobInfo) -> list[NodeInfo]:
        """Return the nodes of a job that runs, in the order of its ranks, and which of them do not respond."""

    def run_on_nodes(self, job_id: str, step: MonitorStep) -> StepEnd:
        """Run a step, and return when it has ended.

        Raises:
            SlurmUnavailable: the starter is missing.
        """

    def command_on_node(self, command: str, job_id: str, *, node: str | None = None, group: int | None = None) -> str:
        """Return the line that runs a shell command on a node of the job, or on all of them, to be typed in a shell."""


HERE: Scheduler = Here()
OF_JOBS: Scheduler = Slurm()
"""The scheduler whose jobs `bsl spy --jobid` takes."""
SCHEDULERS = {each.name: each for each in (OF_JOBS, HERE)}

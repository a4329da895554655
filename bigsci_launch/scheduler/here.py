"""This machine, as a scheduler of one node: the ranks are the processes below a launcher, and its pid is the job."""

from __future__ import annotations

import os
from pathlib import Path

from bigsci_launch.errors import CollectError
from bigsci_launch.procfs import read_processes
from bigsci_launch.scheduler.command import stream_slurm
from bigsci_launch.scheduler.job import JobInfo, JobState, MonitorStep, NodeInfo, StepEnd


def this_node() -> str:
    """Return the name of this machine, as the node agent gives it."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def _has_left_any(pid: int) -> bool:
    """Whether a process of the session or the process group of `pid`, which has ended, still runs."""
    return any(pid in (process.session, process.group) for process in read_processes().values())


class Here:
    """The local launcher's machine, and that of any other launcher."""

    name, starter = "this machine", "sh"
    show_job, list_steps = "ps -fp {job_id}", "pstree -p {job_id}"

    def find_job(self, job_id: str) -> JobInfo:
        """Return the launcher with this pid as a job.

        Raises:
            CollectError: there is no such process.
        """
        if not Path(f"/proc/{job_id}").exists() and not _has_left_any(int(job_id)):
            raise CollectError(
                f"there is no process {job_id} on this machine, and none that it has left",
                hint="--pid takes the pid of the launcher",
            )
        return JobInfo(job_id, JobState.RUNNING, "RUNNING", "launcher", hostlist=this_node(), number=job_id)

    def nodes_of(self, job: JobInfo) -> list[NodeInfo]:
        return [NodeInfo(job.hostlist, "", "")]

    def run_on_nodes(self, job_id: str, step: MonitorStep) -> StepEnd:
        words = stream_slurm(
            step.argv, stdin=step.stdin, until=step.until, on_line=step.on_line, extra_environment=os.environ
        )
        return StepEnd((), words.strip()[-300:])

    def command_on_node(self, command: str, job_id: str, *, node: str | None = None, group: int | None = None) -> str:
        return command

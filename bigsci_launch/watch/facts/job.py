"""What Slurm reports of the watched job, queried in a thread: a silent controller must not stop the watch.

One command every 30 s at most. A local attempt has a launcher instead, which costs nothing to ask.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from bigsci_launch.errors import BslError, CollectError
from bigsci_launch.runs.attempts import query_attempt, unknown
from bigsci_launch.scheduler.choice import HERE
from bigsci_launch.scheduler.hostlist import expand_hostlist
from bigsci_launch.scheduler.job import JobInfo, JobState, NodeInfo
from bigsci_launch.scheduler.reservations import Maintenance, query_maintenance
from bigsci_launch.scheduler.slurm import SLURM_EVERY_S, query_job, query_nodes
from bigsci_launch.watch.watched import WatchedRun

LOCAL_EVERY_S = 2.0
FIRST_ANSWER_S = 5.0
ROUND = ("job", "nodes", "job", "job", "maintenance", "job")
"""What is asked in turn, one command each time."""


@dataclass(frozen=True, slots=True)
class JobView:
    """What is known of the job.

    `seen` is when its state was last known, on the monotonic clock; None if it never was. `why` is why the newest
    question had no answer; empty if it had one. `maintenance` is None until Slurm has said it.
    """

    job: JobInfo
    seen: float | None = None
    why: str = ""
    silent_nodes: tuple[NodeInfo, ...] = ()
    maintenance: tuple[Maintenance, ...] | None = None

    @property
    def is_running(self) -> bool:
        """Whether the job was running when its state was last known."""
        state = self.job.state
        return state.is_active and not state.is_queued

    @property
    def is_over(self) -> bool:
        return self.job.state.is_over or self.job.is_gone


def own_job(job_id: str) -> JobInfo | None:
    """Return the job that this process runs in, if it is that one: it runs, whether or not Slurm answers here."""
    if not job_id or os.environ.get("SLURM_JOB_ID") != job_id:
        return None
    return JobInfo(
        job_id, JobState.RUNNING, "RUNNING", "environment", hostlist=os.environ.get("SLURM_JOB_NODELIST", "")
    )


def _launcher(pid: int) -> JobInfo:
    """Return a launcher on this machine as a job, which is over when its processes are gone."""
    try:
        return HERE.find_job(str(pid))
    except CollectError:
        return JobInfo(str(pid), JobState.COMPLETED, "its processes have ended", "launcher")


class JobPoller:
    """Keeps a view of one job. `view` may be read by any thread at any time."""

    def __init__(self, watched: WatchedRun) -> None:
        self._watched = watched
        self._every_s = LOCAL_EVERY_S if watched.is_local else SLURM_EVERY_S
        self._round = ("job",) if watched.is_local else ROUND
        self._stop = threading.Event()
        self._has_asked = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bsl-watch-job", daemon=True)
        self.view = JobView(unknown(watched.job_id or "", "not queried yet"))

    def start(self) -> None:
        """Ask now and again, in a thread; wait a moment for the first answer."""
        self._thread.start()
        self._has_asked.wait(FIRST_ANSWER_S)

    def stop(self) -> None:
        self._stop.set()

    def ask(self, what: str) -> None:
        """Ask one question now, and take the answer into the view."""
        asked: dict[str, Callable[[], JobView]] = {
            "job": self._ask_job,
            "nodes": self._ask_nodes,
            "maintenance": self._ask_maintenance,
        }
        try:
            self.view = asked[what]()
        except (BslError, OSError) as error:  # the thread stays: an answer may come next time
            self.view = replace(self.view, why=str(error))

    def _run(self) -> None:
        self.ask("job")
        self._has_asked.set()
        number = 0
        while not self._stop.wait(self._every_s):
            number += 1
            self.ask(self._round[number % len(self._round)])

    def _ask_job(self) -> JobView:
        attempt, pid = self._watched.attempt, self._watched.pid
        if pid is not None:
            job = _launcher(pid)
        else:
            job = query_attempt(attempt) if attempt is not None else query_job(self._watched.job_id or "")
        if job.state is JobState.UNKNOWN and not job.is_gone:
            if (own := own_job(job.job_id)) is not None:
                return replace(self.view, job=own, seen=time.monotonic(), why=job.reason)
            return replace(self.view, why=job.reason)  # what was known stays known, with its age
        return replace(self.view, job=job, seen=time.monotonic(), why="")

    def _ask_nodes(self) -> JobView:
        job = self.view.job
        nodes = query_nodes(job.hostlist) if self.view.is_running and job.hostlist else []
        return replace(self.view, silent_nodes=tuple(node for node in nodes if not node.is_responding))

    def _ask_maintenance(self) -> JobView:
        job = self.view.job
        if not (self.view.is_running and job.hostlist):
            return self.view
        return replace(self.view, maintenance=tuple(query_maintenance(expand_hostlist(job.hostlist))))

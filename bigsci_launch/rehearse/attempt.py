"""One attempt of a rehearsal under way: what it shows, the signals that it gets, and its end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal

from bigsci_launch.errors import BslError, RunDirError, SlurmUnavailable
from bigsci_launch.launch.cancel import cancel_run
from bigsci_launch.launch.start_job import Submission
from bigsci_launch.procfs import start_ticks
from bigsci_launch.rehearse.evidence import AttemptEvidence, EvidenceReader, RankProcess
from bigsci_launch.runs.attempts import query_attempt, read_exit
from bigsci_launch.runs.generations.read import read_generations
from bigsci_launch.scheduler.choice import HERE, OF_JOBS
from bigsci_launch.scheduler.job import JobInfo, MonitorStep
from bigsci_launch.scheduler.slurm import signal_script

POLL_S = 0.2
ASK_S = 5.0
"""Seconds between queries to Slurm while the run directory shows enough."""
KILL_LIMIT_S = 30.0
END_LIMIT_S = 90.0
"""How long an attempt may take to end after it was cancelled."""

Waited = Literal["held", "ended", "late"]
# Ends what is left of an attempt: processes whose environment names it. Prints `NODE PID NAME` for each, then `NODE`.
_LEFT_OVER = """
here="${SLURMD_NODENAME:-$(uname -n)}"
for f in $(grep -lzxFs "BSL_RUN_DIR=$1" /proc/[0-9]*/environ); do
  p="${f%/environ}"
  grep -qzxFs "BSL_ATTEMPT=$2" "$f" && echo "$here ${p#/proc/} $(cat "$p/comm")" && kill -KILL "${p#/proc/}"
done
echo "$here"
"""


# Kills the process $1 if it is the one that started $2 ticks after the boot of its node: field 22 of its stat.
KILL_RANK = """
pid="$1" start="$2"
stat="$(cat "/proc/$pid/stat")" || exit 1
set -- ${stat##*) }
[ "${20}" = "$start" ] && kill -KILL "$pid" && echo sent
"""


class RunningAttempt:
    """An attempt that was submitted. Nothing here raises because of what the program does."""

    def __init__(self, submission: Submission) -> None:
        self.submission = submission
        self.run = submission.request.run
        self.attempt = submission.request.attempt
        self.num_ranks = submission.request.topology.world_size
        self._reader = EvidenceReader(self.run, self.attempt, starts_trainer=not submission.request.command)
        self._asked = 0.0
        self._is_over = False

    @property
    def is_local(self) -> bool:
        return self.submission.process is not None

    @property
    def label(self) -> str:
        return f"attempt {self.attempt.name}, {self.submission.record.label}"

    def evidence(self) -> AttemptEvidence:
        return self._reader.read()

    def ending(self) -> dict[str, Any] | None:
        """Return `exit.json`; None as long as it is provisional or missing."""
        ended = read_exit(self.attempt)
        return ended if ended is not None and ended.get("exit_code") is not None else None

    def job(self) -> JobInfo:
        """Return the state of the job, from Slurm or from the launcher."""
        if self.submission.process is not None:
            self.submission.process.poll()  # a launcher that has ended counts as alive until it is reaped
        return query_attempt(self.attempt)

    def is_over(self) -> bool:
        """Whether the job has ended completely: no process of it may run any longer."""
        if not self._is_over:
            job = self.job()
            self._is_over = job.state.is_over or job.is_gone
        return self._is_over

    def wait(self, holds: Callable[[AttemptEvidence], bool], limit_s: float) -> tuple[Waited, AttemptEvidence]:
        """Wait until `holds` is true of the evidence, the attempt ends, or `limit_s` seconds have passed."""
        deadline = time.monotonic() + limit_s
        while True:
            has_ended, late = self._has_ended(), time.monotonic() > deadline
            evidence = self.evidence()
            if holds(evidence):
                return "held", evidence
            if has_ended:
                return "ended", evidence
            if late:
                return "late", evidence
            time.sleep(POLL_S)

    def _has_ended(self) -> bool:
        if self.ending() is not None:
            return True
        if not self.is_local and time.monotonic() - self._asked < ASK_S:
            return False
        self._asked = time.monotonic()
        return self.is_over()

    def wait_for_nodes(self, limit_s: float, tell: Callable[[JobInfo], None]) -> JobInfo:
        """Wait until the job is no longer queued; return its last state, which is queued after `limit_s` seconds."""
        deadline, pause_s, last = time.monotonic() + limit_s, 0.5, ""
        while True:
            job = self.job()
            if f"{job.state} {job.reason}" != last:
                tell(job)
                last = f"{job.state} {job.reason}"
            if not job.state.is_queued or time.monotonic() > deadline:
                return job
            time.sleep(min(pause_s, max(0.1, deadline - time.monotonic())))
            pause_s = min(2 * pause_s, 10.0)

    def wait_for_ending(self, limit_s: float) -> None:
        """Wait until `exit.json` shows how the attempt ended, or its job is over, or `limit_s` seconds have passed."""
        self.wait(lambda _: self.ending() is not None, limit_s)

    def has_recovered(self) -> bool:
        """Whether a generation has been lost, and the next one has come so far as to count as back."""
        found = read_generations(self.attempt)
        return found is not None and len(found.all) > 1 and not found.is_recovering

    def has_gone(self) -> bool:
        """Whether the job is known to be over; False if that cannot be determined."""
        with suppress(BslError):
            return self.is_over()
        return False

    def wait_for_end(self, limit_s: float) -> float | None:
        """Wait until the job has ended completely; return the seconds that took, None if it has not in `limit_s`."""
        began, pause_s = time.monotonic(), POLL_S
        while time.monotonic() - began <= limit_s:
            if self.is_over():
                return time.monotonic() - began
            time.sleep(pause_s)
            pause_s = POLL_S if self.is_local else min(1.5 * pause_s, 5.0)
        return None

    def request_stop(self) -> None:
        """Send what the scheduler sends before the time limit: USR2 to the script of the attempt.

        Raises:
            SlurmError: Slurm does not pass it on. RunDirError: the process is not the launcher of the attempt.
        """
        record = self.submission.record
        if record.launcher is None:
            signal_script(str(record.job_id), "USR2")
        else:
            record.launcher.ask_to_stop(self.attempt.path)

    def kill(self, rank: RankProcess) -> str | None:
        """Send KILL to the program of a rank, on its node. Return why that was not possible; None if it was sent."""
        if not self.is_local:
            return self._kill_on_node(rank)
        if start_ticks(rank.pid) != rank.start_ticks:
            return f"pid {rank.pid} is no longer rank {rank.rank}"
        with suppress(ProcessLookupError):
            os.kill(rank.pid, signal.SIGKILL)
        return None

    def _kill_on_node(self, rank: RankProcess) -> str | None:
        said: list[str] = []
        arguments = [str(rank.pid), str(rank.start_ticks)]
        refused = self._run_on_nodes([rank.node], KILL_RANK, arguments, said)
        if said == ["sent"]:
            return None
        return refused or f"pid {rank.pid} on {rank.node} is no longer rank {rank.rank}, or kill did not reach it"

    def end_left_over(self, attempt_name: str) -> tuple[list[str], list[str]]:
        """End processes that an ended attempt has left on the nodes of this one.

        Return these processes, and the nodes that were looked at.
        """
        said: list[str] = []
        self._run_on_nodes(self.evidence().nodes, _LEFT_OVER, [str(self.run.path), attempt_name], said)
        rows = [line.split(None, 2) for line in said]
        left = [f"pid {row[1]} ({row[2]}) on {row[0]}" for row in rows if len(row) == 3]
        return left, [row[0] for row in rows if len(row) == 1]

    def _run_on_nodes(self, nodes: Sequence[str], script: str, arguments: Sequence[str], said: list[str]) -> str | None:
        """Run a shell script on nodes of the job, next to its ranks; return why it was refused, if it was.

        It has a limit: the environment of a stuck process may never be read.
        """
        deadline = time.monotonic() + KILL_LIMIT_S
        job_id = str(self.submission.record.job_id)
        argv = ["sh", "-c", script, "sh", *arguments]
        try:
            step = MonitorStep(argv, nodes, until=lambda: deadline, on_line=said.append)
            done = (HERE if self.is_local else OF_JOBS).run_on_nodes(job_id, step)
        except SlurmUnavailable as error:
            return error.message
        return done.words or None

    def end(self) -> bool:
        """End the attempt, whatever it does; return whether its processes are known to be gone."""
        if self.is_over():
            return True
        for _ in range(2):  # the second TERM makes a local launcher kill its ranks
            with suppress(RunDirError):
                cancel_run(self.run)
            if self.wait_for_end(END_LIMIT_S) is not None:
                return True
        return False

    def try_to_end(self) -> str | None:
        """Like `end`; return what is left to do, None if nothing is."""
        by_hand = f"`bsl status {self.run.path}` shows whether it still runs, and `bsl cancel {self.run.path}` ends it"
        try:
            return None if self.end() else f"{self.label} was asked to end, but has not ended yet: {by_hand}"
        except BslError as error:
            return f"{self.label} could not be ended: {error.message}; {by_hand}"

"""Follows an attempt in the terminal that started it: prints its lines or states, handles Ctrl-C, returns its exit
code."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from bigsci_launch.launch.report import end_lines, state_line
from bigsci_launch.launch.start_job import Submission
from bigsci_launch.progress import Report
from bigsci_launch.runs.attempts import query_attempt, read_exit
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.runs.log_reader import LogReader
from bigsci_launch.runs.logs import BATCH
from bigsci_launch.scheduler.job import JobInfo, JobState
from bigsci_launch.topology import Topology

POLL_S = 0.2
MAX_UNKNOWN = 10


@dataclass(frozen=True, slots=True)
class Ending:
    """How a watched attempt ended."""

    exit_code: int
    was_interrupted: bool

    def status(self, *, is_known: bool) -> int:
        """Return the exit status of the command: never 0 if no record says how the attempt ended."""
        if self.was_interrupted:
            return 130
        return abs(self.exit_code) + 128 if self.exit_code < 0 else self.exit_code or (0 if is_known else 4)


def report_unknown_end(submission: Submission, ending: Ending, tell: Report) -> None:
    """Say it if the attempt has left no record of its end: on a full disk, its output does not say it either."""
    attempt = submission.request.attempt
    if not attempt.exit.is_file():
        known = "the record is in its output" if exit_of(submission) is not None else "reason unknown"
        tell(
            f"attempt {attempt.name} ended with {ending.exit_code}, but {attempt.exit} was not written: {known}; "
            "check whether its disk is full or read-only"
        )


def follow(submission: Submission, *, wait: bool, detach: bool, tell: Report) -> int | None:
    """Return the exit code of the training after its end, or None if it is not waited for.

    A local attempt is watched unless `detach` is given; a job is waited for only with `wait`. Ctrl-C ends a local
    attempt, but for a job it ends only the wait.
    """
    if submission.process is not None:
        if detach:
            return None
        ending = watch(submission, tell)
        report_unknown_end(submission, ending, tell)
        return ending.status(is_known=exit_of(submission) is not None)
    if not wait:
        return None
    try:
        job = wait_for_end(submission.request.run, lambda job: tell(state_line(job)))
    except KeyboardInterrupt:
        tell(f"no longer waiting; {submission.record.label} continues")
        return 130
    for line in end_lines(submission.request.run, job, exit_of(submission)):
        tell(line)
    return exit_code_of(submission, job)


def watch(submission: Submission, tell: Report) -> Ending:
    """Report each line of the launcher and of the rank that reports steps until the attempt ends.

    Ctrl-C, TERM and the loss of the terminal are forwarded to the launcher as TERM; a second one makes it kill the
    ranks.
    """
    assert submission.process is not None, "only a local attempt can be watched"
    attempt, rank = submission.request.attempt, reporting_rank(submission.request.topology)
    readers = (LogReader(attempt.job_output, BATCH), LogReader(attempt.log_file(rank), rank))
    num_interrupts = 0
    with interrupts_on(signal.SIGTERM, signal.SIGHUP):
        while submission.process.poll() is None:
            try:
                _show_new(readers, tell)
                time.sleep(POLL_S)
            except KeyboardInterrupt:
                num_interrupts += 1
                tell(
                    "ending the ranks (press Ctrl-C again to kill them)" if num_interrupts == 1 else "killing the ranks"
                )
                submission.process.terminate()
        _show_new(readers, tell)
    return Ending(submission.process.returncode, num_interrupts > 0)


def reporting_rank(topology: Topology) -> int:
    """Return the rank that prints a line per step: the first of the last pipeline stage."""
    return topology.rank_at(pp=topology.pp - 1)


def _show_new(readers: tuple[LogReader, ...], tell: Report) -> None:
    for reader in readers:
        for line in reader.new_lines():
            tell(line.text)


@contextmanager
def interrupts_on(*numbers: signal.Signals) -> Iterator[None]:
    """Make these signals raise KeyboardInterrupt inside the context, as Ctrl-C does."""
    before = {number: signal.signal(number, _interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def exit_of(submission: Submission) -> dict[str, Any] | None:
    """Return why the newest attempt of the submission's job ended (a requeue is a new attempt)."""
    attempt = submission.request.run.latest_attempt()
    return read_exit(attempt) if attempt else None


def exit_code_of(submission: Submission, job: JobInfo) -> int:
    """Return the exit code of the training; 1 if the job failed without one, 4 if its state is unknown."""
    code = (exit_of(submission) or {}).get("exit_code")
    if job.state is JobState.UNKNOWN and code is None:
        return 4
    is_good = job.state is JobState.COMPLETED
    return 0 if is_good else int(code or 1)


def wait_for_end(run: RunDir, tell: Callable[[JobInfo], None]) -> JobInfo:
    """Wait until the job of the run's newest attempt ends. Query it after 2, 4, 8 and 16 s, then every 30 s.

    `tell` is called with each new state. The state UNKNOWN (slurmctld is being restarted) is tolerated for minutes.
    """
    pause_s, last, num_unknown = 1.0, None, 0
    while True:
        attempt = run.latest_attempt()
        assert attempt is not None, "the attempt has just been made"
        job = query_attempt(attempt)
        if job.state is not last:
            tell(job)
            last = job.state
        num_unknown = num_unknown + 1 if job.state is JobState.UNKNOWN else 0
        if job.state.is_over or num_unknown >= MAX_UNKNOWN:
            return job
        pause_s = min(pause_s * 2, 30.0)
        time.sleep(pause_s)

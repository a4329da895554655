"""The steps that jobs of other launchers print: `bsl top` reads the output of those on the screen."""

from __future__ import annotations

from bigsci_launch.errors import SlurmError
from bigsci_launch.scheduler.job import JobInfo
from bigsci_launch.scheduler.slurm import query_output
from bigsci_launch.step_lines import StepLine
from bigsci_launch.watch.read.sources import PEEK_BYTES, LogTail

RATE_S = 10.0
"""A rate is known once two steps were seen so many seconds apart."""


class JobLogs:
    """Reads what is new in the outputs of jobs. Slurm is asked once for each job where its output goes."""

    def __init__(self) -> None:
        self._logs: dict[str, _JobLog | None] = {}
        self._left = 0

    def begin_look(self, most_asked: int) -> None:
        """Allow so many questions to Slurm from now on."""
        self._left = most_asked

    def read(self, job: JobInfo, now: float) -> StepLine | None:
        """Return the newest step of a job; None if it has none that can be read, or its file is asked for later."""
        if job.number not in self._logs:
            if not self._left or job.state.is_queued or not job.state.is_active:
                return None
            self._left -= 1
            self._logs[job.number] = _find_log(job.number)
        log = self._logs[job.number]
        return log.read(now) if log is not None else None


class _JobLog:
    """One output. Of a long one, the end is read."""

    def __init__(self, tail: LogTail) -> None:
        self._tail = tail
        self._newest: StepLine | None = None
        self._first: tuple[float, int] | None = None
        """When a step was seen first, and which it was: rates are measured from there."""

    def read(self, now: float) -> StepLine | None:
        """Return the newest step. Its seconds are as printed, else by when steps were seen here."""
        for event in self._tail.read():
            if event.kind == "step" and event.step is not None:
                self._newest = StepLine(event.step, event.loss, event.seconds, total_steps=event.total_steps)
        newest = self._newest
        if newest is None or newest.step is None or newest.seconds is not None:
            return newest
        if self._first is None or newest.step < self._first[1]:
            self._first = (now, newest.step)
        began, first = self._first
        if newest.step == first or now - began < RATE_S:
            return newest
        return newest._replace(seconds=(now - began) / (newest.step - first))


def _find_log(number: str) -> _JobLog | None:
    try:
        path = query_output(number)
    except SlurmError:
        return None
    return _JobLog(LogTail(path, history=PEEK_BYTES)) if path is not None else None

"""What `bsl top` shows of a run, from its records, or of another job, from its output."""

from __future__ import annotations

from collections import Counter

from bigsci_launch.errors import RunDirError
from bigsci_launch.runs.attempts import read_exit, unknown
from bigsci_launch.runs.chain.records import read_chain
from bigsci_launch.runs.layout import AttemptDir
from bigsci_launch.scheduler.job import JobInfo
from bigsci_launch.scheduler.waiting import meaning_of
from bigsci_launch.step_lines import StepLine
from bigsci_launch.top.job_logs import JobLogs
from bigsci_launch.top.rows import TopDetails, TopRow
from bigsci_launch.units import format_age
from bigsci_launch.watch.show.live import LiveView, read_live_view


def read_details(row: TopRow, now: float, logs: JobLogs) -> TopDetails:
    """Return what is known of a row. Slurm's answer is in the row; `logs` has the steps of jobs that are not runs."""
    if row.run is None:
        return _details_of_job(row, now, logs)
    try:
        view = read_live_view(row.run, row.job)
        attempts = row.run.attempts()
    except RunDirError as error:
        return TopDetails(row.job or unknown("", error.message), problem=error.message, next=error.message)
    step = view.step
    return TopDetails(
        job=view.job,
        label=view.label,
        step=step.step if step else None,
        total_steps=view.total_steps,
        seconds=step.seconds if step else None,
        loss=step.loss if step else None,
        phase="" if view.job.state.is_over else _phase(view),
        findings=tuple(each.sentence for each in view.findings if each.attempt in (view.attempt, None)),
        gpu_hours=_gpu_hours(row, sum(_seconds(each) for each in attempts[:-1])),
        next=_next(view.job, attempts[-1], now),
        last_sign=max([sign.newest for sign in view.signs] + ([step.time] if step else []), default=None),
    )


def _details_of_job(row: TopRow, now: float, logs: JobLogs) -> TopDetails:
    job = row.job
    assert job is not None
    printed = logs.read(job, now) or StepLine(None)
    return TopDetails(
        job,
        f"job {job.job_id}",
        step=printed.step,
        total_steps=printed.total_steps,
        seconds=printed.seconds,
        loss=printed.loss,
        gpu_hours=_gpu_hours(row, 0.0),
        next=_next(job, None, now),
    )


def _phase(view: LiveView) -> str:
    """Return the phase in which most ranks are."""
    phases = Counter(sign.phase for sign in view.signs if not sign.has_ended and sign.phase is not None)
    return phases.most_common(1)[0][0] if phases else ""


def _seconds(attempt: AttemptDir) -> float:
    """Return how long an attempt ran, as its exit record says; 0 if it left none."""
    ended = read_exit(attempt) or {}
    first, last = ended.get("started"), ended.get("ended")
    return max(0.0, float(last) - float(first)) if first is not None and last is not None else 0.0


def _gpu_hours(row: TopRow, before_s: float) -> float | None:
    """Return the GPU-hours of all attempts; None if Slurm does not say how many GPUs the job has."""
    job = row.job
    if row.gpus is None or job is None:
        return None
    now_s = 0 if job.state.is_queued else job.elapsed_s or 0
    return row.gpus * (before_s + now_s) / 3600


def _next(job: JobInfo, attempt: AttemptDir | None, now: float) -> str:
    """Return what happens next: when it starts and why it waits, when it ends, whether it starts again, or how it
    ended."""
    if job.state.is_queued:
        expected = job.expected_start
        start = f"starts in about {format_age(expected - now)}" if expected is not None and expected > now else "waits"
        why = meaning_of(job) or job.reason
        return f"{start}: {why}" if why else start
    if job.state.is_active:
        left = f"limit in {format_age(job.ends - now)}" if job.ends is not None and job.ends > now else ""
        return "; ".join(filter(None, [left, _again(attempt)]))
    ended = read_exit(attempt) if attempt is not None else None
    reason = str((ended or {}).get("reason") or job.reason)
    return f"ended: {reason}" if job.state.is_over and reason else reason


def _again(attempt: AttemptDir | None) -> str:
    chain = read_chain(attempt) if attempt is not None else None
    if chain is None:
        return ""
    return (
        "restarts after a preemption" if chain.only_preempted else f"restarts itself, up to {chain.max_starts} starts"
    )

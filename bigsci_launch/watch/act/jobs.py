"""What can be done from outside to the ranks of an attempt: ask them to stop, end them, kill them.

On Slurm only the step of the ranks is touched, so that the job script writes exit.json and the chain continues. Before
ranks are ended, ended.json names who does it and why (`runs/watching/ended.py`).
"""

from __future__ import annotations

import os
import re
from contextlib import suppress

from bigsci_launch.errors import JobNotFound, RunDirError, SlurmUnavailable
from bigsci_launch.procfs import user_name
from bigsci_launch.runs.attempts import JobRecord, ask_about, identify, read_exit, read_job
from bigsci_launch.runs.layout import AttemptDir, rank_files, read_json
from bigsci_launch.scheduler.slurm import cancel_job, kill_step, signal_step

_STEP = re.compile(r"[0-9]+\.[0-9]+")
END_GRACE_S = 15.0
"""Time between `end_ranks` and `kill_ranks`: the runners need some of it to keep the last calls of their ranks."""


def ask_to_stop(attempt: AttemptDir) -> str:
    """Ask the ranks to save and stop, as before the time limit. Return what was done.

    Raises:
        RunDirError: no rank has started, or the job may not be the attempt's.
        SlurmUnavailable, SlurmRefused: scancel failed.
        JobNotFound: the ranks are gone.
    """
    record = _record(attempt)
    if record.launcher is not None:
        record.launcher.ask_to_stop(attempt.path)
        return "the launcher was asked to have the ranks save and stop"
    step = rank_step(attempt)
    if step is None:
        raise RunDirError(f"attempt {attempt.name}: no rank has started")
    _require_own_job(attempt, record)
    # The runner of each rank turns URG into the stop signal, for its own program only.
    signal_step(step, "URG")
    return f"the ranks were asked to save and stop (URG to step {step})"


def end_ranks(attempt: AttemptDir) -> str:
    """Send TERM to the ranks. Their runners keep the last calls and write how they end. Return what was done.

    Ranks that hang may stay: `kill_ranks` after `END_GRACE_S`. If no rank has started, the job itself is ended.

    Raises:
        RunDirError: the job may not be the attempt's.
        SlurmUnavailable, SlurmRefused: scancel failed.
        JobNotFound: the ranks are gone.
    """
    record = _record(attempt)
    if record.launcher is not None:
        record.launcher.terminate(attempt.path)
        return "the launcher was asked to end the ranks"
    _require_own_job(attempt, record)
    step = rank_step(attempt)
    if step is None:
        cancel_job(record.job_id or "")
        return f"no rank had started: job {record.job_id} was cancelled"
    signal_step(step, "TERM")
    return f"the ranks were asked to end (TERM to step {step})"


def kill_ranks(attempt: AttemptDir) -> str:
    """Send KILL to the ranks and all that they have started. Return what was done.

    Raises:
        As `end_ranks`.
    """
    record = _record(attempt)
    if record.launcher is not None:
        record.launcher.terminate(attempt.path)
        return "the launcher was asked to kill the ranks"
    _require_own_job(attempt, record)
    step = rank_step(attempt)
    if step is None:
        cancel_job(record.job_id or "")
        return f"job {record.job_id} was cancelled again"
    kill_step(step)
    return f"the ranks were killed (KILL to step {step})"


def rank_step(attempt: AttemptDir) -> str | None:
    """Return the Slurm step that runs the ranks, such as `1234.0`; None if no rank has recorded where it runs."""
    for file in rank_files(attempt.pids, ".json").values():
        with suppress(RunDirError, AttributeError):
            document = read_json(file)
            step = f"{document.get('job_id')}.{document.get('step_id')}"
            if _STEP.fullmatch(step):
                return step
    return None


def how_ended(attempt: AttemptDir) -> str | None:
    """Return how the attempt has ended, as its own records say; None if they do not say that it has."""
    ended, record = read_exit(attempt), read_job(attempt)
    if ended is not None and ended.get("exit_code") is not None:
        return str(ended["reason"])
    launcher = record.launcher if record else None
    if launcher is not None and launcher.is_here and not launcher.is_alive:
        return "its launcher is gone, and left no exit.json"
    return None


def why_out_of_reach(attempt: AttemptDir) -> str | None:
    """Return why this process can do nothing to the ranks; None if it can. Root may not: others wrote what it reads."""
    owner = attempt.path.stat().st_uid
    if os.geteuid() != owner:
        return f"only {user_name(owner)} may signal the ranks"
    record = read_job(attempt)
    if record is None:
        return "nothing has been submitted yet"
    if record.launcher is not None and not record.launcher.is_here:
        return f"the ranks run on {record.launcher.host}, and can only be reached there"
    return None


def _record(attempt: AttemptDir) -> JobRecord:
    record = read_job(attempt)
    if record is None:
        raise RunDirError(f"attempt {attempt.name}: nothing has been submitted yet")
    return record


def _require_own_job(attempt: AttemptDir, record: JobRecord) -> None:
    """Raise RunDirError unless the job is known to be the attempt's: a cluster that counts again gives old numbers."""
    step = rank_step(attempt) or f"{record.job_id}."
    if os.environ.get("SLURM_JOB_ID") == step.partition(".")[0]:
        return
    answer = ask_about([record], needs_cluster=record.cluster is not None)
    if not answer.has_answered:
        raise SlurmUnavailable(f"attempt {attempt.name}: {answer.why_unknown}")
    job = answer.about(record.job_id)
    if job is None:
        raise JobNotFound(f"attempt {attempt.name}: Slurm does not know job {record.job_id}")
    who = identify(attempt, record, job)
    if who.is_ours is not True:
        raise RunDirError(f"attempt {attempt.name}: cannot determine who owns job {record.job_id}: {who.why}")

"""Asks Slurm to start a run again, or not to.

Every request may be refused: sites forbid sbatch or scontrol on compute nodes. Then the words of the refusal are kept.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import time
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from bigsci_launch import safe_files
from bigsci_launch.own_place import why_not_ours
from bigsci_launch.runs.chain.records import read_chain, write_chain
from bigsci_launch.runs.layout import AttemptDir, RunDir, read_record, write_json
from bigsci_launch.scheduler.command import CommandAnswer, ask_slurm

ask = partial(ask_slurm, timeout_s=60.0)
SUBMISSION_GRACE_S = 180.0
"""An attempt that has no job yet and is younger than this may still be in submission: sbatch may take two minutes."""
WAIT_FOR_RECORD_S = 10.0
"""How long `bsl submit` may take to write job.json after the job has started."""
NEVER = "DependencyNeverSatisfied"
HELD = ("JobHeldUser", "JobHeldAdmin")
NOTHING_QUEUED = "no job is queued behind it"


def requeue(job_id: str, restart_count: int, reason: str | None) -> CommandAnswer:
    """Ask Slurm to start the job again, unless it does so by itself, or the job was ended in between."""
    state, restarts = state_of(job_id)
    if state == "EXPEDITING" or (restarts.isdigit() and int(restarts) > restart_count):
        return CommandAnswer(True, "Slurm requeues the job by itself")
    if state not in ("RUNNING", "") and reason != "preempted":
        return CommandAnswer(False, f"the job is {state}, so it was not requeued")
    return ask("scontrol", "requeue", job_id)


def let_end(job_id: str) -> CommandAnswer:
    """Ask Slurm not to start the job again. If it fails, one with `--requeue=expedite` would be held in the queue."""
    state, _ = state_of(job_id)
    if state not in ("RUNNING", ""):
        return CommandAnswer(True, f"the job is {state} already")
    return ask("scontrol", "update", f"JobId={job_id}", "Requeue=0")


def state_of(job_id: str) -> tuple[str, str]:
    """Return a job's state and how often it was requeued, in Slurm's words; empty ones if they are not known."""
    known = ask("squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--Format=State,RestartCnt")
    state, restarts, *_ = (*known.words.split(), "", "") if known.is_done else ("", "")
    return state, restarts


class Link(NamedTuple):
    """An attempt that waits behind another one. `job_id` is None while it is being submitted."""

    attempt: str
    job_id: str | None
    reason: str = ""
    """Why it waits, in Slurm's word."""


def live_links(run: RunDir) -> list[Link]:
    """Return the attempts that are queued, oldest first. Removes those that will never start."""
    return [link for attempt in run.queued_attempts() if (link := live_link(attempt)) is not None]


def live_link(attempt: AttemptDir) -> Link | None:
    """Return the job of an attempt that is queued; None if it will never start, and then nothing is left of it."""
    record = read_record(attempt.job)
    if not record:
        return adopt(attempt)
    job_id = str(record.get("job_id"))
    answer = ask("squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%T|%r")
    state, _, reason = answer.words.partition("|")
    if not answer.is_done and "Invalid job id" not in answer.words:
        return Link(attempt.name, job_id)  # unknown, so it may still be there
    if reason == NEVER:
        answer = ask("scancel", job_id)
        if not answer.is_done:
            return Link(attempt.name, job_id, reason)
    elif answer.is_done and state in ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "REQUEUED"):
        return Link(attempt.name, job_id, reason)
    forget(attempt)
    return None


def adopt(attempt: AttemptDir) -> Link | None:
    """Note the job of an attempt whose submission was killed before it did. None if there is no such job."""
    answer = ask("squeue", "--noheader", f"--user={os.getuid()}", "--format=%i|%o")
    jobs = [line.partition("|") for line in answer.words.splitlines()] if answer.is_done else []
    own = [job_id for job_id, _, script in jobs if script.strip() == str(attempt.script)]
    if own:
        note_job(attempt, own[0])
        return Link(attempt.name, own[0])
    if not answer.is_done or time.time() - attempt.path.stat().st_mtime < SUBMISSION_GRACE_S:
        return Link(attempt.name, None)
    forget(attempt)
    return None


def forget(attempt: AttemptDir) -> None:
    """Remove the directory of an attempt that never started."""
    if attempt.queued_mark.exists():
        shutil.rmtree(attempt.path, ignore_errors=True)


def cancel_links(run: RunDir) -> CommandAnswer | None:
    """End the attempts that wait behind this one, the last one first; None if there is none."""
    links = live_links(run)
    refused = [f"attempt {link.attempt} is being submitted right now" for link in links if link.job_id is None]
    for link in reversed(links):
        done = ask("scancel", link.job_id) if link.job_id is not None else None
        if done is not None and done.is_done:
            forget(run.attempt(link.attempt))
        elif done is not None:
            refused.append(done.words)
    return CommandAnswer(not refused, "; ".join(refused)) if links else None


def queue_next(attempt: AttemptDir, behind: list[str]) -> tuple[Link, CommandAnswer]:
    """Submit another attempt behind all jobs of the run that run or wait, from the frozen files of this one.

    All of them: if one in the middle is cancelled, those after it still wait for the rest.
    """
    run, frozen = attempt.run, attempt.base
    following = run.attempt(run.next_attempt_name())
    try:
        require_ours(frozen)
        following.path.mkdir(mode=0o755)  # frozen: a umask that lets the group write is for data
        safe_files.write_file(following.queued_mark, f"behind {attempt.name}, jobs {' '.join(behind)}\n")
        copy_frozen(frozen, attempt, following)
        wait = f"--dependency=afterany:{':'.join(behind)}"
        require_ours(frozen)
        done = ask("sbatch", "--parsable", wait, str(following.script))
        if done.is_done:
            job_id = done.words.splitlines()[-1].partition(";")[0].strip()
            note_job(following, job_id)
            return Link(following.name, job_id), done
        if done.is_lost:
            return Link(following.name, None), done
    except OSError as error:
        done = CommandAnswer(False, f"{error.filename or run.path}: {error.strerror or error}")
    forget(following)
    return Link(following.name, None), done


def require_ours(attempt: AttemptDir) -> None:
    """Require that no other user has written, or could exchange, what an attempt runs; OSError says why not."""
    if (why := why_not_ours(attempt.tools)) is not None:
        raise OSError(0, why)


def copy_frozen(frozen: AttemptDir, attempt: AttemptDir, following: AttemptDir) -> None:
    kept = (frozen.config, frozen.origins, frozen.provenance, frozen.dirty_diff, frozen.accepted)
    for path in kept:
        if path.exists():
            shutil.copy2(path, following.path / path.name)
    shutil.copytree(frozen.tools, following.tools)
    for folder in following.folders:
        folder.mkdir(mode=0o755)
    following.job_output.touch(mode=0o644)  # Slurm appends to it; it would make it as the umask says
    chain = read_chain(attempt)
    if chain is not None:
        write_chain(following, replace(chain, after=attempt.name, num_starts=None))
    script = safe_files.read_file(frozen.script).decode()
    mode = stat.S_IMODE(frozen.script.stat().st_mode)
    safe_files.write_file(following.script, renamed(script, frozen.name, following.name), mode)


def renamed(script: str, old: str, new: str) -> str:
    """Return the script of attempt `old` as that of `new`. Both the header and the first lines name it."""
    changes = (
        (r"^(# Run .*, attempt )" + old + r"\b", r"\g<1>" + new),
        (r"^(#SBATCH --output=.*/attempts/)" + old + r"(/job\.out)", r"\g<1>" + new + r"\g<2>"),
        (r"^(first_attempt=)'?" + old + r"'?$", r"\g<1>" + new),
    )
    for pattern, replacement in changes:
        script, number = re.subn(pattern, replacement, script, flags=re.MULTILINE)
        if number != 1:
            raise OSError(0, f"the script of attempt {old} does not name itself where it should ({pattern})")
    return script


def note_job(attempt: AttemptDir, job_id: str) -> None:
    """Write the job.json of an attempt, if it has none. A job that could not be found again is ended.

    The rest of it is as for the first start of the chain, for which `bsl submit` writes it.
    """
    chain = read_record(attempt.chain)
    first = attempt.run.attempt(str(chain.get("first") or attempt.name)).job
    deadline = time.monotonic() + WAIT_FOR_RECORD_S
    while not first.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    if attempt.job.exists():
        return
    known = {"schema_version": 1, "scheduler": "slurm", "launcher": None, "total_steps": chain.get("total_steps")}
    try:
        write_json(attempt.job, {**known, **read_record(first), "job_id": job_id, "submitted": time.time()})
    except OSError:
        ask("scancel", job_id)
        raise

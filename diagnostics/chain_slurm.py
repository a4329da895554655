"""Asks Slurm to start a run again, or not to. Part of chain.py: standard library only, Python 3.8 or newer.

Every request may be refused: sites forbid sbatch or scontrol on compute nodes. Then the words of the refusal are kept.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import safe_files
from chain_records import base_of, queued_attempts, read_json, write_record
from own_place import why_not_ours

TIMEOUT_S = 60
SUBMISSION_GRACE_S = 180.0
"""An attempt that has no job yet and is younger than this may still be in submission."""
UNANSWERED = re.compile(r"timed out|Zero Bytes were transmitted|missing socket|Connection reset|Broken pipe", re.I)
"""How a lost answer reads: Slurm may have accepted the job, which `adopt` then finds."""
WAIT_FOR_RECORD_S = 10.0
"""How long `bsl submit` may take to write job.json after the job has started."""
NEVER = "DependencyNeverSatisfied"
HELD = ("JobHeldUser", "JobHeldAdmin")
SCRUBBED = re.compile(r"(SLURM|SLURMD|SBATCH|SRUN|SQUEUE|SACCT|SCANCEL|SINFO|SALLOC|SCONTROL|PMI|PMIX)_.*")
KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT"})
FOLDERS = ("pids", "logs", "events", "errors", "exits")
FROZEN = ("config.yaml", "origins.json", "provenance.json", "dirty.diff", "chain.json", "accepted.json")


class Answer(NamedTuple):
    """Whether Slurm did what it was asked for; `words` are its output, or why not."""

    is_done: bool
    words: str


def ask(*argv: str) -> Answer:
    """Run one of Slurm's commands without the options that the job's own environment would add."""
    environment = {name: value for name, value in os.environ.items() if name in KEPT or not SCRUBBED.fullmatch(name)}
    try:
        done = subprocess.run(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        return Answer(False, f"{argv[0]}: command not found on {os.uname().nodename}")
    except (OSError, subprocess.SubprocessError) as error:
        return Answer(False, f"{argv[0]}: {error}")
    if done.returncode == 0:
        return Answer(True, done.stdout.decode(errors="replace").strip())
    words = (done.stderr or done.stdout).decode(errors="replace").strip()
    return Answer(False, words or f"{argv[0]} left with {done.returncode}")


def requeue(job_id: str, restart_count: int, reason: str | None) -> Answer:
    """Ask Slurm to start the job again, unless it does so by itself, or somebody has ended the job in between."""
    known = ask("squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--Format=State,RestartCnt")
    state, restarts = (*known.words.split(), "", "")[:2] if known.is_done else ("", "")
    if restarts.isdigit() and int(restarts) > restart_count:
        return Answer(True, "Slurm requeues the job by itself")
    if state not in ("RUNNING", "") and reason != "preempted":
        return Answer(False, f"the job is {state}, so it was not requeued")
    return ask("scontrol", "requeue", job_id)


class Link(NamedTuple):
    """An attempt that waits behind another one. `job_id` is None while it is being submitted."""

    attempt: str
    job_id: str | None
    reason: str = ""
    """Why it waits, in Slurm's word."""


def live_links(run: Path) -> list[Link]:
    """Return the attempts that are queued, oldest first. Removes those that will never start."""
    return [link for attempt in queued_attempts(run) if (link := live_link(attempt)) is not None]


def live_link(attempt: Path) -> Link | None:
    """Return the job of an attempt that is queued; None if it will never start, and then nothing is left of it."""
    record = read_json(attempt / "job.json")
    if not record:
        return adopt(attempt)
    job_id = str(record.get("job_id"))
    answer = ask("squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%T|%r")
    state, _, reason = answer.words.partition("|")
    if not answer.is_done and "Invalid job id" not in answer.words:
        return Link(attempt.name, job_id)  # nobody knows, so it may still be there
    if reason == NEVER:
        answer = ask("scancel", job_id)
        if not answer.is_done:
            return Link(attempt.name, job_id, reason)
    elif answer.is_done and state in ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "REQUEUED"):
        return Link(attempt.name, job_id, reason)
    forget(attempt)
    return None


def adopt(attempt: Path) -> Link | None:
    """Note the job of an attempt whose submission was killed before it did. None if there is no such job."""
    answer = ask("squeue", "--noheader", f"--user={os.getuid()}", "--format=%i|%o")
    jobs = [line.partition("|") for line in answer.words.splitlines()] if answer.is_done else []
    own = [job_id for job_id, _, script in jobs if script.strip() == str(attempt / "script.sh")]
    if own:
        note_job(attempt, own[0])
        return Link(attempt.name, own[0])
    if not answer.is_done or time.time() - attempt.stat().st_mtime < SUBMISSION_GRACE_S:
        return Link(attempt.name, None)
    forget(attempt)
    return None


def forget(attempt: Path) -> None:
    """Remove the directory of an attempt that never started."""
    if (attempt / "queued").exists():
        shutil.rmtree(attempt, ignore_errors=True)


def cancel_links(run: Path) -> Answer | None:
    """End the attempts that wait behind this one, the last one first; None if there is none."""
    links = live_links(run)
    refused = [f"attempt {link.attempt} is being submitted right now" for link in links if link.job_id is None]
    for link in reversed(links):
        done = ask("scancel", link.job_id) if link.job_id is not None else None
        if done is not None and done.is_done:
            forget(run / "attempts" / link.attempt)
        elif done is not None:
            refused.append(done.words)
    return Answer(not refused, "; ".join(refused)) if links else None


def queue_next(attempt: Path, behind: list[str]) -> tuple[Link, Answer]:
    """Submit another attempt behind all jobs of the run that run or wait, from the frozen files of this one.

    All of them: if somebody cancels one in the middle, those after it still wait for the rest.
    """
    run, frozen = attempt.parent.parent, base_of(attempt)
    numbers = [int(path.name.partition(".")[0]) for path in attempt.parent.iterdir() if path.name[:1].isdigit()]
    following = attempt.parent / f"{max(numbers) + 1:04d}"
    try:
        require_ours(frozen)
        following.mkdir(mode=0o755)  # frozen: a umask that lets the group write is for data
        safe_files.write_file(following / "queued", f"behind {attempt.name}, jobs {' '.join(behind)}\n")
        copy_frozen(frozen, attempt, following)
        wait = f"--dependency=afterany:{':'.join(behind)}"
        require_ours(frozen)
        done = ask("sbatch", "--parsable", wait, str(following / "script.sh"))
        if done.is_done:
            job_id = done.words.splitlines()[-1].partition(";")[0].strip()
            note_job(following, job_id)
            return Link(following.name, job_id), done
        if UNANSWERED.search(done.words):
            return Link(following.name, None), done
    except OSError as error:
        done = Answer(False, f"{error.filename or run}: {error.strerror or error}")
    forget(following)
    return Link(following.name, None), done


def require_ours(attempt: Path) -> None:
    """Require that nobody else has written what an attempt runs, or could exchange it; OSError says why not."""
    if (why := why_not_ours(attempt / "tools")) is not None:
        raise OSError(0, why)


def copy_frozen(frozen: Path, attempt: Path, following: Path) -> None:
    for name in FROZEN:
        if (frozen / name).exists():
            shutil.copy2(str(frozen / name), str(following / name))
    shutil.copytree(str(frozen / "tools"), str(following / "tools"))
    for name in FOLDERS:
        (following / name).mkdir(mode=0o755)
    (following / "job.out").touch(mode=0o644)  # Slurm appends to it; it would make it as the umask says
    chain = read_json(attempt / "chain.json")
    fresh = {**chain, "after": attempt.name, "num_starts": None, "started": None, "checkpoint": None}
    write_record(following / "chain.json", {**fresh, "first": chain.get("first") or frozen.name})
    script = safe_files.read_file(frozen / "script.sh").decode()
    mode = stat.S_IMODE((frozen / "script.sh").stat().st_mode)
    safe_files.write_file(following / "script.sh", renamed(script, frozen.name, following.name), mode)


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


def note_job(attempt: Path, job_id: str) -> None:
    """Write the job.json of an attempt, if it has none. A job that nobody could find again is ended.

    The rest of it is as for the first start of the chain, for which `bsl submit` writes it.
    """
    chain = read_json(attempt / "chain.json")
    first = attempt.parent / str(chain.get("first") or attempt.name) / "job.json"
    deadline = time.monotonic() + WAIT_FOR_RECORD_S
    while not first.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    if (attempt / "job.json").exists():
        return
    known = {"schema_version": 1, "scheduler": "slurm", "launcher": None, "total_steps": chain.get("total_steps")}
    try:
        record = {**known, **read_json(first), "job_id": job_id, "submitted": time.time()}
        write_record(attempt / "job.json", record)
    except OSError:
        ask("scancel", job_id)
        raise

"""Asks Slurm to start a run again, or not to. Part of chain.py: standard library only, Python 3.8 or newer.

Every request may be refused: sites forbid sbatch or scontrol on compute nodes. Then the words of the refusal are kept.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from chain_records import base_of, queued_attempts, read_json, write_record

if TYPE_CHECKING:
    from typing import Any

TIMEOUT_S = 60
SUBMISSION_GRACE_S = 120.0
"""An attempt that has no job yet and is younger than this may still be in submission."""
WAIT_FOR_RECORD_S = 10.0
"""How long `bsl submit` may take to write job.json after the job has started."""
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


def live_successor(run: Path) -> dict[str, Any] | None:
    """Return the job of the attempt that is queued; None if there is none. Removes attempts whose job is gone."""
    for attempt in queued_attempts(run):
        record = read_json(attempt / "job.json")
        if not record and time.time() - attempt.stat().st_mtime < SUBMISSION_GRACE_S:
            return {"job_id": None, "attempt": attempt.name}  # `bsl submit` is at it
        state = ask("squeue", "--noheader", "--states=all", f"--jobs={record.get('job_id')}", "--format=%T")
        if not state.is_done and "Invalid job id" not in state.words:
            return {**record, "attempt": attempt.name}  # nobody knows, so it may still be there
        if state.is_done and state.words in ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "REQUEUED"):
            return {**record, "attempt": attempt.name}
        forget(attempt)
    return None


def forget(attempt: Path) -> None:
    """Remove the directory of an attempt that never started."""
    if (attempt / "queued").exists():
        shutil.rmtree(attempt, ignore_errors=True)


def cancel_successor(run: Path) -> Answer | None:
    """End the attempt that waits behind this one; None if there is none."""
    successor = live_successor(run)
    if successor is None:
        return None
    if successor["job_id"] is None:
        return Answer(False, f"attempt {successor['attempt']} is being submitted right now")
    done = ask("scancel", str(successor["job_id"]))
    if done.is_done:
        forget(run / "attempts" / successor["attempt"])
    return done


def queue_next(attempt: Path, job_id: str) -> tuple[str, Answer]:
    """Submit the next attempt behind this one, from this one's frozen files; return its name and the answer."""
    run, frozen = attempt.parent.parent, base_of(attempt)
    numbers = [int(path.name.partition(".")[0]) for path in attempt.parent.iterdir() if path.name[:1].isdigit()]
    following = attempt.parent / f"{max(numbers) + 1:04d}"
    try:
        following.mkdir()
        (following / "queued").write_text(f"behind {attempt.name}, job {job_id}\n", encoding="utf-8")
        copy_frozen(frozen, attempt, following)
        done = ask("sbatch", "--parsable", f"--dependency=afterany:{job_id}", str(following / "script.sh"))
        if done.is_done:
            note_job(frozen, following, done.words.splitlines()[-1].partition(";")[0].strip())
    except OSError as error:
        done = Answer(False, f"{error.filename or run}: {error.strerror or error}")
    if not done.is_done:
        forget(following)
    return following.name, done


def copy_frozen(frozen: Path, attempt: Path, following: Path) -> None:
    for name in FROZEN:
        if (frozen / name).exists():
            shutil.copy2(str(frozen / name), str(following / name))
    shutil.copytree(str(frozen / "tools"), str(following / "tools"))
    for name in FOLDERS:
        (following / name).mkdir()
    chain = read_json(attempt / "chain.json")
    fresh = {**chain, "after": attempt.name, "num_starts": None, "started": None, "checkpoint": None}
    write_record(following / "chain.json", {**fresh, "first": chain.get("first") or frozen.name})
    script = (frozen / "script.sh").read_text(encoding="utf-8")
    (following / "script.sh").write_text(renamed(script, frozen.name, following.name), encoding="utf-8")
    (following / "script.sh").chmod(0o755)


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


def note_job(frozen: Path, following: Path, job_id: str) -> None:
    """Write the new attempt's job.json. A job that nobody could find again is ended."""
    deadline = time.monotonic() + WAIT_FOR_RECORD_S
    while not (frozen / "job.json").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    try:
        record = {**read_json(frozen / "job.json"), "job_id": job_id, "submitted": time.time()}
        write_record(following / "job.json", record)
    except OSError:
        ask("scancel", job_id)
        raise

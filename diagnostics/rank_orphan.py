"""Ends a Slurm job that has lost the node of its script, for rank_slot.py. Standard library, Python 3.8 or newer.

With `--no-kill`, which `survive` needs, Slurm lets such a job run on until its time limit, with no script to end it:
not as NODE_FAIL, and without a requeue. So one of the runners ends it, or has it start again where Slurm would have.
"""

from __future__ import annotations

import os
import re
import subprocess
import time

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from collections.abc import Callable

POLL_S = 5.0
GRACE_S = 900.0
"""For how long Slurm may take to find that the node is down: SlurmdTimeout is 300 s by default."""
TURN_S = 10.0
"""How much later each further node of the job acts, in case the first one cannot."""
FIELD = re.compile(r"(\S+?)=(\S*)")
TIMEOUT_S = 60
SCRUBBED = re.compile(r"(SLURM|SLURMD|SBATCH|SRUN|SQUEUE|SACCT|SCANCEL|SINFO|SALLOC|SCONTROL|PMI|PMIX)_.*")
KEPT = frozenset({
    "SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT",
    "SLURM_SACK_SOCKET", "SLURM_SACK_KEY", "SLURM_SACK_JWKS",
})  # fmt: skip


def end_orphaned_job(say: Callable[[str], None], has_to_leave: Callable[[], bool]) -> None:
    """Wait until Slurm has found that the node of the job script is down, and end the job.

    If only the controller has ended, the script ends the job; then this process is ended with it.
    """
    job_id, node = os.environ["SLURM_JOB_ID"], os.environ.get("SLURMD_NODENAME", "")
    deadline = time.monotonic() + GRACE_S
    turn: float | None = None
    while time.monotonic() < deadline and not has_to_leave():
        job = facts_of(job_id)
        if job and (job["JobState"] != "RUNNING" or job["Restarts"] != os.environ.get("SLURM_RESTART_COUNT", "0")):
            return
        nodes = nodes_of(job.get("NodeList", ""))
        if nodes and job["BatchHost"] not in nodes:
            place = nodes.index(node) if node in nodes else len(nodes)
            turn = time.monotonic() + place * TURN_S if turn is None else turn
            if time.monotonic() >= turn:
                say(f"{job['BatchHost']}, which ran the script of job {job_id}, is lost: ending the job")
                is_done, words = ask(*(("scontrol", "requeue") if job["Requeue"] == "1" else ("scancel",)), job_id)
                if is_done:
                    return
                say(words)
        time.sleep(POLL_S)


def facts_of(job_id: str) -> dict[str, str]:
    """Return what Slurm knows of a job; nothing if it does not answer."""
    is_done, words = ask("scontrol", "show", "job", "--oneliner", job_id)
    found = dict(FIELD.findall(words)) if is_done else {}
    return found if {"JobState", "Restarts", "BatchHost", "NodeList", "Requeue"} <= set(found) else {}


def nodes_of(node_list: str) -> list[str]:
    is_done, words = ask("scontrol", "show", "hostnames", node_list) if node_list not in ("", "(null)") else (False, "")
    return words.split() if is_done else []


def ask(*argv: str) -> tuple[bool, str]:
    """Run one of Slurm's commands without the options that the job's own environment would add. Return whether it did
    what it was asked for, and what it says."""
    environment = {name: value for name, value in os.environ.items() if name in KEPT or not SCRUBBED.fullmatch(name)}
    try:
        done = subprocess.run(
            argv, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        return False, f"{argv[0]}: {error}"
    is_done = done.returncode == 0
    words = (done.stdout if is_done else done.stderr or done.stdout).decode(errors="replace").strip()
    return is_done, words or f"{argv[0]} left with {done.returncode}"

"""What a scheduler passes to the processes of a job, and knows of them, for node_agent.py. Standard library only."""

from __future__ import annotations

import os

from node_processes import read_text, run_program

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    # A process, its step, and its number in that step.
    Row = tuple[int, str, "int | None"]
    Lister = Callable[[list[str], str, list[str]], tuple[list[Row], str]]

LISTPIDS_TIMEOUT_S = 5.0
# Of a process: its job, step, number in the step and node; how many processes and nodes the step has.
VARIABLES = {
    "Slurm": {
        "job": "SLURM_JOB_ID", "step": "SLURM_STEP_ID", "task": "SLURM_PROCID", "node": "SLURMD_NODENAME",
        "num_tasks": "SLURM_STEP_NUM_TASKS", "num_nodes": "SLURM_STEP_NUM_NODES",
    },
}  # fmt: skip
# What starts ranks, by the beginning of the kernel's name for the process.
PROGRAMS = {"Slurm": ("srun", "slurmstepd")}


def variables(kind: str) -> tuple[str, ...]:
    """Return the variables of one kind, of all schedulers."""
    return tuple(names[kind] for names in VARIABLES.values() if kind in names)


def own_node() -> str:
    """Return the name of this node: that of its scheduler, else the host name."""
    named = (os.environ.get(name) for name in variables("node"))
    return next(filter(None, named), os.uname().nodename)


def list_slurm(job_ids: list[str], node: str, problems: list[str]) -> tuple[list[Row], str]:
    """Return the processes of a job, or of those components of a heterogeneous job that are on this node, and how they
    were found."""
    said: list[str] = []
    rows = [row for job_id in job_ids for row in list_tasks(job_id, node, said)]
    if rows:
        return rows, "scontrol listpids"
    problems += said[:1]
    return [row for job_id in job_ids for row in list_cgroup(job_id)], "cgroup.procs"


def list_tasks(job_id: str, node: str, problems: list[str]) -> list[Row]:
    """Return the processes of a Slurm job on this node as slurmd knows them: [(pid, step, global task ID or None)]."""
    argv = ["scontrol", "listpids", str(job_id), node]
    status, output, errors = run_program(argv, LISTPIDS_TIMEOUT_S, dict(os.environ))
    rows = parse_listpids(output)
    if not rows:
        why = errors.strip()[-200:] or ("no answer" if status is None else output.strip() or "no process")
        problems.append(f"scontrol listpids: {why}")
    return rows


def parse_listpids(text: str) -> list[Row]:
    """Parse the rows of `scontrol listpids` (PID JOBID STEPID LOCALID GLOBALID; `-` for an unknown number)."""
    rows = [line.split() for line in text.splitlines()[1:]]
    return [
        (int(row[0]), row[2], int(row[4]) if row[4].isdigit() else None)
        for row in rows
        if len(row) == 5 and row[0].isdigit() and int(row[0]) > 0
    ]


def list_cgroup(job_id: str) -> list[Row]:
    """Return the processes of a Slurm job on this node from cgroup.procs, v1 or v2, found through our own cgroup."""
    own = read_text("/proc/self/cgroup") or ""
    folders = job_folders(own, job_id, is_own=os.environ.get("SLURM_JOB_ID") == job_id)
    return sorted({row for folder in folders for row in walk_cgroup(folder)})


def job_folders(own: str, job_id: str, *, is_own: bool) -> list[str]:
    """Return the cgroup folders of a job. `own`: /proc/self/cgroup of this process, which `is_own` says is in the job.

    The folder of a job is the one that holds its steps: `job_ID`, and since Slurm 26.05 a name made of its SLUID.
    """
    folders = []
    for line in own.splitlines():
        controllers, path = line.split(":", 2)[1:]
        above, found, _ = (path + "/").partition("/step_")
        if found and (is_own or above.endswith(f"/job_{job_id}")):
            folders.append("/".join(filter(None, ("/sys/fs/cgroup", controllers.replace("name=", "")))) + above)
    return folders


def walk_cgroup(top: str) -> Iterator[Row]:
    """Yield (pid, step, None) of every process in the steps below `top`."""
    for folder, _, files in os.walk(top):
        steps = [part[5:] for part in folder.split("/") if part.startswith("step_")]
        if steps and "cgroup.procs" in files:
            for pid in (read_text(folder + "/cgroup.procs") or "").split():
                yield int(pid), steps[0], None


LISTERS: dict[str, Lister] = {"Slurm": list_slurm}

"""Finds the processes of a node that are ranks, for node_agent.py. Standard library only, Python 3.8 or newer.

The sources, in this order: PID files of the launcher; `scontrol listpids`; cgroup.procs; the environment of all
processes; the descendants of a launcher. Never ps, pgrep or /proc/PID/cmdline: they block on a process whose memory map
is locked. A rank is a record {rank, pid, source, step, world_size, ...}.
"""

from __future__ import annotations

import os
import time

from node_processes import ask_children, ask_one, descendants, parents, parse_stat, read_text, run_program

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    Facts = dict[str, Any]
    Known = dict[int, Facts]
    Row = tuple[int, str, "int | None"]
    Tasks = dict[int, tuple[str, "int | None"]]
    Found = tuple[list[Facts], str, list[str]]

RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
SIZE_VARIABLES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
LOCAL_SIZE_VARIABLES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
OTHER_VARIABLES = ("SLURM_JOB_ID", "SLURMD_NODENAME", "BSL_RUN_DIR", "BSL_ATTEMPT")
# Where torch writes the dumps of its flight recorder: a prefix, to which it appends the rank.
DUMP_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
PID_FILES_TIMEOUT_S = 5.0
IDENTIFY_TIMEOUT_S = 1.0
LISTPIDS_TIMEOUT_S = 5.0


def find_ranks(request: Facts, node: str) -> Found:
    """Return the ranks of this node, how they were found, and problems on the way."""
    problems: list[str] = []
    job_id, launcher_pid = request.get("job_id"), request.get("launcher_pid")
    if request.get("pid_files"):
        ranks = from_pid_files(request["pid_files"], node, None if job_id else os.uname().nodename, problems)
        if ranks or not job_id:
            return ranks, "pid files", problems
    if job_id:
        return from_job(job_id, node, problems)
    if launcher_pid:
        return from_launcher(launcher_pid, problems)
    return [], "nothing", problems


def from_pid_files(folder: str, node: str, host: str | None, problems: list[str]) -> list[Facts]:
    """Return the ranks of this node from PID files, which may be on a file system that does not answer."""
    facts = ask_one(lambda: read_pid_files(folder, node, host), PID_FILES_TIMEOUT_S)
    error = facts.get("error") or (None if "done" in facts else f"no answer in {PID_FILES_TIMEOUT_S:g} s")
    if error:
        problems.append(f"pid files: {error}")
    return [dict(document, source="pid file", step=document.get("step_id")) for document in facts.get("files", [])]


def read_pid_files(folder: str, node: str, host: str | None) -> Iterator[tuple[str, list[Facts]]]:
    """Yield the documents of all PID files of `node`, or of `host` if given."""
    import json

    names = sorted(name for name in os.listdir(folder) if name.startswith("rank-") and name.endswith(".json"))
    documents = [json.loads(read_text(f"{folder}/{name}") or "null") for name in names]
    yield "files", [each for each in documents if each and (each["node"] == node or (host and each["host"] == host))]


def from_job(job_id: str, node: str, problems: list[str]) -> Found:
    """Return the ranks of a Slurm job on this node, whether `bsl` submitted it or not."""
    rows, how = list_tasks(job_id, node, problems), "scontrol listpids"
    if not rows:
        rows, how = list_cgroup(job_id), "cgroup.procs"
    if not rows:
        rows, how = list_environment(job_id, node), "environment"
    own_step = os.environ.get("SLURM_STEP_ID")
    tasks = {pid: (step, task) for pid, step, task in rows if step not in (own_step, "extern")}
    known = identify(sorted(tasks), problems)
    return assign_ranks(known, spread_tasks(known, tasks)), how, problems


def spread_tasks(known: Known, tasks: Tasks) -> Tasks:
    """Return `tasks`, giving processes without a task ID that of their nearest ancestor: slurmd numbers only its own.

    The batch script is not a rank, unless the job has no other step.
    """
    steps = {step for step, _ in tasks.values()} - {"batch"}
    spread = {}
    for pid, (step, task) in tasks.items():
        above = pid
        while task is None and above in known and known[above]["ppid"] in tasks:
            above = known[above]["ppid"]
            task = tasks[above][1]
        spread[pid] = (step, None if step == "batch" and steps else task)
    return spread


def from_launcher(launcher_pid: int, problems: list[str]) -> Found:
    """Return the ranks among the descendants of a launcher, numbered by it, else in the order of their start.

    The ancestors of this process are not ranks: it may have been started from the same shell.
    """
    above = parents()
    pids = {launcher_pid} | (descendants(launcher_pid, above) - chain_to_root(os.getpid(), above))
    known = identify(sorted(pids), problems)
    return assign_ranks(known, {}) or count_ranks(launcher_pid, known), f"descendants of {launcher_pid}", problems


def chain_to_root(pid: int, above: dict[int, int]) -> set[int]:
    """Return `pid` and all its ancestors; `above` gives the parent of each process."""
    chain: set[int] = set()
    while pid and pid not in chain:
        chain.add(pid)
        pid = above.get(pid, 0)
    return chain


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
    rows: set[Row] = set()
    marker = f"/job_{job_id}"
    for line in (read_text("/proc/self/cgroup") or "").splitlines():
        controllers, path = line.split(":", 2)[1:]
        above, found, _ = (path + "/").partition(marker + "/")
        if found:
            base = "/sys/fs/cgroup" + ("/" + controllers.replace("name=", "") if controllers else "")
            rows.update(walk_cgroup(base + above + marker))
    return sorted(rows)


def walk_cgroup(top: str) -> Iterator[Row]:
    """Yield (pid, step, None) of every process in the steps below `top`."""
    for folder, _, files in os.walk(top):
        steps = [part[5:] for part in folder.split("/") if part.startswith("step_")]
        if steps and "cgroup.procs" in files:
            for pid in (read_text(folder + "/cgroup.procs") or "").split():
                yield int(pid), steps[0], None


def list_environment(job_id: str, node: str) -> list[Row]:
    """Return processes whose environment names the job and this node: the last resort, for sites without tracking."""
    wanted = {"SLURM_JOB_ID": str(job_id), "SLURMD_NODENAME": node}
    known = identify(sorted(set(parents()) - {os.getpid()}), [])
    return [
        (pid, "unknown", None)
        for pid, process in sorted(known.items())
        if all(process["env"].get(name) == value for name, value in wanted.items())
    ]


def identify(pids: list[int], problems: list[str]) -> Known:
    """Return {pid: {comm, ppid, start_ticks, exe, env}}; `env` is empty if the environment cannot be read."""
    found = ask_children(pids, read_identities, IDENTIFY_TIMEOUT_S, 1, time.monotonic() + 5 * IDENTIFY_TIMEOUT_S)
    known: Known = {}
    for pid in pids:
        stat = read_text(f"/proc/{pid}/stat")
        identity = found.get(pid, {}).get("identity")
        if identity is None and stat:
            problems.append(f"pid {pid}: its environment cannot be read")
        if stat:
            known[pid] = dict(parse_stat(stat), **(identity or {"exe": "", "env": {}}))
    return known


def read_identities(pids: list[int]) -> Iterator[tuple[int, str, Any]]:
    """Yield program and environment of each process, for a reader."""
    for pid in pids:
        yield pid, "identity", exe_and_environment(pid)
        yield pid, "done", True


def exe_and_environment(pid: int) -> Facts:
    """Return the program and the few variables that number ranks. May block on a process whose memory map is locked."""
    try:
        exe = os.readlink(f"/proc/{pid}/exe")
    except OSError:
        exe = ""
    wanted = RANK_VARIABLES + SIZE_VARIABLES + LOCAL_SIZE_VARIABLES + OTHER_VARIABLES + DUMP_VARIABLES
    pairs = (entry.partition("=")[::2] for entry in (read_text(f"/proc/{pid}/environ", 1 << 20) or "").split("\0"))
    return {"exe": exe, "env": {name: value for name, value in pairs if name in wanted}}


def is_python(process: Facts) -> bool:
    """Whether the program looks like a Python interpreter (torch renames its main thread)."""
    program = os.path.basename(process["exe"])
    return bool(program.startswith("python") or process["comm"].startswith(("python", "pt_main")))


def leader(group: list[int], known: Known) -> int:
    """Return the process of `group` that is the rank: the topmost Python below any wrappers, else the topmost."""
    pythons = {pid for pid in group if is_python(known[pid])} or set(group)
    return min((known[pid]["start_ticks"], pid) for pid in pythons if not has_ancestor(pid, pythons, known))[1]


def has_ancestor(pid: int, group: set[int], known: Known) -> bool:
    """Whether a process of `group` is an ancestor of `pid`."""
    seen = {pid}
    while pid in known and known[pid]["ppid"] not in seen:
        pid = known[pid]["ppid"]
        seen.add(pid)
        if pid in group:
            return True
    return False


def first_number(env: dict[str, str], names: tuple[str, ...]) -> int | None:
    """Return the first of the variables `names` that is a number, or None."""
    return next((int(env[name]) for name in names if env.get(name, "").isdigit()), None)


def assign_ranks(known: Known, tasks: Tasks) -> list[Facts]:
    """Return which process is which rank. `tasks` gives {pid: (step, global task ID or None)}.

    A rank variable in the environment wins: tasks may then be launchers (one torchrun per node). Without one, each
    task is a rank.
    """
    by_rank: dict[tuple[Any, int], list[int]] = {}
    by_task: dict[tuple[Any, int], list[int]] = {}
    for pid, process in known.items():
        step, task = tasks.get(pid, (None, None))
        rank = first_number(process["env"], RANK_VARIABLES)
        if rank is not None:
            by_rank.setdefault((step, rank), []).append(pid)
        elif task is not None:
            by_task.setdefault((step, task), []).append(pid)
    launchers = {tasks[pid] for group in by_rank.values() for pid in group if pid in tasks}
    groups = [("environment", key, group) for key, group in by_rank.items()]
    groups += [("task id", key, group) for key, group in by_task.items() if key not in launchers]
    return sorted((as_rank(*group, known) for group in groups), key=lambda rank: (str(rank["step"]), rank["rank"]))


def as_rank(source: str, key: tuple[Any, int], group: list[int], known: Known) -> Facts:
    """Return the record of one rank; `key` is (step, rank)."""
    pid = leader(group, known)
    env = known[pid]["env"]
    prefixes = [env[name] for name in DUMP_VARIABLES if env.get(name)]
    dumps = {"recorder_files": [f"{prefix}{key[1]}" for prefix in prefixes]} if prefixes else {}
    return {
        **dumps,
        "rank": key[1],
        "pid": pid_of_run(key[1], env) or pid,
        "source": source,
        "step": key[0],
        "world_size": first_number(env, SIZE_VARIABLES),
        "local_world_size": first_number(env, LOCAL_SIZE_VARIABLES),
        "attempt": attempt_of_run(env),
    }


def attempt_of_run(env: dict[str, str]) -> str | None:
    """Return the folder of the attempt if the rank belongs to a `bsl` run, or None."""
    names = ("BSL_RUN_DIR", "BSL_ATTEMPT")
    return "{}/attempts/{}".format(*(env[name] for name in names)) if all(name in env for name in names) else None


def pid_of_run(rank: int, env: dict[str, str]) -> int | None:
    """Return the PID of `rank` that a `bsl` run recorded, if that process is alive."""
    attempt = attempt_of_run(env)
    if attempt is None:
        return None
    pid = ask_one(lambda: [("pid", read_pid(f"{attempt}/pids/rank-{rank:04d}.json"))], 1.0).get("pid")
    return pid if pid and os.path.exists(f"/proc/{pid}") else None


def read_pid(path: str) -> int | None:
    """Return the PID in a PID file, or None."""
    import json

    pid = json.loads(read_text(path) or "{}").get("pid")
    return pid if isinstance(pid, int) else None


def count_ranks(launcher_pid: int, known: Known) -> list[Facts]:
    """Return the ranks of a launcher that numbers none: its Python children in the order of their start, or itself."""
    below = {pid for pid in known if pid != launcher_pid and is_python(known[pid])}
    tops = sorted((known[pid]["start_ticks"], pid) for pid in below if not has_ancestor(pid, below, known))
    pids = [pid for _, pid in tops] or [pid for pid in (launcher_pid,) if pid in known]
    nothing = {"source": "order of start", "step": None, "world_size": None, "attempt": None}
    return [dict(nothing, rank=rank, pid=pid) for rank, pid in enumerate(pids)]

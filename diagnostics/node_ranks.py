"""Finds the processes of a node that are ranks, for node_agent.py. Standard library only, Python 3.8 or newer.

The sources, in this order: PID files of the launcher; the scheduler (node_scheduler.py); the environment of all
processes; the descendants of a launcher. Never ps or pgrep: they block on a process whose memory map is locked. A rank
is a record {rank, pid, source, step, world_size, ...}. Its `source` is what numbers it (node_numbers.py); `order of
start` means that it was only counted. What is no rank is an entry {pid, comm, role, why} of `others`.
"""

from __future__ import annotations

import os

from node_identity import (
    DUMP_VARIABLES,
    LOCAL_SIZE_VARIABLES,
    RESTART_VARIABLES,
    SIZE_VARIABLES,
    STORE_VARIABLES,
    TASK_VARIABLES,
    ancestors,
    depth_of,
    first_number,
    identify,
    is_python,
    role_of,
)
from node_numbers import (
    GUESS,
    STORE,
    candidates,
    choose,
    claims_of,
    environment_of,
    is_settled,
    store_server,
    tell_others,
)
from node_peek import peek
from node_processes import ask_one, descendants, end_of, left_by, parents, read_record, read_text
from node_scheduler import LISTERS, VARIABLES

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    Facts = dict[str, Any]
    Known = dict[int, Facts]
    Row = tuple[int, str, "int | None"]
    Tasks = dict[int, tuple[str, "int | None"]]
    Claim = tuple[int, int, str, "int | None"]
    # The ranks, who is none, how they were found, problems.
    Found = tuple[list[Facts], list[Facts], str, list[str]]

PID_FILES_TIMEOUT_S = 5.0
MAPS_TIMEOUT_S = 0.5
SEPARATE = ("--nnodes", "--rdzv-endpoint", "--rdzv_endpoint", "--master-addr", "--master_addr", "--master-port",
            "--master_port")  # fmt: skip
# Libraries of a process that is a rank: a launcher of one's own has none of them.
OF_RANKS = ("libtorch", "jaxlib", "libmpi", "libnccl", "tensorflow", "paddle")


def find_ranks(request: Facts, node: str) -> Found:
    """Return the ranks of this node, who is no rank, how they were found, and problems on the way."""
    problems: list[str] = []
    job_id, launcher_pid = request.get("job_id"), request.get("launcher_pid")
    if request.get("pid_files") and not request.get("step"):
        found = from_pid_files(request["pid_files"], node, None if job_id else os.uname().nodename, problems)
        # With `survive`, earlier generations may have had more ranks.
        ranks = [rank for rank in found if rank["rank"] < request.get("num_ranks", rank["rank"] + 1)]
        if ranks or not job_id:
            return ranks, [], "pid files", problems
    if job_id:
        return from_job(job_id, node, request, problems)
    if launcher_pid:
        return from_launcher(launcher_pid, request, problems)
    return [], [], "nothing", problems


def from_pid_files(folder: str, node: str, host: str | None, problems: list[str]) -> list[Facts]:
    """Return the ranks of this node from PID files, which may be on a file system that does not answer."""
    facts = ask_one(lambda: read_pid_files(folder, node, host), PID_FILES_TIMEOUT_S)
    error = facts.get("error") or (None if "done" in facts else f"no answer in {PID_FILES_TIMEOUT_S:g} s")
    if error:
        problems.append(f"pid files: {error}")
    return [dict(document, source="pid file", step=document.get("step_id")) for document in facts.get("files", [])]


def read_pid_files(folder: str, node: str, host: str | None) -> Iterator[tuple[str, list[Facts]]]:
    """Yield the documents of all PID files of `node`, or of `host` if given."""
    names = sorted(name for name in os.listdir(folder) if name.startswith("rank-") and name.endswith(".json"))
    documents = [read_record(f"{folder}/{name}") for name in names]
    yield "files", [each for each in documents if each and (each["node"] == node or (host and each["host"] == host))]


def from_job(job_id: str, node: str, request: Facts, problems: list[str]) -> Found:
    """Return the ranks of a scheduler's job on this node, whether `bsl` submitted it or not."""
    components = request.get("components") or []
    scheduler = request.get("scheduler", "Slurm")
    rows, how = LISTERS[scheduler](components or [job_id], node, problems)
    if not rows:
        rows, how = list_environment(VARIABLES[scheduler], job_id, node), "environment"
    own_step = os.environ.get(VARIABLES[scheduler].get("step", ""))
    wanted = request.get("step")
    tasks = {
        pid: (step, task)
        for pid, step, task in rows
        if step not in (own_step, "extern") and (wanted is None or step == wanted)
    }
    known = identify(sorted(tasks), problems)
    if components:
        tasks = number_components(known, tasks)
    ranks, others = number_ranks(known, spread_tasks(known, tasks), None, request)
    return ranks, others, how, problems


def number_components(known: Known, tasks: Tasks) -> Tasks:
    """Return `tasks` with the numbers of the whole step: slurmd numbers them in each component from 0."""
    return {
        pid: (step, task if task is None or pid not in known else first_number(known[pid]["env"], TASK_VARIABLES))
        for pid, (step, task) in tasks.items()
    }


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


def from_launcher(launcher_pid: int, request: Facts, problems: list[str]) -> Found:
    """Return the ranks among a launcher and its descendants, or among those that it has left if it has ended.

    The ancestors of this process are not ranks: it may have been started from the same shell.
    """
    above = parents()
    starts = {launcher_pid} if launcher_pid in above else left_by(launcher_pid)
    below = {pid for start in starts for pid in descendants(start, above)}
    pids = (starts | below) - (chain_to_root(os.getpid(), above) - {launcher_pid})
    known = identify(sorted(pids), problems)
    ranks, others = number_ranks(known, {}, launcher_pid, request)
    starting = [other for other in others if other["role"] == "launcher"]
    if starting and not ranks:
        problems.append(f"no rank was found yet below {starting[-1]['comm']} (process {starting[-1]['pid']})")
    waiting = next((fact for other in reversed(starting) if (fact := membership_of(other["pid"], known))), None)
    if waiting and not ranks:
        starting[-1]["waits_for_nodes"] = waiting
    return ranks, others, f"{'descendants of' if launcher_pid in above else 'left by'} {launcher_pid}", problems


def membership_of(pid: int, known: Known) -> Facts | None:
    """Return {nodes, endpoint, age_s} of a launcher of torch that has to find several nodes, by its arguments."""
    words = known[pid].get("argv", [])
    given = dict(word.lstrip("-").replace("_", "-").partition("=")[::2] for word in words if word.startswith("--"))
    given.update({name[2:].replace("_", "-"): words[at + 1] for at, name in enumerate(words[:-1]) if name in SEPARATE})
    nodes = given.get("nnodes", "1")
    endpoint = given.get("rdzv-endpoint") or f"{given.get('master-addr', '')}:{given.get('master-port', '')}"
    uptime = (read_text("/proc/uptime") or "").split()
    if not is_python(known[pid]) or nodes in ("1", "1:1") or not nodes.replace(":", "").isdigit() or not uptime:
        return None
    age_s = float(uptime[0]) - known[pid]["start_ticks"] / os.sysconf("SC_CLK_TCK")
    return {"nodes": nodes, "endpoint": endpoint.strip(":")[:100], "age_s": round(age_s, 2)}


def chain_to_root(pid: int, above: dict[int, int]) -> set[int]:
    """Return `pid` and all its ancestors; `above` gives the parent of each process."""
    chain: set[int] = set()
    while pid and pid not in chain:
        chain.add(pid)
        pid = above.get(pid, 0)
    return chain


def list_environment(names: dict[str, str], job_id: str, node: str) -> list[Row]:
    """Return processes whose environment names the job and this node: the last resort, for sites without tracking."""
    place = {"job": str(job_id), "node": node}
    wanted = {names[kind]: value for kind, value in place.items() if kind in names}
    known = identify(sorted(set(parents()) - {os.getpid()}), [])
    return [
        (pid, "unknown", None)
        for pid, process in sorted(known.items())
        if all(process["env"].get(name) == value for name, value in wanted.items())
    ]


def number_ranks(
    known: Known, tasks: Tasks, launcher_pid: int | None, request: Facts
) -> tuple[list[Facts], list[Facts]]:
    """Return the ranks among processes, and who is none. Looks into them only if their environment does not show it."""
    claims = claims_of(known, tasks, {})
    chosen, peeks = choose(known, tasks, claims), {}
    if not is_settled(known, claims, set(chosen.values())):
        unclear = [pid for pid in known if is_python(known[pid]) and not role_of(known[pid])]
        unclear.sort(key=lambda pid: (depth_of(pid, known), known[pid]["start_ticks"], pid))
        peeks = peek(unclear, request)
        claims = claims_of(known, tasks, peeks)
        chosen = choose(known, tasks, claims)
    ranks = records_of(known, tasks, claims, chosen, peeks)
    ranks = ranks + ended_rank(ranks, known) if ranks else count_ranks(launcher_pid, known, peeks)
    add_ages(ranks, known)
    names = {rank["pid"]: name_of(rank) for rank in ranks}
    others = tell_others(known, names, peeks)
    return ranks, [dict(each, end=end_of(each["pid"])) if each["role"] == "ended" else each for each in others]


def ended_rank(ranks: list[Facts], known: Known) -> list[Facts]:
    """Return the one rank that is missing, if one process next to the others has ended and was not reaped."""
    parents_of_ranks = {known[rank["pid"]]["ppid"] for rank in ranks if rank["pid"] in known}
    ended = [
        pid
        for pid, process in known.items()
        if process.get("state") == "Z" and process["ppid"] in parents_of_ranks and is_python(process)
    ]
    sizes = {rank["world_size"] for rank in ranks}
    size = sizes.pop() if len(sizes) == 1 else None
    missing = set(range(size or 0)) - {rank["rank"] for rank in ranks}
    if len(ended) != 1 or len(missing) != 1:
        return []
    same = {"source": ranks[0]["source"], "step": ranks[0]["step"], "world_size": size, "attempt": ranks[0]["attempt"]}
    return [dict(same, rank=missing.pop(), pid=ended[0], end=end_of(ended[0]))]


def add_ages(ranks: list[Facts], known: Known) -> None:
    """Add to each rank whether it runs Python, and how many seconds ago it began."""
    for rank in ranks:
        rank["is_python"] = rank["pid"] not in known or is_python(known[rank["pid"]])
    uptime = (read_text("/proc/uptime") or "").split()
    for rank in ranks:
        if uptime and rank["pid"] in known:
            began = known[rank["pid"]]["start_ticks"] / os.sysconf("SC_CLK_TCK")
            rank["age_s"] = round(float(uptime[0]) - began, 2)


def name_of(rank: Facts) -> str:
    """Return what to call a rank: `rank 3`, or `process 4711` if its number means nothing."""
    return f"process {rank['pid']}" if rank["source"] == GUESS else f"rank {rank['rank']}"


def assign_ranks(known: Known, tasks: Tasks) -> list[Facts]:
    """Return which process is which rank, without looking into them. `tasks`: {pid: (step, global task ID or None)}."""
    claims = claims_of(known, tasks, {})
    return records_of(known, tasks, claims, choose(known, tasks, claims), {})


def records_of(
    known: Known, tasks: Tasks, claims: dict[int, Claim], chosen: dict[tuple[Any, int], int], peeks: Known
) -> list[Facts]:
    """Return the records of the ranks that were chosen, in order."""
    ranks = [
        as_rank(key, pid, claims[pid], environment_of(pid, known, peeks), ancestors(pid, known))
        for key, pid in chosen.items()
    ]
    for rank in ranks:
        size = rank["world_size"]
        if size is not None and (size <= rank["rank"] or size < sum(each["step"] == rank["step"] for each in ranks)):
            rank["world_size"] = None  # it speaks of something else, such as nodes
    return sorted(ranks, key=lambda rank: (str(rank["step"]), rank["rank"]))


def as_rank(key: tuple[Any, int], pid: int, claim: Claim, env: dict[str, str], above: list[int]) -> Facts:
    """Return the record of one rank; `key` is (step, rank). What a run recorded of its task may be its launcher."""
    recorded = pid_of_run(key[1], env)
    prefixes = [env[name] for name in DUMP_VARIABLES if env.get(name)]
    dumps = {"recorder_files": [f"{prefix}{key[1]}" for prefix in prefixes]} if prefixes else {}
    size = claim[3] if claim[3] is not None else first_number(env, SIZE_VARIABLES)
    rings = {"rings": env["BSL_RING_DIR"]} if env.get("BSL_RING_DIR") else {}
    store = {"store": ":".join(env.get(name, "") for name in STORE_VARIABLES)} if env.get(STORE_VARIABLES[1]) else {}
    starts = [int(env[name]) for name in RESTART_VARIABLES if env.get(name, "").isdigit()]
    return {
        **dumps,
        **rings,
        **store,
        **({"restarts": starts} if starts[:1] > [0] else {}),
        "rank": key[1],
        "pid": recorded if recorded and recorded not in above else pid,
        "source": claim[2],
        "step": key[0],
        "world_size": size,
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
    pid = (read_record(path) or {}).get("pid")
    return pid if isinstance(pid, int) else None


def count_ranks(launcher_pid: int | None, known: Known, peeks: Known | None = None) -> list[Facts]:
    """Return the processes that may be ranks, none of which is known by its number, in the order of their start.

    The one that serves the store is rank 0 all the same.
    """
    peeks = peeks or {}
    pids = [pid for pid in candidates(known, launcher_pid, peeks) if not has_started_ranks(pid, known)]
    is_launcher = launcher_pid is not None and has_started_ranks(launcher_pid, known)
    if not pids and launcher_pid in known and not is_launcher and not role_of(known[launcher_pid]):
        pids = [launcher_pid]
    first = store_server(pids, peeks) if len(pids) > 1 else None
    pids.sort(key=lambda pid: pid != first)
    sizes = {first_number(environment_of(pid, known, peeks), SIZE_VARIABLES) for pid in pids}
    size = sizes.pop() if len(sizes) == 1 else None
    size = size if size is not None and size >= len(pids) else None
    nothing = {"step": None, "world_size": size, "attempt": None}
    return [dict(nothing, rank=rank, pid=pid, source=STORE if pid == first else GUESS) for rank, pid in enumerate(pids)]


def has_started_ranks(pid: int, known: Known) -> bool:
    """Whether a process has children of Python that have ended, and none of the libraries of a rank itself."""
    ended = [each for each in known.values() if each.get("state") == "Z" and each["ppid"] == pid and is_python(each)]
    if not ended:
        return False
    maps = ask_one(lambda: [("maps", read_text(f"/proc/{pid}/maps", 1 << 22) or "")], MAPS_TIMEOUT_S).get("maps")
    return maps is not None and maps != "" and not any(library in maps for library in OF_RANKS)

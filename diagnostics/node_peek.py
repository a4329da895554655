"""Looks into processes for what numbers them, for node_agent.py. Standard library only, Python 3.8 or newer.

Three things show which rank a process is, where its first environment does not: the arguments of functions that are
still on its stack (torch's spawn, `init_process_group`, a training function that is called with rank and world size),
the environment that it has set for itself since, and its connections: the one that serves the store is rank 0.
"""

from __future__ import annotations

import time

from node_environment import environment_now
from node_identity import WANTED
from node_processes import ask_children, run_program
from node_roles import is_in, own_calls, role_of_calls
from node_sockets import read_tables, socket_inodes
from safe_files import parse_json

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    Facts = dict[str, Any]

MAIN = "MainThread"
PEEK_TIMEOUT_S = 1.5
PEEK_STACK_S = 1.0
TIME_FOR_ALL_S = 4.0
MAX_PEEKS = 48
RANK_NAMES = (
    "rank", "global_rank", "world_rank", "my_rank", "process_id", "process_index", "process_idx", "proc_id",
    "worker_rank",
)  # fmt: skip
SIZE_NAMES = (
    "world_size", "nprocs", "num_processes", "num_procs", "n_procs", "nproc", "num_ranks", "size",
)  # fmt: skip
# Functions that make the calling process a member of the world, by a part of their file.
JOINING = {
    "torch/distributed/distributed_c10d.py": ("init_process_group", "_create_process_group"),
    "torch/distributed/rendezvous.py": ("_create_c10d_store",),
    "jax/_src/distributed.py": ("initialize",),
}  # fmt: skip
# Functions in which a process waits for children of any kind.
WAITING = {
    "multiprocessing/process.py": ("join",),
    "multiprocessing/connection.py": ("wait",),
    "subprocess.py": ("wait", "communicate", "run", "call", "check_call"),
}  # fmt: skip
OF_A_GROUP = "/torch/distributed/"  # its functions speak of ranks within any group
SPAWN_FILE, SPAWN_FUNCTION = "torch/multiprocessing/spawn.py", "_wrap"


def peek(pids: list[int], request: Facts) -> dict[int, Facts]:
    """Return what was found in each process: {pid: {env, connections, frames}}; what could not be read is missing."""
    deadline = time.monotonic() + TIME_FOR_ALL_S
    pids = pids[:MAX_PEEKS]

    def read(part: list[int]) -> Iterator[tuple[int, str, Any]]:
        known: Facts = {}
        for pid in part:
            env = environment_now(pid, WANTED, known)
            if env is not None:
                yield pid, "env", env
            yield pid, "connections", read_connections(pid, known)
            yield pid, "done", True

    def read_stacks(part: list[int]) -> Iterator[tuple[int, str, Any]]:
        for pid in part:
            frames = read_arguments(pid, request)
            if frames is not None:
                yield pid, "frames", frames
            yield pid, "done", True

    found = ask_children(pids, read, PEEK_TIMEOUT_S, 1, deadline)
    if request.get("py_spy"):
        workers = min(request.get("readers", 2), len(pids))
        for pid, facts in ask_children(pids, read_stacks, PEEK_TIMEOUT_S, workers, deadline).items():
            found.setdefault(pid, {}).update(facts)
    return {pid: facts for pid, facts in found.items() if pid is not None}


def read_connections(pid: int, known: Facts) -> Facts:
    """Return {serves: ports that the process listens on, ends: {inode: [local address, remote address]}}."""
    try:
        inodes, table = set(socket_inodes(pid).values()), read_tables(pid, known)
    except OSError:
        return {"serves": {}, "ends": {}}
    sockets = {inode: table[inode] for inode in inodes if inode in table}
    return {
        "serves": {inode: port_of(each["local"]) for inode, each in sockets.items() if each["state"] == "LISTEN"},
        "ends": {
            inode: [each["local"], each["remote"]] for inode, each in sockets.items() if each["state"] == "ESTABLISHED"
        },
    }


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def read_arguments(pid: int, request: Facts) -> Facts | None:
    """Return what the arguments of functions on the stacks of a process show, or None if they cannot be read."""
    argv = [request["py_spy"], "dump", "--json", "--locals", "--nonblocking", "--pid", str(pid)]
    for _ in range(2):
        status, output, _errors = run_program(argv, PEEK_STACK_S, {"RUST_BACKTRACE": "0"})
        if status == 0:
            return arguments_of(parse_json(output), pid)
        if status is None:
            break
    return None


def arguments_of(threads: list[Facts], pid: int) -> Facts:
    """Return what numbers a process in py-spy's dump: {spawned, joined, named, role, waits}.

    spawned: index given by torch's spawn. joined: [rank, size] given to torch or JAX. named: [[file, function,
    variable, rank, size, whether it is an argument]] of other functions, outermost first. role: what the main thread
    shows it to be, if it is no rank. waits: whether that waits for children of any kind.
    """
    threads = sorted(threads, key=lambda each: (each.get("os_thread_id") != pid, each.get("thread_name") != MAIN))
    found: Facts = {"named": []}
    for index, thread in enumerate(threads):
        calls = own_calls([(str(frame["name"]), frame["filename"]) for frame in thread["frames"]])
        frames = thread["frames"][: len(calls)]
        role = role_of_calls(calls) if index == 0 else None
        if role:
            found["role"] = role
        for frame in frames:
            take_frame(frame, found, is_main=index == 0)
        facts = [named_rank(frame) for frame in reversed(frames) if OF_A_GROUP not in frame["filename"]]
        found["named"] += [fact for fact in facts if fact]
    return found


def take_frame(frame: Facts, found: Facts, is_main: bool) -> None:
    """Put what a frame of a known function shows into `found`. The innermost one wins."""
    name, file = str(frame["name"]).rpartition(".")[2], frame["filename"]
    if name == SPAWN_FUNCTION and file.endswith(SPAWN_FILE):
        index = numbers_of(frame).get("i")
        if index is not None:
            found.setdefault("spawned", index[0])
    if is_in(JOINING, name, file):
        fact = named_rank(frame)
        if fact:
            found.setdefault("joined", fact[3:5])
    if is_main and is_in(WAITING, name, file):
        found["waits"] = True


def numbers_of(frame: Facts) -> dict[str, tuple[int, bool]]:
    """Return the variables of a frame that are numbers: {name: (value, whether it is an argument)}."""
    return {
        each["name"]: (int(each["repr"]), bool(each["arg"]))
        for each in frame.get("locals") or ()
        if str(each.get("repr") or "").isdigit()
    }


def named_rank(frame: Facts) -> list[Any] | None:
    """Return [file, function, variable, rank, size, whether both are arguments] of a frame that has both, or None."""
    numbers = numbers_of(frame)
    rank = next((name for name in RANK_NAMES if name in numbers), None)
    size = next((name for name in SIZE_NAMES if name in numbers), None)
    if rank is None or size is None or numbers[rank][0] >= numbers[size][0]:
        return None
    is_argument = numbers[rank][1]
    return [frame["filename"], frame["name"], rank, numbers[rank][0], numbers[size][0], is_argument]

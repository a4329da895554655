"""Says what a process of a job is by its program, for node_agent.py. Standard library only, Python 3.8 or newer.

Launchers (torchrun, mpirun, a shell) and helpers (a resource tracker, a data loader's worker) inherit the variables of
ranks and look like them. Their names tell them apart. Program, arguments and environment are read only in forked
readers: all of them block on a process whose memory map is locked.
"""

from __future__ import annotations

import os
import time

from node_processes import ask_children, parse_stat, read_text
from node_roles import program_words, role_of_program
from node_scheduler import PROGRAMS, variables

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    Facts = dict[str, Any]
    Known = dict[int, Facts]
    from node_roles import Role

RANK_VARIABLES = (
    "RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "JAX_PROCESS_ID",
    "JAX_PROCESS_INDEX", "CLOUD_TPU_TASK_ID",
)  # fmt: skip
TASK_VARIABLES = variables("task")
SIZE_VARIABLES = (
    "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "JAX_NUM_PROCESSES",
    *variables("num_tasks"),
)  # fmt: skip
LOCAL_SIZE_VARIABLES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
NUM_NODES_VARIABLES = variables("num_nodes")
PLACE_VARIABLES = ("LOCAL_RANK", "NODE_RANK", "GROUP_RANK", *TASK_VARIABLES, *NUM_NODES_VARIABLES)
OTHER_VARIABLES = (*variables("job"), *variables("node"), "BSL_RUN_DIR", "BSL_ATTEMPT", "BSL_RING_DIR")
# Where torch writes the dumps of its flight recorder: a prefix, to which it appends the rank.
DUMP_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
# Where ranks look for the store, and how often their launcher has started them.
STORE_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
RESTART_VARIABLES = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
WANTED = (
    RANK_VARIABLES + SIZE_VARIABLES + LOCAL_SIZE_VARIABLES + PLACE_VARIABLES + OTHER_VARIABLES + DUMP_VARIABLES
    + STORE_VARIABLES + RESTART_VARIABLES
)  # fmt: skip
IDENTIFY_TIMEOUT_S = 1.0
MAX_ARGUMENT_BYTES = 4096
SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "fish", "tcsh")
# What these run is a rank or a launcher; they are neither.
WRAPPERS = ("timeout", "env", "numactl", "taskset", "nice", "tee", "sleep", "sudo", "su", "script", "screen", "tmux")
# Programs that start ranks, by the beginning of the kernel's name for the process.
LAUNCHERS = (
    *sum(PROGRAMS.values(), ()), "mpirun", "mpiexec", "orterun", "prterun", "orted", "prted", "prte",
    "hydra_pmi_proxy", "hydra_bstrap", "torchrun", "pt_elastic", "raylet", "gcs_server", "pdsh",
)  # fmt: skip
HELPERS = ("wandb-core", "wandb-service", "torch_shm_manag", "tensorboard", "nvidia-smi", "dcgmi", "py-spy")


def identify(pids: list[int], problems: list[str]) -> Known:
    """Return {pid: {comm, ppid, start_ticks, exe, argv, env}}; `env` is empty if the environment cannot be read."""
    found = ask_children(pids, read_identities, IDENTIFY_TIMEOUT_S, 1, time.monotonic() + 5 * IDENTIFY_TIMEOUT_S)
    known: Known = {}
    for pid in pids:
        stat = read_text(f"/proc/{pid}/stat")
        identity = found.get(pid, {}).get("identity")
        if identity is None and stat:
            problems.append(f"pid {pid}: its environment cannot be read")
        if stat:
            known[pid] = dict(parse_stat(stat), **(identity or {"exe": "", "argv": [], "env": {}}))
    return known


def read_identities(pids: list[int]) -> Iterator[tuple[int, str, Any]]:
    """Yield program, arguments and environment of each process, for a reader."""
    for pid in pids:
        yield pid, "identity", exe_and_environment(pid)
        yield pid, "done", True


def exe_and_environment(pid: int) -> Facts:
    """Return program, arguments, and the few variables that number ranks, as they were when the program began.

    May block on a process whose memory map is locked.
    """
    try:
        exe = os.readlink(f"/proc/{pid}/exe")
    except OSError:
        exe = ""
    pairs = (entry.partition("=")[::2] for entry in (read_text(f"/proc/{pid}/environ", 1 << 20) or "").split("\0"))
    argv = (read_text(f"/proc/{pid}/cmdline", MAX_ARGUMENT_BYTES) or "").split("\0")
    return {"exe": exe, "argv": argv, "env": {name: value for name, value in pairs if name in WANTED}}


def is_python(process: Facts) -> bool:
    """Whether the program looks like a Python interpreter (torch renames its main thread)."""
    program = os.path.basename(process["exe"])
    return bool(program.startswith("python") or process["comm"].startswith(("python", "pt_main", "ray::")))


def role_of(process: Facts) -> Role | None:
    """Return (role, why) of a process that is certainly no rank: `launcher`, `helper` or `ended`. Else None."""
    comm = process["comm"]
    if process.get("state") == "Z":
        return "ended", "it has ended, and its parent has not reaped it"
    if comm in SHELLS or comm in WRAPPERS:
        return "launcher", f"{comm} only starts other programs"
    if comm.startswith(LAUNCHERS):
        return "launcher", f"{comm} starts ranks"
    if comm.startswith(HELPERS):
        return "helper", f"{comm} is a service"
    if not is_python(process):
        return None
    return role_of_program(program_words(process.get("argv", ())))


def is_spawned(process: Facts) -> bool:
    """Whether Python's multiprocessing started it as a new program: a rank, or a worker of one."""
    return "--multiprocessing-fork" in process.get("argv", ())


def depth_of(pid: int, known: Known) -> int:
    """Return how many of `known` are above a process."""
    return len(ancestors(pid, known))


def ancestors(pid: int, known: Known) -> list[int]:
    """Return those of `known` that are above a process, nearest first."""
    chain: list[int] = []
    above = known[pid]["ppid"] if pid in known else 0
    while above in known and above != pid and above not in chain:
        chain.append(above)
        above = known[above]["ppid"]
    return chain


def first_number(env: dict[str, str], names: tuple[str, ...]) -> int | None:
    """Return the first of the variables `names` that is a number, or None."""
    return next((int(env[name]) for name in names if env.get(name, "").isdigit()), None)

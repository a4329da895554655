"""Says what a Python process is if it is no rank: by what it runs, and by what its main thread is in.

The node agent asks this of live processes, and `bsl spy --bundle` of stored stacks: the same file is in the package.
Standard library only, Python 3.8 or newer.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    # ("launcher" or "helper", why)
    Role = tuple[str, str]

# Parts of the arguments of a Python program, and what it is.
LAUNCHER_WORDS = {
    "torch.distributed.run": "torch's launcher", "torch.distributed.launch": "torch's launcher",
    "torch/distributed/run.py": "torch's launcher", "torch/distributed/launch.py": "torch's launcher",
    "bin/torchrun": "torch's launcher",
    "accelerate.commands": "accelerate's launcher", "bin/accelerate": "accelerate's launcher",
    "accelerate/commands": "accelerate's launcher",
    "deepspeed.launcher": "deepspeed's launcher", "bin/deepspeed": "deepspeed's launcher",
    "deepspeed/launcher": "deepspeed's launcher",
    "bin/horovodrun": "horovod's launcher", "bin/colossalai": "colossalai's launcher",
    "bin/ray": "ray's launcher",
}  # fmt: skip
HELPER_WORDS = {
    "multiprocessing.resource_tracker": "Python's resource tracker",
    "multiprocessing.semaphore_tracker": "Python's semaphore tracker",
    "multiprocessing.forkserver": "Python's fork server",
    "multiprocess.resource_tracker": "Python's resource tracker",
    "multiprocess.forkserver": "Python's fork server",
    "loky.backend.resource_tracker": "a resource tracker",
    "_inductor/compile_worker": "a compiler of torch", "_inductor.compile_worker": "a compiler of torch",
    "wandb/sdk": "wandb's service", "wandb.sdk": "wandb's service", "wandb-core": "wandb's service",
    "bin/tensorboard": "tensorboard", "tensorboard.main": "tensorboard",
    "ray/dashboard": "Ray's dashboard", "ray/_private/log_monitor": "Ray's log monitor",
    "ray/autoscaler": "Ray's monitor", "ray/_private/runtime_env": "Ray's agent",
    "ray::Dashboard": "Ray's dashboard", "ray::RuntimeEnv": "Ray's agent", "ray::IDLE": "an idle worker of Ray",
    "ray/util/client": "Ray's client server",
    "ray/_private/workers/default_worker": "a worker of Ray that runs nothing yet",
    "ray/_private/workers/setup_worker": "a worker of Ray that runs nothing yet",
}  # fmt: skip
# Functions that only helpers of a rank run, by the end of their file. `multiprocess` is a copy of `multiprocessing`.
HELPING = {
    "torch/utils/data/_utils/worker.py": (("_worker_loop",), "a worker of a data loader"),
    "multiprocessing/pool.py": (("worker",), "a worker of a pool"),
    "multiprocess/pool.py": (("worker",), "a worker of a pool"),
    "concurrent/futures/process.py": (("_process_worker",), "a worker of a pool"),
    "loky/process_executor.py": (("_process_worker",), "a worker of a pool"),
    "multiprocessing/managers.py": (("_run_server",), "a manager of Python's multiprocessing"),
    "multiprocess/managers.py": (("_run_server",), "a manager of Python's multiprocessing"),
    "multiprocessing/resource_tracker.py": (("main",), "Python's resource tracker"),
    "multiprocess/resource_tracker.py": (("main",), "Python's resource tracker"),
    "multiprocessing/forkserver.py": (("main",), "Python's fork server"),
    "multiprocess/forkserver.py": (("main",), "Python's fork server"),
    "torch/_inductor/compile_worker/__main__.py": (("main",), "a compiler of torch"),
    "torch/_inductor/compile_worker/subproc_pool.py": (("main",), "a compiler of torch"),
    "tensorboard/program.py": (("main", "serve_forever"), "tensorboard"),
    "tensorboard/main.py": (("run_main",), "tensorboard"),
}  # fmt: skip
# Functions in which a launcher waits for the ranks that it has started.
STARTING = {
    "torch/multiprocessing/spawn.py": (("join", "start_processes"), "torch"),
    "torch/distributed/elastic/agent/server/api.py": (("run", "_invoke_run"), "torch"),
    "torch/distributed/launch.py": (("main",), "torch"),
    "accelerate/commands/launch.py": (("launch_command", "multi_gpu_launcher", "deepspeed_launcher"), "accelerate"),
    "deepspeed/launcher/runner.py": (("main",), "deepspeed"),
    "deepspeed/launcher/launch.py": (("main",), "deepspeed"),
    "composer/cli/launcher.py": (("main", "_monitor_processes"), "composer"),
    "horovod/runner/launch.py": (("run_commandline", "_run"), "horovod"),
}  # fmt: skip
# For each function of both: its files, and what they make of a process.
ROLES: dict[str, list[tuple[str, Role]]] = {}
for _part, (_names, _what) in HELPING.items():
    for _name in _names:
        ROLES.setdefault(_name, []).append((_part, ("helper", "it is " + _what)))
for _part, (_names, _what) in STARTING.items():
    for _name in _names:
        ROLES.setdefault(_name, []).append(
            (_part, ("launcher", "it waits for ranks that it has started with " + _what))
        )
# Outermost own functions of a process that was forked: what is outside them belongs to its parent.
FORKED = {"multiprocessing/process.py": ("_bootstrap",), "multiprocess/process.py": ("_bootstrap",)}


def role_of_program(words: Sequence[str]) -> Role | None:
    """Return what a program is that runs `words`, as `program_words` returns them; None if it may be a rank."""
    head = " ".join(words)
    for role, table in (("launcher", LAUNCHER_WORDS), ("helper", HELPER_WORDS)):
        for part, what in table.items():
            if head.endswith(part) if part.startswith("bin/") else part in head:
                return role, "it is " + what
    return None


def program_words(argv: Sequence[str]) -> list[str]:
    """Return what a Python process runs: the file, `-m` and the module, or `-c` and the code; else its title."""
    words = [word for word in argv if word]
    if len(words) < 2 or not words[0].rpartition("/")[2].startswith(("python", "pt_main")):
        return words[:1]
    for at, word in enumerate(words[1:], 1):
        if word[:1] == "-" and word[1:2] in ("m", "c"):
            return words[at : at + 2] if len(word) == 2 else [word]
        if not word.startswith("-") and words[at - 1] not in ("-X", "-W"):
            return [word]
    return words[:1]


def own_calls(calls: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the calls of a thread, (function, file) innermost first, without those that a fork has copied."""
    for at, (function, file) in enumerate(calls):
        if is_in(FORKED, function, file):
            return list(calls[:at])
    return list(calls)


def role_of_calls(calls: Iterable[tuple[str, str]]) -> Role | None:
    """Return what a process is whose main thread is in these own calls; None if it may be a rank."""
    found: Role | None = None
    for function, file in calls:
        for part, role in ROLES.get(function.rpartition(".")[2], ()):
            if file.endswith(part) and role[0] == "helper":
                return role
            if file.endswith(part):
                found = found or role
    return found


def is_in(table: Mapping[str, Sequence[str]], function: str, file: str) -> bool:
    """Whether the table has the function, by the end of its file's path."""
    name = function.rpartition(".")[2]
    return any(name in functions and file.endswith(part) for part, functions in table.items())

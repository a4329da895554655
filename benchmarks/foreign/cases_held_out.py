"""Held-out programs: written by another hand than the rules of the verdict, and judged after these have been frozen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from foreign.case import ForeignCase

TORCHRUN = (
    "{python}", "-m", "torch.distributed.run", "--nproc-per-node={world_size}", "--master-port={port}", "{program}",
)  # fmt: skip
BY_VARIABLES = ("{python}", "{programs}/start_all.py", "--port={port}", "--procs={world_size}", "{program}")
BY_ARGUMENTS = (
    "{python}", "{programs}/start_all.py", "--port={port}", "--procs={world_size}", "--as-arguments", "{program}",
)  # fmt: skip
ITSELF = ("{python}", "{program}")
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "{world_size}", *ITSELF)
ACCELERATE = (
    "{python}", "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes={world_size}", "--num_machines=1",
    "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port={port}", "{program}",
)  # fmt: skip
LAUNCHERS = {
    "torchrun": TORCHRUN,
    "own-env": BY_VARIABLES,
    "own-args": BY_ARGUMENTS,
    "mp-spawn": ITSELF,
    "mp-fork": ITSELF,
    "mpirun": MPIRUN,
    "accelerate": ACCELERATE,
}
CULPRIT = ("{culprit}",)
SLOW_TOO = ("slow",)


def blind(
    name: str, program: str, mode: str, state: str, launcher: str = "torchrun", framework: str = "ddp", **more: Any
) -> ForeignCase:
    """Return a case whose program takes a mode and the culprit."""
    command = (*LAUNCHERS[launcher], mode, *CULPRIT, *more.pop("arguments", ()))
    return ForeignCase(f"blind-{name}", framework, launcher, program, command, state, **more)


def between(mode: str, culprit: int, launcher: str = "torchrun", **more: Any) -> ForeignCase:
    """Return a case in which one rank does not come back from an errand between two batches."""
    more = {"culprits": (culprit,), **more}
    return blind(mode, "between_batches.py", mode, "hang", launcher, **more)


def day(mode: str, step: int = 5, **more: Any) -> ForeignCase:
    """Return a healthy case that does not look even; asked after so many steps of all ranks."""
    more = {"sign": f"step {step} ", "sign_count": 4, **more}
    return blind(f"day-{mode}", "uneven_days.py", mode, "progressing", **more)


def duty(mode: str, culprit: int, launcher: str = "torchrun") -> ForeignCase:
    """Return a case in which the others wait for a rank with a heavy duty."""
    return blind(
        f"duty-{mode}", "heavy_duties.py", mode, "slow", launcher, "own loop", culprits=(culprit,),
        also=("progressing",), settle_s=10.0,
    )  # fmt: skip


def tokens(mode: str, culprit: int, launcher: str, **more: Any) -> ForeignCase:
    """Return a case of one multiprocessing program, whose ranks share something."""
    return blind(
        f"tokens-{mode}", "shared_tokens.py", mode, "hang", launcher, "own loop", culprits=(culprit,),
        arguments=("{world_size}", "{port}"), settle_s=8.0, **more,
    )  # fmt: skip


def messages(mode: str, state: str = "hang", **more: Any) -> ForeignCase:
    return blind(f"messages-{mode}", "own_messages.py", mode, state, framework="p2p", **more)


def grid(mode: str, state: str, **more: Any) -> ForeignCase:
    return blind(
        f"mpi-{mode}", "grid_of_ranks.py", mode, state, "mpirun", "mpi4py",
        needs=("mpi4py", "numpy", "command:mpirun"), **more,
    )  # fmt: skip


HUNG: tuple[ForeignCase, ...] = (
    between("records", 2, classes=("H37",)),
    between("converter", 1, "own-env"),
    between("pool", 3),
    between("drain", 0, "own-args"),
    between("gauge", 2, "own-args"),
    between("debugger", 1),
    between("pattern", 3, also=SLOW_TOO, classes=("H30",)),
    between("joins", 2, "own-env"),
    between("answers", 0),
    between("leaves", 1, "own-args"),
    between("baton", 0, culprits=(), involved=(0, 1, 2, 3), sign_count=4),
    messages("threads", involved=(2,)),
    messages("experts", culprits=(4,), world_size=6),
    messages("results", culprits=(3,)),
    messages("ring", involved=(0, 1, 2, 3), sign_count=4),
    tokens("killed", 1, "mp-fork", world_size=3, also=("crashed",)),
    tokens("leaked", 2, "mp-spawn"),
    tokens("flags", 3, "mp-fork"),
    blind(
        "store-loses", "task_store.py", "loses", "hang", "own-env", "store", world_size=3, culprits=(2,), settle_s=8.0,
    ),
    grid("grid", "hang", world_size=6, culprits=(4,)),
    blind("fsdp2-drop", "dropped_layers.py", "drop", "hang", framework="fsdp2", culprits=(1,), settle_s=8.0),
    blind("zero-skip", "dropped_layers.py", "skip", "hang", framework="zero1", culprits=(2,), settle_s=8.0),
)  # fmt: skip

HEALTHY: tuple[ForeignCase, ...] = (
    day("branches", 8),
    day("batches", 3, also=SLOW_TOO, culprits=(0, 1, 2, 3)),
    day("workers", 3),
    day("throttled", 1),
    day("local", 1, moment="random", between_s=(8.0, 70.0)),
    day("saver", 8, culprits=(1,)),
    day("evaluates", also=SLOW_TOO, culprits=(0,)),
    day("turns", 4, also=SLOW_TOO, culprits=(0, 1, 2, 3)),
    day("launcher"),
    day("paused", also=SLOW_TOO, culprits=(2,)),
    duty("packs", 3),
    duty("ranges", 0, "own-args"),
    duty("previous", 0),
    messages("stages", "progressing", also=SLOW_TOO, culprits=(2,), sign="step 1 ", sign_count=4),
    blind("store-even", "task_store.py", "even", "progressing", "own-env", "store", sign="step 5 ", sign_count=4),
    grid("farm", "progressing", sign="step 5 ", sign_count=3),
    blind(
        "accelerate-dispatched", "dispatched.py", "even", "progressing", "accelerate", "accelerate", sign="step 5 ",
        sign_count=4, also=SLOW_TOO, culprits=(0,), needs=("torch", "accelerate"),
    ),
)  # fmt: skip

CASES: tuple[ForeignCase, ...] = tuple(replace(case, limit_s=900.0) for case in HUNG + HEALTHY)

"""Errands and chores between two steps, queues and files that ranks share, and healthy trainings at their own pace.

These were the first held-out set, hence their names; what `bsl spy` said about them has been looked at since.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from foreign.case import ForeignCase

TORCHRUN = (
    "{python}", "-m", "torch.distributed.run", "--nproc-per-node={world_size}", "--master-port={port}", "{program}",
)  # fmt: skip
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "{world_size}", "{python}", "{program}")
WITH_SERVER = (
    "sh", "-c",
    "{python} {programs}/silent_server.py {folder}/server-port & "
    "exec {python} -m torch.distributed.run --nproc-per-node={world_size} --master-port={port} {program} "
    "settings {culprit}",
)  # fmt: skip


def torchrun(
    name: str, program: str, mode: str, state: str, framework: str = "ddp", arguments: tuple[str, ...] = (), **more: Any
) -> ForeignCase:
    """Return a case that torchrun starts with a mode, if any, and the culprit."""
    command = (*TORCHRUN, *((mode,) if mode else ()), *arguments)
    return ForeignCase(f"held-{name}", framework, "torchrun", program, command, state, **more)


def other(name: str, framework: str, launcher: str, command: tuple[str, ...], **more: Any) -> ForeignCase:
    return ForeignCase(f"held-{name}", framework, launcher, command=command, **more)


CULPRIT = ("{culprit}",)
STEPPING: dict[str, Any] = {"sign": "step 5 ", "sign_count": 4}


def chatty(read: str, mode: str) -> tuple[str, ...]:
    """Return the command of a program that an own launcher starts, with the output of one rank in a pipe."""
    launcher = ("{python}", "{programs}/launch_piped.py", read, "{culprit}", "{world_size}", "{port}")
    return (*launcher, "{program}", mode, "{culprit}")


def errand(name: str, culprit: int, **more: Any) -> ForeignCase:
    """Return a case in which one rank of a DDP training never returns from an errand."""
    more = {"arguments": CULPRIT, "culprits": (culprit,), **more}
    return torchrun(f"ddp-{name}", "side_errands.py", name, "hang", **more)


def chore(name: str, framework: str, culprit: int) -> ForeignCase:
    """Return a case in which the others wait for one rank that makes progress."""
    return torchrun(
        f"chore-{name}", "long_chores.py", name, "slow", framework, CULPRIT,
        culprits=(culprit,), also=("progressing",), settle_s=8.0,
    )  # fmt: skip


HUNG: tuple[ForeignCase, ...] = (
    torchrun("no-sync-forgets", "long_context.py", "forgets", "hang", "ddp", CULPRIT, culprits=(2,), classes=("H01",)),
    torchrun("fsdp-nan-batch", "shards_recomputed.py", "nan", "hang", "fsdp", CULPRIT, culprits=(1,), classes=("H01",)),
    torchrun("frozen-views", "pairs_of_views.py", "", "hang", "nn-functional", CULPRIT, culprits=(3,)),
    torchrun("halo-not-sent", "halo_exchange.py", "", "hang", "p2p", CULPRIT, culprits=(1,)),
    torchrun(
        "accelerate-short-shard", "captions.py", "short", "hang", "accelerate", CULPRIT,
        culprits=(2,), classes=("H02",), needs=("torch", "accelerate"),
    ),
    other(
        "queue-greedy", "queues", "mp.spawn", program="work_queues.py", state="hang", culprits=(3,),
        command=("{python}", "{program}", "greedy", "{culprit}", "{world_size}", "{port}"),
    ),
    other(
        "queue-leaves", "queues", "mp.spawn", program="work_queues.py", state="hang", also=("crashed",), culprits=(1,),
        command=("{python}", "{program}", "leaves", "{culprit}", "{world_size}", "{port}"), classes=("H72",),
    ),
    other(
        "mpi-wrong-tag", "mpi", "mpirun", program="mpi_overlap.py", state="hang", culprits=(1,),
        command=(*MPIRUN, "tag", "{culprit}"), needs=("mpi4py", "numpy", "command:mpirun"),
    ),
    other(
        "full-pipe", "own loop", "popen", program="chatty.py", state="hang", culprits=(1,), classes=("H39",),
        command=chatty("keeps", "dump"),
    ),
    other(
        "part-missing", "own loop", "popen", program="chatty.py", state="hang", also=("crashed",), culprits=(3,),
        classes=("H70", "H72"), command=chatty("reads", "gone"),
    ),
    errand("vocabulary", 1),
    other(
        "ddp-settings", "ddp", "sh", program="side_errands.py", state="hang", command=WITH_SERVER, culprits=(1,),
        classes=("H43",),
    ),
    errand("upload", 3),
    errand("preempted", 2),
    errand("writer", 0, classes=("H35",)),
    errand("prefetch", 2, classes=("H37",)),
    torchrun("index-lockf", "shared_index.py", "lockf", "hang", "own loop", CULPRIT, culprits=(2,), classes=("H41",)),
    torchrun(
        "index-sqlite", "shared_index.py", "sqlite", "hang", "own loop", CULPRIT, culprits=(1,), sign_count=3,
    ),
)  # fmt: skip

HEALTHY: tuple[ForeignCase, ...] = (
    torchrun(
        "accumulates", "long_context.py", "even", "progressing", "ddp", ("0",), sign="step 4 ", sign_count=4,
    ),
    torchrun("fsdp-recomputes", "shards_recomputed.py", "even", "progressing", "fsdp", ("0",), **STEPPING),
    torchrun("joins-uneven", "uneven_inputs.py", "", "progressing", "ddp", ("3",), sign="step 8 ", sign_count=3),
    torchrun(
        "rests", "even_pace.py", "rests", "progressing", "ddp", sign="step 2 ", sign_count=4, moment="random",
        between_s=(3.0, 60.0),
    ),
    torchrun("long-steps", "even_pace.py", "long", "progressing", "ddp", sign="step 1 ", sign_count=4),
    torchrun("evaluates", "even_pace.py", "evaluates", "progressing", "ddp", **STEPPING),
    other(
        "mpi-overlaps", "mpi", "mpirun", program="mpi_overlap.py", state="progressing", **STEPPING,
        command=(*MPIRUN, "even", "0"), needs=("mpi4py", "numpy", "command:mpirun"),
    ),
    other(
        "progress-bar", "own loop", "popen", program="chatty.py", state="progressing", **STEPPING,
        command=chatty("reads", "bar"),
    ),
    torchrun(
        "accelerate-tokens", "captions.py", "tokens", "slow", "accelerate", CULPRIT, culprits=(0,),
        also=("progressing",), settle_s=8.0, needs=("torch", "accelerate"),
    ),
    chore("stream", "own loop", 0),
    chore("build", "own loop", 0),
    chore("describe", "own loop", 2),
)  # fmt: skip

CASES: tuple[ForeignCase, ...] = tuple(replace(case, limit_s=900.0) for case in HUNG + HEALTHY)

"""Programs in which the many may be wrong: a quarter of them are traps, in which the odd rank is right or healthy.

A third of them, chosen by their names, are kept back (`is_kept`): the rules were not looked at with their answers.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from foreign.case import ForeignCase

TORCHRUN = (
    "{python}", "-m", "torch.distributed.run", "--nproc-per-node={world_size}", "--master-port={port}", "{program}",
)  # fmt: skip
ACCELERATE = (
    "{python}", "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes={world_size}", "--num_machines=1",
    "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port={port}", "{program}",
)  # fmt: skip
BASH = ("bash", "{programs}/start_all.sh", "{port}", "{world_size}", "{python}", "{program}")
OWN = ("{python}", "{programs}/start_all.py", "--port={port}", "--procs={world_size}", "{program}")
KEEPER = ("{python}", "{programs}/keeps_the_dead.py", "{world_size}", "{port}", "{python}", "{program}")
NOTED = ("sh", "-c", "date '+%s struck' >> $FOREIGN_LOG; exec $0")
SPAWN = ("{python}", "{program}")
LAUNCHERS = {
    "torchrun": TORCHRUN, "accelerate": ACCELERATE, "bash": BASH, "own": OWN, "keeper": KEEPER, "mp.spawn": SPAWN,
}  # fmt: skip
TRAPS = frozenset(
    f"many-{name}"
    for name in (
        "loss-many", "loss-many-late", "quiet-many", "resume-many", "reduce-many", "excepts-many", "options-unknown",
        "lean-many", "loss-two", "root-many", "both", "halves", "publish", "backs-off", "curriculum", "evaluates",
        "downloads", "saves", "odd", "done-launcher", "orphans", "clips-many", "report-many",
    )
)  # fmt: skip


def is_kept(name: str) -> bool:
    """Whether a case belongs to the third that is asked about once, at the end."""
    return zlib.crc32(name.encode()) % 3 == 0


def case(
    name: str, program: str, arguments: Sequence[object], state: str, launcher: str = "torchrun", **more: Any
) -> ForeignCase:
    """Return a case whose program takes `arguments`; without more, its first line `struck` begins its state."""
    command = (*LAUNCHERS[launcher], *map(str, arguments))
    framework = more.pop("framework", "own loop")
    return ForeignCase(f"many-{name}", framework, launcher, program, command, state, **{"limit_s": 400.0, **more})


def parting(name: str, way: str, culprits: Sequence[int], *options: str, **more: Any) -> ForeignCase:
    """Return a case in which `culprits` do not issue the collectives of the others."""
    written = ",".join(map(str, culprits))
    more = {"culprits": tuple(culprits), **more}
    return case(name, "parting.py", (way, written, *options), "hang", **more)


def kept(name: str, culprits: Sequence[int], way: str = "", **more: Any) -> ForeignCase:
    """Return a case in which ranks do not come, for a reason of their own."""
    written = ",".join(map(str, culprits))
    return case(name, "kept_waiting.py", (way or name, written), "hang", culprits=tuple(culprits), **more)


def end(name: str, way: str, culprit: int, wait: str, launcher: str, **more: Any) -> ForeignCase:
    """Return a case in which a rank ends while others wait for it, where it is known that it is a failure."""
    arguments = (way, culprit, "--wait", wait)
    more = {"also": ("hang",), "culprits": (culprit,), **more}
    return case(name, "last_seen.py", arguments, "crashed", launcher, **more)


def calm(name: str, way: str, odd: int, state: str = "progressing", launcher: str = "torchrun", **more: Any) -> Any:
    """Return a case in which nothing is wrong, though something is odd."""
    more = {"sign": "step 6 ", "sign_count": 3, **more}
    return case(name, "in_good_health.py", (way, odd), state, launcher, world_size=3, **more)


LATE = ("--after", "25")
DDP = ("--ddp",)
SLOW = ("slow",)
RUNS = ("progressing",)

FEW_WRONG = (
    parting("loss-one", "loss", (1,)),
    parting("loss-one-late", "loss", (3,), *LATE, launcher="bash"),
    parting("report-one", "report", (0,)),
    parting("quiet-one", "quiet", (2,), launcher="own"),
    parting("clips-one", "clips", (2,)),
    parting("pairs", "pairs", (3,)),
    parting("pairs-first", "pairs", (0,), launcher="bash"),
    parting("node", "node", (3,)),
    parting("node-first", "node", (1,), launcher="own"),
    parting("thread", "thread", (1,), world_size=3),
    parting("early-ddp", "early", (2,), *DDP, framework="ddp"),
    parting("longer-ddp", "longer", (0,), *DDP, framework="ddp"),
    parting("resume-one", "resume", (1,), *DDP, framework="ddp"),
    parting("reduce-one", "reduce", (3,)),
    parting("shapes", "shapes", (2,)),
    parting("sends", "sends", (1,), involved=(0, 1), launcher="bash"),
    parting("lean-one", "lean", (1,), world_size=3),
    parting("excepts-one", "excepts", (2,), launcher="own"),
    parting("root-one", "root", (2,)),
    case("accelerate-alone", "lent_library.py", ("alone", 0), "hang", "accelerate", world_size=3, culprits=(0,),
         framework="accelerate", needs=("torch", "accelerate")),
    case("accelerate-uneven", "lent_library.py", ("uneven", 2), "hang", "accelerate", world_size=3, culprits=(2,),
         framework="accelerate", needs=("torch", "accelerate")),
    case("fsdp-tower", "lent_library.py", ("tower", 1), "hang", world_size=3, culprits=(1,), framework="fsdp2"),
    kept("file", (2,), launcher="bash"),
    kept("newer", (1,), world_size=3),
    kept("lock", (0,), world_size=3),
    kept("locked", (2,), world_size=3),
    kept("build", (0,), world_size=3),
    case("build-all", "kept_waiting.py", ("build", "0,1,2"), "hang", world_size=3, involved=(0, 1, 2)),
    kept("handler", (1,), world_size=3),
    kept("server", (0,), world_size=3, launcher="own"),
    kept("tool", (1,), world_size=3),
    kept("imports", (1,), world_size=3, launcher="bash"),
    ForeignCase(
        "many-port", "own loop", "own", "kept_waiting.py",
        (*NOTED, "{python} {programs}/start_all.py --port={port} --procs={world_size} --misdirect=2 {program} file 9"),
        "hang", culprits=(2,), settle_s=30.0, limit_s=400.0,
    ),
)  # fmt: skip

MANY_WRONG = (
    parting("loss-many", "loss", (0, 1, 3), "--after", "4"),
    parting("loss-many-late", "loss", (0, 2, 3), *LATE, launcher="own"),
    parting("report-many", "report", (1, 2, 3)),
    parting("clips-many", "clips", (0, 1, 3)),
    parting("quiet-many", "quiet", (0, 1, 2), launcher="bash"),
    parting("resume-many", "resume", (0, 2, 3), *DDP, framework="ddp"),
    parting("reduce-many", "reduce", (1, 2, 3)),
    parting("excepts-many", "excepts", (0, 1, 3), *DDP, framework="ddp"),
    case("options-unknown", "parting.py", ("quiet", "0,1,2", "--after", 5), "hang", involved=(0, 1, 2, 3)),
    parting("lean-many", "lean", (0, 2), world_size=3),
    parting("root-many", "root", (0, 1, 3), launcher="own"),
    parting("loss-two", "loss", (1, 4), world_size=5),
    parting("halves", "report", (2, 3)),
    parting("publish", "publish", (0,)),
    kept("both", (1, 3)),
)  # fmt: skip

ENDED = (
    end("killed-store", "killed", 2, "store", "bash"),
    end("leaves-store", "leaves", 3, "store", "own"),
    end("returns-store", "returns", 1, "store", "torchrun", world_size=3),
    end("segfaults-finally", "segfaults", 1, "finally", "bash", world_size=3),
    end("raises-store", "raises", 1, "store", "own", world_size=3),
    end("aborts-handler", "aborts", 1, "handler", "bash", world_size=3),
    end("raises-handler", "raises", 2, "handler", "own"),
    end("lingers", "lingers", 2, "store", "torchrun", world_size=3),
    end("zombie", "killed", 1, "store", "keeper", world_size=3),
    end("zombie-zero", "leaves", 0, "handler", "keeper", world_size=3),
    case("done-launcher", "last_seen.py", ("none", 0), "finished", "keeper", world_size=3, sign="step 9 ", sign_count=3,
         settle_s=8.0),
    case("orphans", "in_good_health.py", ("steady", 0), "progressing", "keeper", world_size=3,
         environment=(("KEEP", "away"),)),
    case("orphans-hang", "kept_waiting.py", ("file", "1"), "hang", "keeper", world_size=3, culprits=(1,),
         sign_count=2, environment=(("KEEP", "away"),)),
    ForeignCase(
        "many-crash-loop", "own loop", "torchrun", "last_seen.py",
        (*TORCHRUN[:3], "--max-restarts=20", "--monitor-interval=1", *TORCHRUN[3:], "raises", "1", "--steps", "3"),
        "crashed", world_size=3, culprits=(1,), also=("progressing",), sign_count=2, settle_s=3.0, limit_s=400.0,
    ),
    ForeignCase(
        "many-one-node", "own loop", "torchrun", "kept_waiting.py",
        (*NOTED, "{python} -m torch.distributed.run --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d "
         "--rdzv-endpoint=127.0.0.1:{port} {program} file 9"),
        "hang", world_size=0, settle_s=20.0, limit_s=400.0,
    ),
)  # fmt: skip

HEALTHY = (
    calm("steady", "steady", 0, launcher="bash"),
    case("spawned", "in_good_health.py", ("steady", 0, "--spawn", "--world-size", 3, "--url", "tcp://127.0.0.1:{port}"),
         "progressing", "mp.spawn", world_size=3, sign="step 6 ", sign_count=3),
    calm("backs-off", "backs_off", 0, sign="step 10 ", between_s=(0.0, 100.0)),
    calm("curriculum", "curriculum", 0),
    calm("saves", "saves", 0, launcher="own"),
    calm("evaluates", "evaluates", 0, "slow", also=RUNS, sign="step 10 ", culprits=(0,)),
    calm("downloads", "downloads", 1, "slow", also=RUNS, sign="step 10 ", culprits=(1,)),
    calm("long", "long", 0, sign="step 1 "),
    calm("odd", "odd", 2, also=SLOW, culprits=(2,)),
    calm("forward", "forward", 1, "slow", culprits=(1,)),
    calm("loader", "loader", 0, "slow", culprits=(0,)),
    calm("collects", "collects", 0, launcher="bash"),
    calm("pipeline", "pipeline", 0),
    case("accelerate-even", "lent_library.py", ("even", 0), "progressing", "accelerate", world_size=3, sign="step 6 ",
         sign_count=3, framework="accelerate", needs=("torch", "accelerate")),
)  # fmt: skip

CASES: tuple[ForeignCase, ...] = (*FEW_WRONG, *MANY_WRONG, *ENDED, *HEALTHY)

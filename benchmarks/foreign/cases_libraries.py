"""Cases of libraries over torch.distributed, and of communication written by hand."""

from __future__ import annotations

from typing import Any

from foreign.case import ForeignCase
from foreign.cases_ddp import HEALTHY, torchrun

PICKS = {
    "fsdp2": ("shard_lm.py", "--case={what} --odd={{culprit}}"),
    "pipeline": ("stages.py", "--flaw={what} --stage={{culprit}}"),
    "server": ("param_server.py", "{what} {{culprit}}"),
    "loader": ("readers.py", "--quirk={what} --at={{culprit}}"),
    "compile": ("compiled.py", "{what} 4"),
}
ZERO = ("torch", "deepspeed")
ZERO_ENVIRONMENT = (("DS_ACCELERATOR", "cpu"), ("TORCH_EXTENSIONS_DIR", "{folder}/extensions"))


def library(framework: str, name: str, what: str = "", words: str = "", **more: Any) -> ForeignCase:
    """A case of one of PICKS under torchrun, in which `what` happens to the culprit."""
    program, template = PICKS[framework]
    return torchrun(name, program, template.format(what=what) + " " + words, framework=framework, **more)


def mesh(name: str, kind: str, what: str, odd: str, **more: Any) -> ForeignCase:
    words = f"--kind={kind} --what={what} --odd={odd}"
    return torchrun(name, "mesh_block.py", words, framework=kind, **more)


def groups(name: str, scene: str, among: str, **more: Any) -> ForeignCase:
    return torchrun(name, "subgroups.py", f"--scene={scene} --among={among}", framework="groups", **more)


def rollouts(name: str, plot: str, who: int, seconds: float, **more: Any) -> ForeignCase:
    return torchrun(name, "rollouts.py", f"{plot} {who} {seconds}", framework="rl", **more)


def accelerate(name: str, words: str = "", state: str = "hang", **more: Any) -> ForeignCase:
    command = (
        "{python}", "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes={world_size}",
        "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no",
        "--main_process_port={port}", "{program}", *words.split(),
    )  # fmt: skip
    return ForeignCase(f"accelerate-{name}", "accelerate", "accelerate", "accelerated.py", command, state,
                       needs=("torch", "accelerate"), **more)  # fmt: skip


def lightning(name: str, strategy: str, words: str = "", state: str = "hang", **more: Any) -> ForeignCase:
    command = ("{python}", "{program}", strategy, *words.split())
    return ForeignCase(f"lightning-{name}", "lightning", f"lightning-{strategy}", "lit_small.py", command, state,
                       needs=("torch", "lightning"), **more)  # fmt: skip


def zero(name: str, stage: int, event: str = "", state: str = "hang", **more: Any) -> ForeignCase:
    words = f"--stage={stage} --accident={event} --victim={{culprit}}"
    return torchrun(name, "zero_train.py", words, state, framework=f"zero{stage}", needs=ZERO,
                    environment=ZERO_ENVIRONMENT, **more)  # fmt: skip


def deepspeed(name: str, stage: int, event: str = "", state: str = "hang", **more: Any) -> ForeignCase:
    command = (
        "{python}", "-m", "deepspeed.launcher.runner", "--num_gpus={world_size}", "--master_port={port}", "{program}",
        f"--stage={stage}", f"--accident={event}", "--victim={culprit}",
    )  # fmt: skip
    return ForeignCase(f"deepspeed-{name}", f"zero{stage}", "deepspeed", "zero_train.py", command, state,
                       needs=ZERO, environment=ZERO_ENVIRONMENT, **more)  # fmt: skip


CASES: tuple[ForeignCase, ...] = (
    library("fsdp2", "steps", **HEALTHY),
    library("fsdp2", "saves", "save", **HEALTHY),
    library("fsdp2", "saves-async", "async-save", **HEALTHY),
    library("fsdp2", "starting", state="progressing", moment="starting", between_s=(1.0, 12.0)),
    library("fsdp2", "forward-skipped", "skip-forward", culprits=(2,), classes=("H01", "H03")),
    library("fsdp2", "norm-alone", "sample-alone", culprits=(1,), classes=("H01", "H03", "H22")),
    library("fsdp2", "slow-batch", "slow-batch", state="slow", culprits=(3,), classes=("H100",)),
    library("fsdp2", "save-fails", "save-throws", culprits=(2,), classes=("H65", "H47", "H10")),
    mesh("steps", "tp", "", "", **HEALTHY),
    mesh("steps", "hsdp", "", "", **HEALTHY),
    mesh("skips", "tp", "skips", "3", culprits=(3,), classes=("H01", "H03")),
    mesh("reads", "hsdp", "reads", "1", culprits=(1,), classes=("H31", "H35")),
    mesh("swapped", "tp", "swap", "0,3", involved=(0, 1, 2, 3), classes=("H07",)),
    mesh("slow", "hsdp", "slow", "2", state="slow", culprits=(2,), classes=("H100",)),
    accelerate("steps", **HEALTHY),
    accelerate("gathers-alone", "--mode=gather-alone --process=0", culprits=(0,), classes=("H01", "H03")),
    accelerate("waits-alone", "--mode=wait --process=2", culprits=(2,), classes=("H10", "H03")),
    accelerate("evaluates", "--mode=evaluate --process=0", state="slow", culprits=(0,), classes=("H51", "H101")),
    accelerate("asks", "--mode=prompt --process=3", culprits=(3,), classes=("H31", "H35")),
    lightning("steps", "ddp", **HEALTHY),
    lightning("steps-spawn", "ddp_spawn", **HEALTHY),
    lightning("steps-fork", "ddp_fork", **HEALTHY),
    lightning("starting", "ddp", state="progressing", moment="starting", between_s=(2.0, 20.0)),
    lightning("barrier-alone", "ddp", "--incident=barrier --place=1", culprits=(1,), classes=("H01", "H03")),
    lightning("latch", "ddp", "--incident=latch --place=3", culprits=(3,)),
    lightning("latch-spawn", "ddp_spawn", "--incident=latch --place=0", culprits=(0,)),
    lightning("uploads", "ddp", "--incident=upload --place=0", state="slow", culprits=(0,), classes=("H51", "H100")),
    zero("steps", 1, state="progressing", sign="step 5 ", sign_count=4),
    zero("mutex", 2, "mutex", culprits=(1,)),
    zero("saves-alone", 2, "save-alone", culprits=(0,), classes=("H01", "H03", "H10")),
    zero("steps", 3, state="progressing", sign="step 5 ", sign_count=4),
    zero("barrier-alone", 3, "barrier-alone", culprits=(2,), classes=("H01", "H03")),
    deepspeed("steps", 2, state="progressing", sign="step 5 ", sign_count=4),
    deepspeed("license", 1, "license", culprits=(3,), classes=("H43",)),
    library("pipeline", "steps", **HEALTHY),
    library("pipeline", "heavy-steps", "", "--heavy", **HEALTHY),
    library("pipeline", "tag-differs", "tag", culprits=(1,), classes=("H09",)),
    library("pipeline", "sends-too-much", "extra", culprits=(0,), classes=("H08", "H09")),
    library("pipeline", "queue-empty", "queue", culprits=(2,), classes=("H37",)),
    library("pipeline", "slow-stage", "slow", state="slow", culprits=(1,), classes=("H100",)),
    library("server", "serves", "none", state="progressing", sign="step 8 ", sign_count=3),
    library("server", "worker-waits", "worker", state="slow", also=("progressing", "hang"), culprits=(2,)),
    library("server", "server-waits", "server", culprits=(0,)),
    library("server", "no-push", "no-push", state="slow", also=("progressing", "hang"), culprits=(3,)),
    rollouts("generates", "none", 0, 3.0, state="progressing", sign="step 2 ", sign_count=4),
    rollouts("reward-silent", "reward", 0, 1.0, culprits=(0,), classes=("H43",)),
    rollouts("learns-stale", "stale", 5, 0.5, world_size=8, culprits=(5,), classes=("H03", "H01", "H02")),
    rollouts("broadcasts-again", "again", 2, 0.5, culprits=(2,), classes=("H03", "H01")),
    library("loader", "steps", "", "--workers=1", **HEALTHY),
    library("loader", "slow-workers", "slow-decode", **{**HEALTHY, "sign": "step 2 "}),
    library("loader", "spawned-steps", "", "--method=spawn", **HEALTHY),
    library("loader", "lock", "decoder", culprits=(1,), classes=("H36",)),
    library("loader", "worker-stopped", "stopped", culprits=(2,), classes=("H36", "H55")),
    library("loader", "worker-reads", "fifo", "--method=spawn", culprits=(0,), classes=("H36",)),
    library("loader", "worker-slow", "remote", state="slow", culprits=(3,), classes=("H51", "H100")),
    library("compile", "steps", "none", **HEALTHY, limit_s=240.0),
    library("compile", "first-step", "none", state="progressing", also=("slow",), classes=("H103", "H50"),
            sign="compiling", sign_count=4, settle_s=1.0),
    library("compile", "breaks", "breaks", culprits=(2,), classes=("H01", "H03"), limit_s=240.0),
    groups("regroups", "", "", **HEALTHY),
    groups("made-alone", "alone", "1", culprits=(1,), classes=("H13",)),
    groups("made-backwards", "backwards", "2", culprits=(2,), classes=("H13", "H07")),
    groups("swapped", "swapped", "1,2", involved=(0, 1, 2, 3), classes=("H07",)),
    groups("objects", "objects", "3", culprits=(3,), classes=("H12",)),
    groups("watched", "watched", "2", culprits=(2,), classes=("H31",)),
    groups("operation", "operation", "6", world_size=8, culprits=(6,), classes=("H03",)),
    groups("order-differs", "shapes", "1", state="progressing"),
    groups("member-loads", "late", "1", state="slow", culprits=(1,), classes=("H51",)),
    groups("scatter", "scatter", "0", culprits=(0,), classes=("H03", "H01")),
)  # fmt: skip

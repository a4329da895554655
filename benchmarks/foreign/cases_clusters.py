"""Cases below other launchers: Megatron-core, Ray, Slurm steps, shells and pools of one's own."""

from __future__ import annotations

from typing import Any

from foreign.case import ForeignCase

STEPS = {"state": "progressing", "sign": "step 5 ", "sign_count": 4}
LEFT_BEHIND = ("H01", "H02", "H10")
RAY = {"limit_s": 300.0, "needs": ("ray", "torch"), "environment": (("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "300"),)}


def megatron(name: str, trouble: str = "none", who: int = 0, words: str = "", **more: Any) -> ForeignCase:
    """gpt_stages.py under torchrun: tensor ranks are 0-1 and 2-3, pipelines 0-2 and 1-3."""
    start = ("{python}", "-m", "torch.distributed.run", "--nproc-per-node=4", "--master-port={port}", "{program}")
    command = (*start, f"--trouble={trouble}", f"--who={who}", *words.split())
    usual = {"state": "hang", "culprits": () if trouble == "none" else (who,), "needs": ("torch", "megatron.core")}
    return ForeignCase(f"megatron-{name}", "megatron", "torchrun", "gpt_stages.py", command, **{**usual, **more})


def trainer(name: str, trouble: str = "none", who: int = 0, words: str = "", **more: Any) -> ForeignCase:
    """ray_fit.py: a TorchTrainer."""
    command = ("{python}", "{program}", f"--trouble={trouble}", f"--worker={who}", *words.split())
    usual = {"state": "hang", "culprits": () if trouble == "none" else (who,), **RAY}
    return ForeignCase(f"ray-train-{name}", "ray", "ray", "ray_fit.py", command, **{**usual, **more})


def actors(name: str, trouble: str = "none", who: int = 0, **more: Any) -> ForeignCase:
    """ray_replay.py: actor 0 learns, the others collect."""
    command = ("{python}", "{program}", f"--trouble={trouble}", f"--actor={who}")
    usual = {"state": "hang", "culprits": () if trouble == "none" else (who,), **RAY}
    return ForeignCase(f"ray-actors-{name}", "ray", "ray", "ray_replay.py", command, **{**usual, **more})


def step(name: str, deed: str = "none", who: int = 0, words: str = "", **more: Any) -> ForeignCase:
    """sketch_net.py as a Slurm job of two nodes; needs a cluster, such as `bsl cluster up --nodes 2`."""
    command = ("bash", "{programs}/run_step.sh", "{port}", "{python}", "{program}", f"--deed={deed}", f"--who={who}")
    usual = {"state": "hang", "culprits": () if deed == "none" else (who,), "needs": ("torch", "command:srun")}
    command += tuple(words.split())
    return ForeignCase(f"srun-{name}", "ddp", "srun", "sketch_net.py", command, **{**usual, **more})


def shell(way: str, name: str, deed: str = "none", who: int = 0, words: str = "", **more: Any) -> ForeignCase:
    """sketch_net.py below run_four.sh."""
    start = ("bash", "{programs}/run_four.sh", way, "{port}", "{python}", "{program}")
    command = (*start, f"--deed={deed}", f"--who={who}", *words.split())
    usual = {"state": "hang", "culprits": () if deed == "none" else (who,)}
    return ForeignCase(f"four-{way}-{name}", "ddp", f"shell-{way}", "sketch_net.py", command, **{**usual, **more})


def detached(name: str, deed: str = "none", who: int = 0, **more: Any) -> ForeignCase:
    """sketch_net.py below run_detached.sh: the launcher has ended, and rank 0 alone is known to who asks."""
    command = ("bash", "{programs}/run_detached.sh", "{port}", "{python}", "{program}", f"--deed={deed}",
               f"--who={who}")  # fmt: skip
    usual = {"state": "hang", "culprits": () if deed == "none" else (who,)}
    return ForeignCase(f"detached-{name}", "ddp", "shell-ended", "sketch_net.py", command, **{**usual, **more})


def pool(name: str, deed: str = "none", who: int = 0, words: str = "", **more: Any) -> ForeignCase:
    """sketch_net.py below pool_of_ranks.py."""
    start = ("{python}", "{programs}/pool_of_ranks.py", "{world_size}", "{port}", "{python}", "{program}")
    command = (*start, f"--deed={deed}", f"--who={who}", *words.split())
    usual = {"state": "hang", "culprits": () if deed == "none" else (who,)}
    return ForeignCase(f"pool-{name}", "ddp", "pool", "sketch_net.py", command, **{**usual, **more})


CASES: tuple[ForeignCase, ...] = (
    megatron("steps", **STEPS),
    megatron("slow-steps", words="--think=3", **{**STEPS, "sign": "step 1 "}),
    megatron("builds-index", "index", 0, state="slow", classes=("H51", "H101", "H100")),
    megatron("offloads", "offload", 3, state="slow", classes=("H64", "H102", "H51", "H100")),
    megatron("blend-silent", "blend", 1, classes=("H31", "H35", "H41")),
    megatron("stopped", "pause", 2, classes=("H55",)),
    megatron("adapts-for-ever", "adapt", 3, classes=("H30",)),
    megatron("statistics-alone", "statistics", 2, classes=("H01", "H03")),
    megatron("message-expected", "pipeline-message", 3, classes=("H08", "H09", "H03")),
    megatron("clips-not", "clip", 1, classes=("H01", "H02", "H10")),
    trainer("steps", **STEPS),
    trainer("augments", "augment", 2, state="slow", classes=("H51", "H101", "H100")),
    trainer("shard-silent", "shard", 1, classes=("H31", "H35", "H41")),
    trainer("searches-for-ever", "threshold", 3, classes=("H30",)),
    trainer("metric-skipped", "metric", 2, classes=LEFT_BEHIND),
    actors("rounds", state="progressing", sign="round 5 "),
    actors("physics", "physics", 2, state="slow", classes=("H51", "H101", "H100")),
    actors("simulator-locked", "simulator", 1, classes=("H31", "H34")),
    actors("learner-lacks-assets", "assets", 0, classes=("H44", "H30", "H31")),
    step("steps", **STEPS),
    step("slow-steps", words="--think=3", **{**STEPS, "sign": "step 1 "}),
    step("counts", "count", 0, state="slow", classes=("H51", "H101", "H100")),
    step("metadata-silent", "metadata", 2, classes=("H43", "H31")),
    step("broadcasts", "broadcast", 3, classes=("H03",)),
    step("stopped", "stop", 1, classes=("H55",)),
    shell("plain", "steps", **STEPS),
    shell("backwards", "steps", words="--with=tracker", **STEPS),
    shell("backwards", "cache-locked", "cache", 2, "--with=tracker", classes=("H34", "H31")),
    shell("wrapped", "slow-steps", words="--think=3 --with=monitor", **{**STEPS, "sign": "step 1 "}),
    shell("wrapped", "downloads", "download", 1, state="slow", classes=("H51", "H100")),
    shell("wrapped", "spins", "spin", 3, "--with=monitor", classes=("H30",)),
    shell("shell", "steps", **STEPS),
    shell("shell", "gradients-skipped", "skip", 1, classes=LEFT_BEHIND),
    shell("bound", "cleaner-holds-lock", "cleaner", 0, classes=("H41",)),
    shell("detached", "done-early", "done", 2, classes=(*LEFT_BEHIND, "H15")),
    shell("detached", "counts", "count", 3, state="slow", classes=("H51", "H101", "H100")),
    shell("absent", "one-never-started", culprits=(3,), classes=("H45", "H74"), sign="hello", sign_count=3,
          settle_s=15.0),
    shell("split", "steps", **STEPS),
    shell("split", "other-shell-stopped", "stop", 3, classes=("H55",)),
    shell("split", "this-shell-spins", "spin", 1, classes=("H30",)),
    shell("plain", "re-executed-peer", "peer", 2, "--with=exec", classes=("H03", "H08", "H09")),
    shell("plain", "re-executed-steps", words="--with=exec", **STEPS),
    shell("plain", "quits", "quit", 3, state="crashed", also=("hang",), classes=("H72", "H70", "H71")),
    shell("plain", "quits-ending", "quit", 1, state="crashed", also=("hang",), classes=("H72", "H70", "H71"),
          moment="ending", settle_s=1.0),
    shell("plain", "steps-starting", state="progressing", moment="starting", between_s=(1.0, 14.0)),
    detached("steps", **STEPS),
    detached("metadata-silent", "metadata", 1, classes=("H43", "H31")),
    pool("steps", words="--with=tracker", **STEPS),
    pool("downloads", "download", 0, "--with=tracker", state="slow", classes=("H51", "H100")),
    pool("broadcasts", "broadcast", 2, "--with=tracker", classes=("H03",)),
)  # fmt: skip

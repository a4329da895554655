"""Runs a rank that an agent leads: `slot.py SOCKET` connects to the agent there and becomes `bigsci_launch.train`.

With SUFFER=POINT:COUNT:HOW in the environment, something happens to the rank right after it has passed that point for
the COUNT-th time: HOW is `die` (SIGKILL), `stop` (SIGSTOP), `raise` (an exception), `memory` (torch's own, for a
shortage of memory), `exit` (exit code 7), `leave` (exit code 0), or `damage` (a bit of each copy that it holds changes;
at `manifest`). With NCCL_LIKE in the environment, ranks talk over the backend of `tests/support/nccl_like`. With
TRACED, compiled layers need no C++ compiler: they are traced, and run operation by operation. With LOOP=PATH, that
program runs instead of the trainer.
"""

from __future__ import annotations

import functools
import importlib
import os
import runpy
import signal
import socket
import sys
from pathlib import Path
from typing import Any

POINTS = {
    "step": ("bigsci_launch.train.survive.life", "RankLife.before_step"),
    "sent": ("bigsci_launch.train.parallel.reduction", "GradientBucket.send"),
    "optimizer": ("bigsci_launch.train.parallel.optimizer", "EagerAdamW.step"),
    "words": ("bigsci_launch.train.steps.word", "exchange_words"),
    "copy": ("bigsci_launch.train.survive.engine_state", "read_state"),
    "save": ("bigsci_launch.train.state.durable", "DurableCheckpointEngine.save"),
    "part": ("bigsci_launch.train.state.background", "RankPart.write"),
    "commit": ("bigsci_launch.train.state.checkpoint", "save_checkpoint"),
    "evaluation": ("bigsci_launch.train.samples.batches", "Batches.held_out"),
    "manifest": ("bigsci_launch.train.survive.snapshot", "Memory.manifest"),
    "meeting": ("bigsci_launch.recover.holding", "choose_version"),
    "joining": ("bigsci_launch.train.survive.life", "RankLife.joined"),
    "fetching": ("bigsci_launch.train.survive.restore", "fetch"),
    "finishing": ("bigsci_launch.train.microbatch.traffic", "Traffic.finish"),
    "restored": ("bigsci_launch.train.survive.engine_state", "write_state"),
    "loop-step": ("bigsci_launch.train.survivor", "Survivor._micro_batches"),
    "loop-update": ("bigsci_launch.train.survivor", "Survivor._begin_update"),
    "loop-commit": ("bigsci_launch.train.survivor", "Survivor._commit"),
    "loop-manifest": ("bigsci_launch.train.survive.snapshot", "Memory.manifest"),
    "loop-holding": ("bigsci_launch.train.survive.objects", "KeptObjects.holding"),
    "forward": ("bigsci_launch.train.uneven.stage", "UnevenStage.forward"),
    "backward": ("torch.distributed.pipelining.stage", "PipelineStage.backward_one_chunk"),
    "reduce": ("bigsci_launch.train.uneven.reduction", "_sum_together"),
    "apply": ("bigsci_launch.train.uneven.optimizer", "MasterAdamW.take"),
    "send": ("bigsci_launch.train.uneven.life", "_carry_out"),
    "agreed": ("torch.distributed.distributed_c10d", "all_reduce"),
}


def suffer_after(point: str, count: int, how: str) -> None:
    """Wrap the function of a point. It must not have been imported by name yet, unless it is a method."""
    module, path = POINTS[point]
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for each in outer:
        owner = getattr(owner, each)
    original, passed = getattr(owner, name), 0

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal passed
        result = original(*args, **kwargs)
        passed += 1
        if passed == count:
            suffer(how, *args)
        return result

    setattr(owner, name, run)
    if not outer:
        for known in list(sys.modules.values()):
            if getattr(known, name, None) is original:
                setattr(known, name, run)


def suffer(how: str, *args: Any) -> None:
    if how == "damage":
        for copy in args[0]._complete():
            next(copy.part_vectors())[1][0, :1] += 1
        return
    if how == "raise":
        raise RuntimeError("an exception of this rank's own")
    if how == "memory":
        import torch

        raise torch.OutOfMemoryError("another shortage, while one is handled")
    if how == "lose":
        import torch.distributed as dist

        raise dist.DistNetworkError("a peer is gone")
    if how in ("exit", "leave"):
        os._exit(7 if how == "exit" else 0)
    os.kill(os.getpid(), {"die": signal.SIGKILL, "stop": signal.SIGSTOP}[how])


def main() -> None:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[1])
    os.environ["BSL_SLOT_FD"] = str(connection.detach())
    if os.environ.get("NCCL_LIKE"):
        sys.path.insert(0, str(Path(__file__).parents[2] / "support" / "nccl_like"))
        importlib.import_module("nccl_like").use_in_trainer()
    if os.environ.get("TRACED"):
        from bigsci_launch.train.device import compiler

        compiler.BACKEND = "aot_eager"
    loop = os.environ.get("LOOP")
    if request := os.environ.get("SUFFER"):
        if loop is None:
            from bigsci_launch.train import startup

            startup.start_deepspeed()
        point, count, how = request.split(":")
        suffer_after(point, int(count), how)
    if loop is not None:
        sys.argv = [loop]
        runpy.run_path(loop, run_name="__main__")
        return
    sys.argv = ["bigsci_launch.train"]
    runpy.run_module("bigsci_launch.train", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

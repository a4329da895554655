"""Tears down the process groups of a generation, so that the next one can be formed in the same process.

What holds groups is the engine, the guards and the frames of the training loop. All of it hangs on the exception that
ended the generation, so it is gone once that is dropped. DeepSpeed's engine refers to itself in circles; a collection
frees them, and is cheap because `start_deepspeed` has frozen everything that was imported.
"""

from __future__ import annotations

import contextlib
import gc

import deepspeed.comm
import torch.distributed as dist
from deepspeed.runtime.pipe import p2p

from bigsci_launch.train.device.gpu import computes_on_gpu


def drop_frames(error: BaseException | None) -> None:
    """Let go of the frames that `error` and its causes hold, and so of the engine."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def tear_down() -> None:
    """Destroy all process groups, free the engine, and forget what DeepSpeed remembers of both."""
    if dist.is_initialized():
        # Peers are gone, so a backend may complain; the groups are forgotten all the same.
        with contextlib.suppress(RuntimeError):
            (deepspeed.comm if deepspeed.comm.is_initialized() else dist).destroy_process_group()
    p2p._groups = p2p._grid = None
    gc.collect()
    if computes_on_gpu():
        import torch

        torch.cuda.empty_cache()

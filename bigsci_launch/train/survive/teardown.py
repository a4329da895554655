"""Tears down the process groups of a generation, so that the next one can be formed in the same process.

Nothing of the engine may remain: it holds the groups, with their threads and sockets, and the device's memory. The
interpreter cannot free it, because its circles go through autograd's C++ objects, so it is taken apart: engine,
optimizer, layers and weights let go of all that they hold. A collection then frees the rest. It is cheap, because
`start_deepspeed` has frozen everything that was imported.
"""

from __future__ import annotations

import gc
from typing import Any

import deepspeed.comm
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import groups

from bigsci_launch.train.device.gpu import computes_on_gpu
from bigsci_launch.train.survive.forget import forget_groups


def tear_down(engine: PipelineEngine | None) -> None:
    """Destroy all process groups and the engine, and make DeepSpeed forget both."""
    if engine is not None:
        _take_apart(engine)
    _forget_groups()
    p2p._groups = p2p._grid = None
    gc.collect()
    if computes_on_gpu():
        torch.cuda.empty_cache()


def _forget_groups() -> None:
    is_gloo = not dist.is_initialized() or dist.get_backend() == "gloo"
    known: Any = deepspeed.comm if deepspeed.comm.is_initialized() else dist
    forget_groups(known.destroy_process_group)
    release = getattr(groups, "_release_process_group_references", None)
    if release is not None and not is_gloo:
        release(group=None)


def _take_apart(engine: PipelineEngine) -> None:
    engine.destroy()
    optimizer = engine.optimizer
    modules, parameters = list(engine.module.modules()), list(engine.module.parameters())
    for parameter in parameters:
        parameter.grad = None
    for holder in (*parameters, *modules, optimizer.optimizer, optimizer, engine):
        vars(holder).clear()

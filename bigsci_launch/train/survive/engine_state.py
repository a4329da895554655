"""The state of a rank's engine that a snapshot holds: read from it, and written back into a new engine.

Weights are not in it. They are the rounded masters, so a restored rank derives them as the optimizer does after a step.
Each stage has masters of its own for a tied weight; the guards compare the copies after a restore.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from bigsci_launch.recover.holding import Shard
from bigsci_launch.topology import Coordinate
from bigsci_launch.train.device.gpu import computes_on_gpu
from bigsci_launch.train.guards.engine.state import partitions
from bigsci_launch.train.parallel.optimizer import choose_kernel, loss_scale, set_learning_rate
from bigsci_launch.train.rank.rng import capture_generators, restore_generators
from bigsci_launch.train.survive.snapshot import Copy, HeldPart, Shape

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_MOMENTS = ("exp_avg", "exp_avg_sq")


def shape_of(engine: PipelineEngine, coordinate: Coordinate) -> Shape:
    """Return what the state of this rank consists of."""
    return Shape(str(coordinate), tuple(_parts(engine, coordinate)))


def unit_lengths(engine: PipelineEngine, coordinate: Coordinate) -> dict[str, int]:
    """Return the units that this rank holds a part of, with their lengths without padding."""
    optimizer = engine.optimizer
    groups = optimizer.bf16_groups if isinstance(optimizer, BF16_Optimizer) else optimizer.bit16_groups
    return {
        _unit(coordinate, part.name): sum(parameter.numel() for parameter in group)
        for part, group in zip(partitions(optimizer), groups, strict=True)
    }


def _unit(coordinate: Coordinate, group: str) -> str:
    return f"{group} of pp{coordinate.pp_rank} tp{coordinate.tp_rank}"


def _parts(engine: PipelineEngine, coordinate: Coordinate) -> list[HeldPart]:
    lengths = unit_lengths(engine, coordinate)
    found = []
    for part in partitions(engine.optimizer):
        unit, size = _unit(coordinate, part.name), part.master.numel()
        start = min(coordinate.dp_rank * size, lengths[unit])
        found.append(HeldPart(Shard(unit, start, min(start + size, lengths[unit])), size))
    return found


@torch.no_grad()
def read_state(engine: PipelineEngine, copy: Copy, progress: Mapping[str, int]) -> None:
    """Copy the state of the engine, and the generators of this process, into `copy`."""
    optimizer = engine.optimizer
    counts = []
    for part, (_, vectors) in zip(partitions(optimizer), copy.part_vectors(), strict=True):
        state = optimizer.optimizer.state.get(part.master, {})
        vectors[0].copy_(part.master, non_blocking=True)
        for vector, name in zip(vectors[1:], _MOMENTS, strict=True):
            if name in state:
                vector.copy_(state[name], non_blocking=True)
            else:
                vector.zero_()
        counts.append(float(state["step"]) if "step" in state else 0.0)
    scaler = vars(optimizer.loss_scaler) if loss_scale(optimizer) is not None else {}
    copy.write_document(
        {
            **progress,
            "counts": counts,
            "learning_rate": optimizer.param_groups[0]["lr"],
            "batch_size": engine.train_batch_size(),
            "counters": {name: int(getattr(engine, name)) for name in _COUNTERS},
            "scaler": {name: value for name, value in scaler.items() if isinstance(value, int | float)},
            "generators": {name: _plain(value) for name, value in capture_generators().items()},
        }
    )
    if computes_on_gpu():
        torch.cuda.current_stream().synchronize()


@torch.no_grad()
def write_state(engine: PipelineEngine, copy: Copy, document: Mapping[str, Any]) -> None:
    """Set the engine to the state in `copy`, with the counters of `document`; a collective call."""
    optimizer = engine.optimizer
    for part, (_, vectors), count in zip(partitions(optimizer), copy.part_vectors(), document["counts"], strict=True):
        part.master.copy_(vectors[0])
        if count:
            state = optimizer.optimizer.state[part.master]
            state["step"] = torch.tensor(count)
            state.update({name: vector.to(part.master.device, copy=True) for name, vector in _moments(vectors)})
    set_learning_rate(optimizer.param_groups, document["learning_rate"])
    engine.set_train_batch_size(document["batch_size"])
    choose_kernel(optimizer.optimizer, fused=computes_on_gpu())
    optimizer.update_lp_params()
    for name, value in document["counters"].items():
        setattr(engine, name, value)
    for name, value in document["scaler"].items():
        setattr(optimizer.loss_scaler, name, value)


def _moments(vectors: Tensor) -> list[tuple[str, Tensor]]:
    return list(zip(_MOMENTS, vectors[1:], strict=True))


def write_generators(document: Mapping[str, Any]) -> None:
    """Set the generators of this process to the states in `document`."""
    states = document["generators"]
    tensors = {name: torch.tensor(states[name], dtype=torch.uint8) for name in ("torch", "cuda") if name in states}
    restore_generators({**states, **tensors})


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value

"""What a foreign loop trains: its parameters by name, where each is a copy, and the optimizer below its wrappers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bigsci_launch.train.attach.places import Places

Sharded = Callable[[str, nn.Parameter], Collection[str]]
"""Returns the axes along which a parameter is cut into shards."""

_WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


@dataclass(frozen=True, slots=True)
class Watched:
    """A value that ranks exchange. `copies` are the ranks that must have the same, each with the axis that says so.

    `kind` is weight, gradient, moment, setting or tied. A setting is a number, and everything else a digest.
    """

    name: str
    kind: str
    copies: tuple[tuple[str, tuple[int, ...]], ...]


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return each parameter once, under the name that it has in the model without wrappers."""
    return {plain_name(name): parameter for name, parameter in model.named_parameters()}


def plain_name(name: str) -> str:
    """`layers.0.weight` for `module._orig_mod.layers.0.weight`."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "") if wrapper.startswith("_") else name
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def by_marks(name: str, parameter: nn.Parameter) -> Collection[str]:
    """The axes that Megatron's and DeepSpeed's marks on a parameter say: tensor-parallel shards, and experts."""
    is_cut = getattr(parameter, "tensor_model_parallel", False) or getattr(parameter, "model_parallel", False)
    is_expert = getattr(parameter, "allreduce", True) is False
    return [*(["tp"] if is_cut else []), *(["ep", "dp"] if is_expert else [])]


def copies_of(
    name: str, parameter: nn.Parameter, places: Places, sharded: Sharded
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the ranks that hold the same elements as this one, by axis; groups of one are left out.

    A DTensor says so itself for the ranks of its mesh. Stages of a pipeline hold different layers under the same names.
    """
    found, on_mesh = _copies_on_mesh(parameter)
    cut = set(sharded(name, parameter)) | {"pp"}
    found += [(axis, ranks) for axis, ranks in places.mine.items() if axis not in cut and not on_mesh >= set(ranks)]
    return tuple((axis, ranks) for axis, ranks in found if len(ranks) > 1)


def _copies_on_mesh(parameter: Tensor) -> tuple[list[tuple[str, tuple[int, ...]]], set[int]]:
    if not isinstance(parameter, DTensor):
        return [], set()
    mesh, names = parameter.device_mesh, parameter.device_mesh.mesh_dim_names
    found = [
        (names[axis] if names else "dp", tuple(dist.get_process_group_ranks(mesh.get_group(axis))))
        for axis, placement in enumerate(parameter.placements)
        if placement.is_replicate()
    ]
    return found, set(mesh.mesh.flatten().tolist())


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.detach()


def innermost(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer that has the moments, below the wrappers of accelerate, DeepSpeed and others."""
    while (inner := getattr(optimizer, "optimizer", None)) is not None:
        optimizer = inner
    found: torch.optim.Optimizer = optimizer
    return found


def name_states(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Iterator[tuple[str, Tensor]]:
    """Yield what the optimizer steps, by name: a parameter of the model, or a flat shard of several of them.

    `names` are the names of the model's parameters by `id`.
    """
    for number, group in enumerate(optimizer.param_groups):
        for part, tensor in enumerate(group["params"]):
            yield names.get(id(tensor), f"shard {part} of optimizer group {number}"), tensor


def moments_of(optimizer: torch.optim.Optimizer, tensor: Tensor) -> dict[str, Tensor]:
    """Return this rank's part of what the optimizer keeps of `tensor`, apart from scalars; empty before a step."""
    state = optimizer.state.get(tensor, {})
    return {key: local(value) for key, value in state.items() if isinstance(value, Tensor) and value.dim() > 0}

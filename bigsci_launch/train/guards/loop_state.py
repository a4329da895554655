"""What a foreign loop trains, as the guards look at it: which values ranks exchange, and what one rank sees alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bigsci_launch.adam_limits import moment_bound
from bigsci_launch.errors import BslError
from bigsci_launch.train.device.digest import digests_on_device
from bigsci_launch.train.guards.copies import CopyAxes, Violation, Watched
from bigsci_launch.train.guards.flat import Flat
from bigsci_launch.train.guards.moments import MomentLimits, find_wrong_state
from bigsci_launch.train.guards.places import Places
from bigsci_launch.train.guards.ratios import is_within
from bigsci_launch.train.rank.bits import as_bits

_MOMENTS = ("exp_avg", "exp_avg_sq")
_APART = ("pp", "ep")
"""Axes along which optimizer groups may be other ones."""
Sharded = Callable[[str, nn.Parameter], Collection[str]]
"""Returns the axes along which a parameter is cut into shards."""

_WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


class LoopState:
    """Model and optimizer of a loop on one rank.

    Raises:
        BslError: a pair in `tied` names a parameter that the model does not have.
    """

    def __init__(
        self, model: nn.Module, optimizer: Any, places: Places, tied: Sequence[tuple[str, str]], sharded: Sharded
    ) -> None:
        self.parameters = named_parameters(model)
        self._optimizer, self._places = innermost(optimizer), places
        self._tied = tied
        self._owners = {name: _owner(model, name) for pair in tied for name in pair}
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        self._states = list(name_states(self._optimizer, names))
        found = {name: copies_of(name, each, places, sharded) for name, each in self.parameters.items()}
        self._copies = {name: copies for name, copies in found.items() if copies}
        self._copied_states = [(name, tensor) for name, tensor in self._states if name in self._copies]

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next((local(each).device for each in self.parameters.values()), torch.device("cpu"))

    def watched(self) -> list[Watched]:
        """Return what `values` returns the values of, in the same order."""
        axes = [(axis, ranks) for axis, ranks in self._places.mine.items() if axis not in _APART and len(ranks) > 1]
        weights = [Watched(name, copies) for name, copies in self._copies.items()]
        gradients = [Watched(name, copies, "reduced gradients") for name, copies in self._copies.items()]
        copied = self._copied_moments()
        moments = [Watched(key, self._copies[name], "optimizer state copies") for name, _, key in copied]
        names = settings_of(self._optimizer)
        settings = [Watched(name, tuple(axes), "optimizer settings", is_number=True) for name in names]
        return [*weights, *gradients, *moments, *settings]

    def gradient_digests(self, gradients: Mapping[str, Tensor]) -> list[int]:
        """Return the digests of the reduced gradients of copied parameters, 0 where there is none."""
        return _digests({name: gradients.get(name) for name in self._copies})

    def values(self, gradient_digests: Sequence[int]) -> list[int]:
        """Return digests of copies, and settings as the bits of a float; no digest of a gradient means all 0."""
        weights = {name: local(self.parameters[name]) for name in self._copies}
        moments = {
            key: moments_of(self._optimizer, tensor).get(key.rpartition(" ")[2])
            for _, tensor, key in self._copied_moments()
        }
        gradients = gradient_digests or [0] * len(self._copies)
        settings = [as_bits(value) for value in settings_of(self._optimizer).values()]
        return [*_digests(weights), *gradients, *_digests(moments), *settings]

    def _copied_moments(self) -> list[tuple[str, Tensor, str]]:
        return [(name, tensor, f"{name}: {key}") for name, tensor in self._copied_states for key in _MOMENTS]

    def find_wrong(self) -> list[Violation]:
        """Find what this rank can see alone: what is not finite, absurd, impossible for AdamW, or not tied."""
        rank = self._places.rank
        weights = {name: local(parameter) for name, parameter in self.parameters.items()}
        floats = [({"": Flat.whole(*each)}, MomentLimits()) for each in weights.items() if each[1].is_floating_point()]
        found = [*find_wrong_state([*floats, *kept_states(self._optimizer, self._states)], rank)]
        for one, other in self._tied:
            left, right = (getattr(*place) for place in (self._owners[one], self._owners[other]))
            if left is not right and not _is_equal(local(left), local(right)):
                found.append(Violation("tied copies", other, (rank,), f"differs from {one}, to which it is tied"))
        return found

    def find_wrong_lr(self, lr: float, step: int) -> list[Violation]:
        """Find optimizer groups that have another learning rate than `lr`."""
        found = []
        for number, group in enumerate(self._optimizer.param_groups):
            if not is_within(abs(float(group["lr"]) - lr), 1e-6 * abs(lr)):
                text = f"is {float(group['lr']):g}; the schedule gives {lr:g} for step {step}"
                name = f"lr of optimizer group {number}"
                found.append(Violation("optimizer settings", name, (self._places.rank,), text))
        return found

    def state_flats(self) -> dict[str, Flat]:
        """Return the same as `tensors`, apart from empty ones, as the fingerprint takes it."""
        return {name: Flat.whole(name, tensor) for name, tensor in self.tensors().items() if tensor.numel()}

    def tensors(self) -> dict[str, Tensor]:
        """Return weights, moments and masters of this rank: only a step or a load may change them."""
        found = {name: local(parameter) for name, parameter in self.parameters.items()}
        for name, tensor in self._states:
            found.update({f"{name}: {key}": part for key, part in moments_of(self._optimizer, tensor).items()})
            if name not in self.parameters:
                found[name] = local(tensor)
        return found

    def step_count(self) -> float:
        """Return how many steps the optimizer has taken, 0 if it does not count them."""
        for _, tensor in self._states:
            if "step" in (state := self._optimizer.state.get(tensor, {})):
                return float(state["step"])
        return 0.0

    def document(self) -> dict[str, str]:
        """Return digests of everything that a checkpoint restores on this rank, by name."""
        parts = self.tensors()
        found = {name: f"{value & (2**64 - 1):016x}" for name, value in zip(parts, _digests(parts), strict=True)}
        return {**found, "step count": f"{self.step_count():g}"}


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal, or the same bits: NaN is not equal to itself."""
    return torch.equal(one, other) or (one.shape == other.shape and len({*digests_on_device([one, other])}) == 1)


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module of a parameter and its name there: another object may take its place."""
    for prefix, module in model.named_modules():
        for key, _ in module.named_parameters(recurse=False):
            if plain_name(f"{prefix}.{key}".removeprefix(".")) == name:
                return module, key
    raise BslError(f"tied: the model has no parameter {name!r}")


def _digests(tensors: Mapping[str, Tensor | None]) -> list[int]:
    """Return a digest for each tensor, 0 for what does not exist; waits for the device once."""
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    found = dict(zip(present, digests_on_device(list(present.values())), strict=True))
    return [found.get(name, 0) for name in tensors]


def kept_states(
    optimizer: torch.optim.Optimizer, states: Sequence[tuple[str, Tensor]]
) -> Iterator[tuple[dict[str, Flat], MomentLimits]]:
    """Yield what the optimizer keeps of each of its tensors, with the limits that AdamW's betas set."""
    limits = {
        id(tensor): MomentLimits(moment_bound((float(group["betas"][0]), float(group["betas"][1]))))
        for group in optimizer.param_groups
        if len(group.get("betas") or ()) == 2  # others have other recurrences
        for tensor in group["params"]
    }
    for name, tensor in states:
        kept = {key: each for key, each in moments_of(optimizer, tensor).items() if each.is_floating_point()}
        flats = {key: Flat.whole(name, each, f"{{}}: {key}") for key, each in kept.items()}
        yield flats, limits.get(id(tensor), MomentLimits())


def settings_of(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return the numbers that every rank must have alike: settings and the step count of each group."""
    found: dict[str, float] = {}
    for number, group in enumerate(optimizer.param_groups):
        place = f"of optimizer group {number}"
        found[f"step count {place}"] = steps_of_group(optimizer, group)
        for key in ("lr", "eps", "weight_decay"):
            found[f"{key} {place}"] = float(group.get(key) or 0.0)
        for index, beta in enumerate(group.get("betas") or (0.0, 0.0)):
            found[f"beta{index + 1} {place}"] = float(beta)
    return found


def steps_of_group(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> float:
    """Return the highest step count in a group; 0 before the first step. Unused parameters are behind."""
    counts = [
        float(optimizer.state[each]["step"]) for each in group["params"] if "step" in optimizer.state.get(each, {})
    ]
    return max(counts, default=0.0)


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


def copies_of(name: str, parameter: nn.Parameter, places: Places, sharded: Sharded) -> CopyAxes:
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

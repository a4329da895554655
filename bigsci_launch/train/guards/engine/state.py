"""The state of a rank: digests of its weights, fp32 masters and optimizer state, and checks of them.

DeepSpeed keeps weights in flat groups, and a rank owns one data-parallel partition of each. In a partition the masters,
the moments and the gradients of a step are in the same order. `OptimizerPartition` describes one for both optimizers in
use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn

from bigsci_launch.config.schema.run import OptimizerSection
from bigsci_launch.topology import Coordinate
from bigsci_launch.train.device.digest import bytes_of
from bigsci_launch.train.guards.copies import TIED, Violation, Watched
from bigsci_launch.train.guards.findings import find_load_differences
from bigsci_launch.train.guards.flat import Flat
from bigsci_launch.train.guards.moments import FIRST, SECOND
from bigsci_launch.train.guards.places import Places
from bigsci_launch.train.parallel.optimizer import group_by_shape, loss_scale
from bigsci_launch.train.rank.rng import capture_generators, split_states
from bigsci_launch.weights.formats.digests import digest_bytes, digest_document, digest_entry

_INTEGERS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class OptimizerPartition:
    """This rank's part of one optimizer group. `slices` gives each parameter's (start, length) in it."""

    name: str
    weights: Tensor
    master: Tensor
    slices: Mapping[str, tuple[int, int]]


def flats_of(part: OptimizerPartition, state: Mapping[str, Any]) -> dict[str, Flat]:
    """Return the tensors of a partition, and what AdamW keeps of it: moments exist from the first step on."""
    kept = {
        "master": ("fp32 master of {}", part.master),
        "weight": ("weight of {}", part.weights),
        FIRST: ("first moment of {}", state.get(FIRST)),
        SECOND: ("second moment of {}", state.get(SECOND)),
    }
    found = {key: (title, tensor) for key, (title, tensor) in kept.items() if tensor is not None}
    return {key: Flat(title, tensor.detach(), part.slices) for key, (title, tensor) in found.items()}


def partitions(optimizer: Any) -> list[OptimizerPartition]:
    """Return the partitions of this rank, one per optimizer group."""
    is_bf16 = isinstance(optimizer, BF16_Optimizer)
    flats = optimizer.bf16_partitioned_groups if is_bf16 else optimizer.parallel_partitioned_bit16_groups
    masters = optimizer.fp32_groups_flat_partition if is_bf16 else optimizer.single_partition_of_fp32_groups
    found = []
    for number, (parts, master) in enumerate(zip(flats, masters, strict=True)):
        mine = parts[dist.get_rank(group=optimizer.real_dp_process_group[number])]
        slices = {name: (at.start, at.numel) for name, at in optimizer._param_slice_mappings[number].items()}
        name = optimizer.param_groups[number].get("name", f"group {number}")
        found.append(OptimizerPartition(name, mine, master, slices))
    return found


def gradient_parts(optimizer: Any, number: int) -> Tensor:
    """Return the reduced, unclipped gradients of this rank's partition of a group, in the order of its masters."""
    if isinstance(optimizer, BF16_Optimizer):
        part: Tensor = optimizer.fp32_groups_gradient_flat_partition[number]
        return part
    flat: Tensor | None = optimizer._get_preflattened_grad_partition(number)
    if flat is not None:
        return flat
    pieces = [each.reshape(-1) for each in optimizer.averaged_gradients[number]]
    return torch.cat(pieces) if pieces else optimizer.single_partition_of_fp32_groups[number][:0]


def watched_weights(module: nn.Module, places: Places) -> list[Watched]:
    """Return every parameter, with the axes along which it is a copy."""
    return [Watched(name, places.copies(*_axes(name, each))) for name, each in module.named_parameters()]


def _axes(name: str, parameter: nn.Parameter) -> list[str]:
    is_shard = getattr(parameter, "model_parallel", False)
    return ["dp", *([] if is_shard else ["tp"]), *(["pp"] if name.startswith(TIED) else [])]


def find_masters_apart(parts: Sequence[OptimizerPartition], rank: int) -> Iterator[Violation]:
    """Find weights that differ from their rounded fp32 masters."""
    everywhere = [_is_apart(part) for part in parts]
    flags = torch.stack([each.any() for each in everywhere]).tolist() if everywhere else ()
    for part, apart, is_wrong in zip(parts, everywhere, flags, strict=True):
        if not is_wrong:
            continue
        for name, (start, size) in part.slices.items():
            count = int(apart[start : start + size].sum())
            if count:
                text = f"{count} of {size} elements differ from the rounded fp32 masters"
                yield Violation("masters", name, (rank,), text)


def _is_apart(part: OptimizerPartition) -> Tensor:
    bits = _INTEGERS[part.weights.element_size()]
    return part.weights.view(bits) != part.master.detach().to(part.weights.dtype).view(bits)


def find_wrong_groups(module: nn.Module, optimizer: Any, config: OptimizerSection, rank: int) -> Iterator[Violation]:
    """Find parameters that are in the wrong optimizer group or in none, or that have wrong settings."""
    groups = optimizer.bf16_groups if isinstance(optimizer, BF16_Optimizer) else optimizer.bit16_groups
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    seen = set()
    for settings, group in zip(optimizer.param_groups, groups, strict=True):
        for parameter in group:
            seen.add(id(parameter))
            name = names[id(parameter)]
            asked = config.weight_decay if group_by_shape(name, parameter) == "decay" else 0.0
            if settings["weight_decay"] != asked:
                text = f"is in group {settings['name']}, weight decay {settings['weight_decay']:g}, not {asked:g}"
                yield Violation("optimizer groups", name, (rank,), text)
            elif (tuple(settings["betas"]), settings["eps"]) != (tuple(config.betas), config.epsilon):
                text = f"betas {settings['betas']} and epsilon {settings['eps']} differ from the run file"
                yield Violation("optimizer groups", name, (rank,), text)
    for key, name in names.items():
        if key not in seen:
            yield Violation("optimizer groups", name, (rank,), "is in no optimizer group, so nothing trains it")


@dataclass(frozen=True, slots=True)
class HeldState:
    """What a checkpoint restores on this rank: weights by name; masters, moments, steps and loss scale; random states.

    Its tensors are those of the engine, or copies of them.
    """

    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]
    random: Mapping[str, Any]

    def document(self, *, rank: int, coordinate: Coordinate, step: int) -> dict[str, Any]:
        """Return digests of it all. `bsl diff-weights` reads the digests of the weights."""
        entries = {name: tensor_entry(weight) for name, weight in self.weights.items()}
        optimizer = {name: _digest_of(value) for name, value in self.optimizer.items()}
        header = digest_document(entries, rank=rank, coordinate=coordinate, step=step)
        return {**header, "optimizer": optimizer, **_random_entries(self.random)}


def held_state(engine: PipelineEngine) -> HeldState:
    """Return the state of this rank."""
    return HeldState(
        dict(engine.module.named_parameters()), dict(_optimizer_entries(engine.optimizer)), capture_generators()
    )


def state_document(engine: PipelineEngine, *, rank: int, coordinate: Coordinate, step: int) -> dict[str, Any]:
    """Return digests of everything a checkpoint restores on this rank."""
    return held_state(engine).document(rank=rank, coordinate=coordinate, step=step)


def _random_entries(states: Mapping[str, Any]) -> dict[str, str]:
    """Digests of the random states: those of the host, and that of the GPU if there is one."""
    host, device = split_states(states)
    entries = {"random": digest_bytes(repr(_plain(host)).encode())}
    if device is not None:
        entries["random_device"] = digest_bytes(bytes_of(device))
    return entries


def tensor_entry(tensor: Tensor) -> list[Any]:
    """Return what a state document holds of one tensor."""
    return digest_entry(_DTYPES[tensor.dtype], tensor.shape, bytes_of(tensor))


_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def _optimizer_entries(optimizer: Any) -> Iterator[tuple[str, Any]]:
    for part in partitions(optimizer):
        state = optimizer.optimizer.state[part.master]
        yield f"{part.name}.master", part.master
        for key in ("exp_avg", "exp_avg_sq"):
            if key in state:
                yield f"{part.name}.{key}", state[key]
        yield f"{part.name}.step", int(state.get("step", 0))
    if (scale := loss_scale(optimizer)) is not None:
        yield "loss_scale", scale


def _digest_of(value: Any) -> Any:
    return digest_bytes(bytes_of(value)) if isinstance(value, Tensor) else value


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.tolist() if isinstance(value, Tensor) else value for key, value in state.items()}


def find_wrong_load(saved: Mapping[str, Any], loaded: Mapping[str, Any], rank: int) -> Iterator[Violation]:
    """Find what a load did not restore as it was saved; `saved` and `loaded` are state documents of one rank."""
    before, now = dict(_restored(saved)), dict(_restored(loaded))
    # A checkpoint may say less. One of the other kind of device has no random states of this one: the load says so.
    now = {name: value for name, value in now.items() if name in before or name in loaded["tensors"]}
    before = {name: value for name, value in before.items() if name != _ON_GPU or name in now}
    return find_load_differences(before, now, rank)


_ON_GPU = "random states of the GPU"


def _restored(document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what a state document says, by the names of findings."""
    others = {"step": "step of the checkpoint", "random": "random states", "random_device": _ON_GPU}
    yield from ((name, document[key]) for key, name in others.items() if document.get(key) is not None)
    yield from document["tensors"].items()
    yield from ((f"optimizer state {name}", value) for name, value in document["optimizer"].items())

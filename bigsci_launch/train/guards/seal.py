"""Seals the optimizer's state between two steps: what AdamW left is what it must find.

A partition of ZeRO has no copy that it could be compared with. So a rank remembers elements of its masters, moments
and weights at the end of a step, and compares them bit by bit just before AdamW next changes them. A seal that is
`whole` is a digest of every tensor. Otherwise it holds up to `SAMPLED` elements of each, others after some steps. A
tensor that is zeroed, scaled or exchanged is therefore seen always, a single bit if it is among those elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bigsci_launch.train.guards.copies import Violation
from bigsci_launch.train.guards.state import OptimizerPartition, digest64, weight_digests

CHECK = "memory"
SAMPLED = 256
SAME_FOR = 8
"""Steps for which the same elements are looked at, because choosing them costs more than looking."""

_STRIDE = 7919
_WORDS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class SealedTensor:
    """One tensor of a partition as it was: its sampled bits, or the digest of each parameter's piece."""

    bits: Tensor | None
    digests: Mapping[str, int] | None


class Seal:
    """The seal of one rank."""

    def __init__(self, parts: Sequence[OptimizerPartition], states: Sequence[Mapping[str, Any]], rank: int) -> None:
        self._parts, self._states, self._rank = parts, states, rank
        self._sealed: list[dict[str, SealedTensor]] = []
        self._counts: list[float | None] = []
        self._samples: list[Tensor] = []
        self._samples_of = -1
        self._step = 0

    @torch.no_grad()
    def take(self, step: int, *, is_whole: bool) -> None:
        """Remember the state after `step`."""
        self._step = step
        if step // SAME_FOR != self._samples_of:
            self._samples_of = step // SAME_FOR
            self._samples = [sample_of(part, step) for part in self._parts]
        self._sealed = [
            {label: _seal(part, tensor, at, is_whole) for label, tensor in sealed_tensors(part, state).items()}
            for part, state, at in zip(self._parts, self._states, self._samples, strict=True)
        ]
        self._counts = [_count(state) for state in self._states]

    @torch.no_grad()
    def find_broken(self) -> Iterator[Violation]:
        """Find what differs from the state remembered: one violation for each kind of tensor and optimizer group."""
        for number, sealed in enumerate(self._sealed):
            part, state = self._parts[number], self._states[number]
            now = sealed_tensors(part, state)
            for label, before in sealed.items():
                if label not in now:
                    yield self._violation(label, [*part.slices][:1] or [f"group {part.name}"], "is gone")
                elif names := _changed(part, now[label], before, self._samples[number]):
                    yield self._violation(label, names, _words(part, now[label], before, self._samples[number], names))
            if self._counts[number] != (count := _count(state)):
                text = f"was {_shown(self._counts[number])} after step {self._step}, and is {count} before the next"
                yield Violation(CHECK, f"step count of group {part.name}", (self._rank,), text)

    def _violation(self, label: str, names: Sequence[str], what: str) -> Violation:
        more = f" (and of {len(names) - 1} more tensors)" if len(names) > 1 else ""
        text = f"changed after the end of step {self._step}, when nothing may change it: {what}{more}"
        return Violation(CHECK, f"{label} of {names[0]}", (self._rank,), text)


class WeightSeal:
    """The seal of all weights that a rank computes with.

    It also covers those whose masters other data-parallel ranks hold: a wrong one spoils a step, and then the
    all-gather of new weights hides it.
    """

    def __init__(self, module: nn.Module, rank: int) -> None:
        self._module, self._rank = module, rank
        self._step, self._digests = 0, list[int]()

    def take(self, step: int, *, is_whole: bool) -> None:
        """Remember the weights after `step`, or nothing unless `is_whole`."""
        self._step, self._digests = step, weight_digests(self._module) if is_whole else []

    def find_broken(self) -> Iterator[Violation]:
        """Find weights that have changed since they were sealed."""
        if not self._digests:
            return
        names = [name for name, _ in self._module.named_parameters()]
        for name, before, now in zip(names, self._digests, weight_digests(self._module), strict=True):
            if before != now:
                text = f"changed after the end of step {self._step}, when nothing may change it: its digest differs"
                yield Violation(CHECK, f"weight {name}", (self._rank,), text)


def sealed_tensors(part: OptimizerPartition, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return what a seal covers of a partition; moments exist from the first step on."""
    found = {"fp32 master": part.master.detach(), "weight": part.weights.detach()}
    moments = {"first moment": state.get("exp_avg"), "second moment": state.get("exp_avg_sq")}
    return {**found, **{label: tensor for label, tensor in moments.items() if tensor is not None}}


def sample_of(part: OptimizerPartition, step: int, count: int = SAMPLED) -> Tensor:
    """Return the positions of up to `count` elements of each parameter in a partition, others after another step."""
    device = part.master.device
    bounds = torch.tensor([*part.slices.values()], dtype=torch.int64, device=device).reshape(-1, 2)
    starts, sizes = bounds[:, :1], bounds[:, 1:]
    places = torch.arange(count, device=device) * sizes.clamp(min=count) // count
    kept = places < sizes
    return (starts + (places + step * _STRIDE) % sizes.clamp(min=1))[kept]


def _count(state: Mapping[str, Any]) -> float | None:
    """Return AdamW's step count, if it can be read without waiting for a device."""
    step = state.get("step")
    return None if step is None or (isinstance(step, Tensor) and step.device.type != "cpu") else float(step)


def _shown(count: float | None) -> str:
    return "not there" if count is None else f"{count:g}"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_WORDS[tensor.element_size()])


def _seal(part: OptimizerPartition, tensor: Tensor, at: Tensor, is_whole: bool) -> SealedTensor:
    if not is_whole:
        return SealedTensor(_bits(tensor).index_select(0, at), None)
    return SealedTensor(None, _digests(part, tensor))


def _digests(part: OptimizerPartition, tensor: Tensor) -> dict[str, int]:
    return {name: digest64(tensor[start : start + size]) for name, (start, size) in part.slices.items()}


def _changed(part: OptimizerPartition, tensor: Tensor, before: SealedTensor, at: Tensor) -> list[str]:
    """Return the names of the parameters whose elements differ."""
    if before.digests is not None:
        digests = _digests(part, tensor)
        return [name for name, digest in before.digests.items() if digests[name] != digest]
    assert before.bits is not None
    now = _bits(tensor).index_select(0, at)
    if torch.equal(now, before.bits):
        return []
    places = at[now != before.bits]
    return [
        name for name, (start, size) in part.slices.items() if bool(((places >= start) & (places < start + size)).any())
    ]


def _words(part: OptimizerPartition, tensor: Tensor, before: SealedTensor, at: Tensor, names: Sequence[str]) -> str:
    """Return what became of the elements of the first of `names`."""
    start, size = part.slices[names[0]]
    piece = tensor[start : start + size]
    if not bool(piece.any()):
        return "it is zero"
    if before.bits is None:
        return "its digest differs"
    is_here = (at >= start) & (at < start + size)
    old = before.bits[is_here].view(tensor.dtype).double()
    new = tensor[at[is_here]].double()
    count = int((old != new).sum())
    moved = (new / old)[(old != 0) & (old != new)]
    factor = f", each {float(moved[0]):.4g} times what it was" if _is_one_factor(moved) else ""
    return f"{count} of {len(old)} elements looked at differ{factor}"


def _is_one_factor(moved: Tensor) -> bool:
    return len(moved) > 1 and bool(torch.allclose(moved, moved[0], rtol=1e-4)) and float(moved[0]) != 1

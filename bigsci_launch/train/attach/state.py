"""What a foreign loop trains, as the guards look at it: which values ranks exchange, and what one rank sees alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bigsci_launch.errors import BslError
from bigsci_launch.train.attach.equal import as_bits
from bigsci_launch.train.attach.moments import find_absurd, find_wrong_moments, settings_of
from bigsci_launch.train.attach.places import Places
from bigsci_launch.train.attach.watched import (
    Sharded,
    Watched,
    copies_of,
    innermost,
    local,
    moments_of,
    name_states,
    named_parameters,
    plain_name,
)
from bigsci_launch.train.device.digest import digests_on_device
from bigsci_launch.train.guards.copies import Violation
from bigsci_launch.train.guards.flow.ratios import is_within

_MOMENTS = ("exp_avg", "exp_avg_sq")
_APART = ("pp", "ep")
"""Axes along which optimizer groups may be other ones."""


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
        weights = [Watched(name, "weight", copies) for name, copies in self._copies.items()]
        gradients = [Watched(name, "gradient", copies) for name, copies in self._copies.items()]
        moments = [Watched(key, "moment", self._copies[name]) for name, _, key in self._copied_moments()]
        settings = [Watched(name, "setting", tuple(axes)) for name in settings_of(self._optimizer)]
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
        found = [*find_absurd(weights, rank), *find_wrong_moments(self._optimizer, self._states, rank)]
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

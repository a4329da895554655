"""Parts of flat tensors that no rank has whole, as with ZeRO."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class FlatPart:
    """The elements of a flat tensor that this rank has: from `start` on, of `whole` ones. In a longer tensor of this
    rank, they are at `offset`."""

    data: Tensor
    start: int
    whole: int
    offset: int = 0

    @classmethod
    def in_tensor(cls, tensor: Tensor, offset: int, size: int, whole: int, rank: int) -> FlatPart:
        """Return part `rank` of those of `size` elements; the last ones are shorter, and padded in `tensor`."""
        start = min(rank * size, whole)
        return cls(tensor[offset : offset + min(size, whole - start)], start, whole, offset)

    def of(self, tensor: Tensor) -> FlatPart:
        """Return the same part of a tensor like that in which this one is."""
        return FlatPart(tensor[self.offset : self.offset + len(self.data)], self.start, self.whole, self.offset)


class PartedObject(ABC):
    """An engine whose state has `FlatPart`s."""

    engine: Any

    @property
    @abstractmethod
    def optimizer(self) -> torch.optim.Optimizer:
        """What changes the state."""

    @property
    @abstractmethod
    def local(self) -> list[str]:
        """The names in the state of what may differ between ranks that have it."""

    @abstractmethod
    def places(self, form: Any) -> list[tuple[FlatPart, Any]]:
        """Return this rank's part of each unit, with the branch of a state's form that is cut in the same way."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state as a tree."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the state."""

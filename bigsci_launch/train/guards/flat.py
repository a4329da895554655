"""Flat tensors and the parameters that they hold: a whole tensor of a loop, or a partition of several parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Flat:
    """A tensor of one dimension. `slices` are the (start, length) of the parameters in it, by name."""

    title: str
    """How the piece of a parameter is called: `first moment of {}`."""
    tensor: Tensor
    slices: Mapping[str, tuple[int, int]]

    @classmethod
    def whole(cls, name: str, tensor: Tensor, title: str = "{}") -> Flat:
        """A tensor that one parameter has alone."""
        return cls(title, tensor.detach().reshape(-1), {name: (0, tensor.numel())})

    def pieces(self) -> dict[str, Tensor]:
        """The elements of each parameter."""
        return {name: self.tensor[start : start + size] for name, (start, size) in self.slices.items()}

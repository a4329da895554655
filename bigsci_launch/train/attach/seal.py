"""Notices that optimizer state changes between two steps, when nothing may touch it.

After a step, a few elements of some tensors are kept, and compared before the next step. Which ones changes with every
step, so that a change of a single element may be missed, and one of a whole tensor is found within a few steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from bigsci_launch.train.guards.copies import Violation

TENSORS, ELEMENTS = 32, 64
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class StateSeal:
    """Elements of the tensors that were sealed last; empty if nothing is."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._kept: Tensor | None = None
        self._turn = 0

    def break_open(self) -> None:
        """Forget what was sealed: something is about to change the state rightly, such as a load."""
        self._names, self._kept = [], None

    def close(self, tensors: Mapping[str, Tensor]) -> None:
        """Seal some of `tensors`, other ones than the time before."""
        self._turn += 1
        names = [name for name, tensor in tensors.items() if tensor.numel()]
        first = self._turn * TENSORS % max(1, len(names))
        self._names = [*names[first:], *names[:first]][:TENSORS]
        self._kept = self._take(tensors)

    def find_changed(self, tensors: Mapping[str, Tensor], rank: int) -> Iterator[Violation]:
        """Find tensors that are not as they were when they were sealed."""
        if self._kept is None:
            return
        if any(name not in tensors for name in self._names):
            yield Violation("changed between steps", "optimizer state", (rank,), "a part of it is gone")
            return
        taken = self._take(tensors)
        if taken is None or torch.equal(taken, self._kept):
            return
        rows = (taken != self._kept).any(dim=1).tolist()
        for name, is_changed in zip(self._names, rows, strict=True):
            if is_changed:
                text = "is not as the last step left it, and no step has been taken since"
                yield Violation("changed between steps", name, (rank,), text)

    @torch.no_grad()
    def _take(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        rows = [self._sample(tensors[name]) for name in self._names]
        return torch.stack(rows) if rows else None

    def _sample(self, tensor: Tensor) -> Tensor:
        flat = tensor.detach().reshape(-1)
        stride = max(1, flat.numel() // ELEMENTS)
        part = flat[self._turn % stride :: stride][:ELEMENTS]
        bits = part.contiguous().view(_BITS[part.element_size()]).to(torch.int64)
        return torch.nn.functional.pad(bits, (0, ELEMENTS - bits.numel()))

"""Notices that weights, masters or moments change between two steps, when nothing may touch them.

After a step, a few elements of some tensors are kept, and compared before the next step. Which ones changes with every
step, so that a change of a single element may be missed, and one of a whole tensor is found within a few steps. After a
checked step, everything is kept as digests, and nothing is missed until the next step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from bigsci_launch.train.device.digest import digests_on_device
from bigsci_launch.train.guards.copies import Violation

TENSORS, ELEMENTS = 32, 64
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class StateSeal:
    """What is known of the tensors that were sealed last; nothing is if none are."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._kept: Tensor | None = None
        self._digests: dict[str, int] = {}
        self._turn = 0

    def break_open(self) -> None:
        """Forget what was sealed: something is about to change the state rightly, such as a load."""
        self._names, self._kept, self._digests = [], None, {}

    def close(self, tensors: Mapping[str, Tensor], *, is_whole: bool) -> None:
        """Seal `tensors` if `is_whole`, otherwise a sample of some of them, another one each time."""
        self._turn += 1
        names = [name for name, tensor in tensors.items() if tensor.numel()]
        first = self._turn * TENSORS % max(1, len(names))
        self._names = [*names[first:], *names[:first]][:TENSORS]
        self._kept = self._take(tensors)
        self._digests = _digests(tensors) if is_whole else {}

    def find_changed(self, tensors: Mapping[str, Tensor], rank: int) -> Iterator[Violation]:
        """Find tensors that are not as they were when they were sealed."""
        for name in self._changed(tensors):
            text = "is not as the last step left it, and no step has been taken since"
            yield Violation("changed between steps", name, (rank,), text)

    def _changed(self, tensors: Mapping[str, Tensor]) -> list[str]:
        if self._kept is None:
            return []
        if gone := [name for name in self._names if name not in tensors]:
            return gone
        if self._digests:
            now = _digests(tensors)
            return [name for name, digest in self._digests.items() if now.get(name) != digest]
        taken = self._take(tensors)
        if taken is None or torch.equal(taken, self._kept):
            return []
        rows = (taken != self._kept).any(dim=1).tolist()
        return [name for name, is_changed in zip(self._names, rows, strict=True) if is_changed]

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


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return dict(zip(tensors, digests_on_device(list(tensors.values())), strict=True))

"""The one exchange between ranks of a step: a word of every rank, and in a checked step its digests behind it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from bigsci_launch.train.attach.equal import as_bits, as_number

SLOTS = 8
"""Digests of micro-batches in a word. Where a step has more, several share one."""
_LENGTH = 3 + SLOTS


@dataclass(frozen=True, slots=True)
class LoopWord:
    """What a rank says about its step.

    Attributes:
        loss: this rank's loss; NaN too if it is not known, which `has_loss` says.
        data: digests of the tokens of the step's micro-batches, `SLOTS` of them; 0 where there is none.
        num_findings: how many findings this rank has to tell.
    """

    loss: float
    has_loss: bool
    data: tuple[int, ...]
    num_findings: int


class Exchange:
    """The exchanges of a loop, which are collective calls over the world."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lent: list[weakref.ref[torch.Tensor]] = []

    def rows(self, word: LoopWord, digests: Sequence[int], width: int) -> tuple[list[LoopWord], NDArray[np.int64]]:
        """Return the word of every rank, and a table of (ranks, `width`) digests; one all-gather."""
        mine = torch.zeros(_LENGTH + width, dtype=torch.int64)
        mine[: _LENGTH + len(digests)] = torch.tensor([*_row(word), *digests], dtype=torch.int64)
        mine = mine.to(self._device)
        everywhere = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        self._lent = [weakref.ref(tensor) for tensor in (mine, *everywhere)]
        dist.all_gather(everywhere, mine)
        table: NDArray[np.int64] = torch.stack(everywhere).cpu().numpy()
        return [_word(row) for row in table[:, :_LENGTH].tolist()], table[:, _LENGTH:]

    def settle(self, patience_s: float = 1.0) -> None:
        """Wait until the process group has let go of the last exchange; not collective.

        A thread of gloo drops its tensors some time after the call has returned, and takes Python's lock for it. In an
        interpreter that is ending by then it aborts the process, and a loop that has finished looks crashed
        (PyTorch issue 190489).
        """
        until = time.monotonic() + patience_s
        while any(tensor() is not None for tensor in self._lent) and time.monotonic() < until:
            time.sleep(0.001)


def _row(word: LoopWord) -> list[int]:
    return [as_bits(word.loss), int(word.has_loss), word.num_findings, *word.data]


def _word(row: Sequence[int]) -> LoopWord:
    loss, has_loss, num_findings, *data = row
    return LoopWord(as_number(loss), bool(has_loss), tuple(data), num_findings)

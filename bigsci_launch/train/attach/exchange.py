"""The one exchange between ranks of a step: a word of every rank, and in a checked step its digests behind it."""

from __future__ import annotations

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


def exchange_rows(
    word: LoopWord, digests: Sequence[int], width: int, device: torch.device
) -> tuple[list[LoopWord], NDArray[np.int64]]:
    """Return the word of every rank, and a table of (ranks, `width`) digests; one all-gather over the world."""
    mine = torch.zeros(_LENGTH + width, dtype=torch.int64)
    mine[: _LENGTH + len(digests)] = torch.tensor([*_row(word), *digests], dtype=torch.int64)
    mine = mine.to(device)
    everywhere = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, mine)
    table: NDArray[np.int64] = torch.stack(everywhere).cpu().numpy()
    return [_word(row) for row in table[:, :_LENGTH].tolist()], table[:, _LENGTH:]


def _row(word: LoopWord) -> list[int]:
    return [as_bits(word.loss), int(word.has_loss), word.num_findings, *word.data]


def _word(row: Sequence[int]) -> LoopWord:
    loss, has_loss, num_findings, *data = row
    return LoopWord(as_number(loss), bool(has_loss), tuple(data), num_findings)

"""A DataLoader whose worker fails."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

from faults import note_truth
from torch.utils.data import DataLoader, Dataset


class Tokens(Dataset[int]):
    def __init__(self, how: str, at: int) -> None:
        self.how, self.at = how, at

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> int:
        if index == self.at:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "segfault":
                os.kill(os.getpid(), signal.SIGSEGV)
            raise ValueError(f"shard 7 has 12 tokens, and index {index} wants 4096")
        return index


def batches(how: str, at: int) -> Iterator[Any]:
    rank = int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)
    note_truth(rank, f"loader {how}")
    return iter(DataLoader(Tokens(how, at), batch_size=1, num_workers=1))

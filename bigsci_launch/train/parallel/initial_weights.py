"""Initial weights that do not depend on the topology.

A matrix is drawn in fp32 in blocks of whole rows. Each block has its own generator, seeded from the run's seed, the
layer's name and the block's number. A rank draws only the blocks it needs and keeps its part of them. So tp, pp and dp
change nothing, and no rank ever holds a whole matrix. They are drawn on the host, because the generator of a GPU gives
other numbers, in all of its cores: one core takes 7 s for 1.3 billion.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from bigsci_launch.train.rank.rng import derive_seed

BLOCK_ROWS = 256
MOST_THREADS = 16


@dataclass(frozen=True, slots=True)
class Draw:
    """Draws the initial weights of the module called `name`."""

    seed: int
    name: str

    def inside(self, name: str) -> Draw:
        """Return the `Draw` of a submodule."""
        return Draw(self.seed, f"{self.name}.{name}")

    def normal(
        self,
        name: str,
        shape: tuple[int, int],
        std: float,
        *,
        rows: slice | None = None,
        columns: slice | None = None,
        num_drawn_rows: int | None = None,
    ) -> Tensor:
        """Return `matrix[rows, columns]` of a normal fp32 matrix of `shape`; rows from `num_drawn_rows` on are zero."""
        rows, columns = rows or slice(0, shape[0]), columns or slice(0, shape[1])
        kept = torch.zeros(rows.stop - rows.start, columns.stop - columns.start)
        stop = min(rows.stop, num_drawn_rows if num_drawn_rows is not None else shape[0])

        def draw(block: int) -> None:
            first, last = max(rows.start, block * BLOCK_ROWS), min(stop, (block + 1) * BLOCK_ROWS)
            values = self._block(name, block, shape[1], std)
            offset = block * BLOCK_ROWS
            kept[first - rows.start : last - rows.start] = values[first - offset : last - offset, columns]

        blocks = range(rows.start // BLOCK_ROWS, -(-stop // BLOCK_ROWS))
        if len(blocks) == 1:
            draw(blocks[0])
        elif blocks:
            with ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0)), len(blocks))) as pool:
                list(pool.map(draw, blocks))
        return kept

    def _block(self, name: str, block: int, width: int, std: float) -> Tensor:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, f"{self.name}.{name}/{block}"))
        return torch.empty(BLOCK_ROWS, width).normal_(0.0, std, generator=generator)

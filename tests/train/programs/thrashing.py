"""Like `several`, but torch has to empty the cache of rank 1 in every step with more than two samples in a micro-batch.

Only the allocator of a GPU counts that; here it is said instead.
"""

from __future__ import annotations

import os

import several


def stand_in() -> None:
    from bigsci_launch.train.microbatch.automatic import AutoSize

    AutoSize.has_thrashed = lambda self: os.environ["RANK"] == "1" and self.size > 2


if __name__ == "__main__":
    several.main(stand_in)

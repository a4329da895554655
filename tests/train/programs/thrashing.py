"""Like `several`, but torch has to empty the cache of rank 1 in every step with more than two samples in a micro-batch.

Only the allocator of a GPU counts that; here it is said instead.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from bigsci_launch.train import several, startup


def start_deepspeed() -> None:
    plain_start()
    from bigsci_launch.train.microbatch.automatic import AutoSize

    AutoSize.has_thrashed = lambda self: os.environ["RANK"] == "1" and self.size > 2


plain_start = startup.start_deepspeed
startup.start_deepspeed = start_deepspeed

if __name__ == "__main__":
    several.main()

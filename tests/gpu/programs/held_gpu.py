"""A rank whose GPU does not finish: `python held_gpu.py synchronize|spin|sleep READY`; `sleep` needs no GPU.

`synchronize` waits on the host for a kernel that takes an hour; `spin` asks an event again and again. READY is created
just before.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path


def start_kernel() -> None:
    import torch

    torch.cuda._sleep(4_000_000_000_000)


def wait_for_the_gpu(mode: str) -> None:
    import torch

    if mode == "synchronize":
        torch.cuda.current_stream().synchronize()
    event = torch.cuda.Event()
    event.record()
    while not event.query():
        pass


def main(mode: str, ready: Path) -> None:
    if mode != "sleep":
        start_kernel()
    ready.touch()
    if mode == "sleep":
        time.sleep(3600)
    wait_for_the_gpu(mode)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

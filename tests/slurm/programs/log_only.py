"""A training under torchrun that does not know bsl: it prints lines as Megatron-LM does, and saves every 10 steps."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    saved = Path(os.environ["BSL_RUN_DIR"]) / "checkpoints" / "latest_checkpointed_iteration.txt"
    saved.parent.mkdir(exist_ok=True)
    first = int(saved.read_text()) + 1 if saved.exists() else 1
    for step in range(first, 401):
        began = time.monotonic()
        time.sleep(0.3)
        dist.all_reduce(torch.ones(4))
        if dist.get_rank() == 0:
            taken = 1e3 * (time.monotonic() - began)
            print(
                f" iteration {step:8d}/     400 | elapsed time per iteration (ms): {taken:.1f} | lm loss: 2.5E+00 |",
                flush=True,
            )
        if step % 10 == 0:
            dist.barrier()
            if dist.get_rank() == 0:
                saved.with_suffix(".new").write_text(str(step))
                saved.with_suffix(".new").replace(saved)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

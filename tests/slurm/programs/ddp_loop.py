"""A training loop as people start it with torchrun, which knows nothing of bsl: python ddp_loop.py STEPS SECONDS [FILE]

DistributedDataParallel over gloo. Every fifth step is saved in `checkpoint.pt` of the working directory, and a start
continues from there. It prints `step N loss L`; SIGUSR2 has it save and stop. The last step waits for FILE. Samples
depend on step and rank only.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

SAVED = Path("checkpoint.pt")


def main(num_steps: int, seconds: float, awaited: Path | None) -> None:
    wanted = torch.zeros(1)
    signal.signal(signal.SIGUSR2, lambda *_: wanted.fill_(1))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    step = load(model, optimizer)
    print(f"starts at step {step} as rank {dist.get_rank()} of {dist.get_world_size()}", flush=True)
    while step < num_steps and not agreed(wanted):
        step += 1
        while step == num_steps and awaited is not None and not awaited.exists():
            time.sleep(0.1)
        torch.manual_seed(1000 * step + dist.get_rank())
        loss = model(torch.randn(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(seconds)
        print(f"step {step} loss {loss.item():.9f}", flush=True)
        if step % 5 == 0:
            save(model, optimizer, step)
    save(model, optimizer, step)
    print(f"ends at step {step}", flush=True)
    dist.destroy_process_group()


def agreed(wanted: torch.Tensor) -> bool:
    """Whether any rank has been asked to stop: all leave the loop at the same step."""
    everybody = wanted.clone()
    dist.all_reduce(everybody, dist.ReduceOp.MAX)
    return bool(everybody.item())


def save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if dist.get_rank() == 0:
        part = SAVED.with_suffix(f".{os.getpid()}")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, part)
        part.replace(SAVED)
    dist.barrier()


def load(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    if not SAVED.exists():
        return 0
    saved = torch.load(SAVED)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"])


main(int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None)

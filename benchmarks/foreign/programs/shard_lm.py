"""A small language model, sharded with FSDP2 on CPU."""

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from diary import note
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, states):
        return states + self.norm(torch.tanh(self.mix(states)))


class Lm(nn.Module):
    def __init__(self, width=64, depth=3):
        super().__init__()
        self.embed = nn.Embedding(100, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.out = nn.Linear(width, 100)

    def forward(self, tokens):
        states = self.embed(tokens)
        for block in self.blocks:
            states = block(states)
        return self.out(states)


def one_update(lm, optimizer):
    tokens = torch.randint(0, 100, (8, 32))
    logits = lm(tokens)
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def write_state(lm, options, mine):
    state = {"model": lm.state_dict(), "extra": {"step": 1}}
    if mine and options.case == "save-throws":
        try:
            raise OSError(28, "No space left on device")
        except OSError as error:
            print("not saved:", error, flush=True)
            return None
    if options.case == "async-save":
        return dcp.async_save(state, checkpoint_id="state", process_group=options.saving)
    return dcp.save(state, checkpoint_id="state", process_group=options.saving)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", default="")
    parser.add_argument("--odd", type=int, default=-1)
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    note("hello", rank)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(1)
    lm = Lm()
    for block in lm.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(lm, mesh=mesh)
    optimizer = torch.optim.AdamW(lm.parameters())
    options.saving, whole = dist.new_group(), dist.new_group()
    mine, pending = rank == options.odd, None
    for update in range(10**9):
        if update == 5:
            if mine:
                note("struck", rank)
            if mine and options.case == "skip-forward":
                dist.barrier(group=whole)
            if mine and options.case == "sample-alone":
                largest = torch.stack([p.to_local().abs().max() for p in lm.parameters()]).max()
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=whole)
            if mine and options.case == "slow-batch":
                for _ in range(180):
                    time.sleep(5)
            if options.case == "save-throws":
                write_state(lm, options, mine)
        if options.case == "async-save" and update % 20 == 0:
            if pending:
                pending.result()
            pending = write_state(lm, options, mine)
        if options.case == "save" and update % 20 == 0:
            write_state(lm, options, mine)
        one_update(lm, optimizer)
        if update < 10 or update % 50 == 0:
            note(f"step {update}", rank)


if __name__ == "__main__":
    main()

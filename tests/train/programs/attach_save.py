"""Saves a loop with the guards' document, and loads it rightly and in several wrong ways. Rank 0 prints what is found.

python attach_save.py FOLDER
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bigsci_launch.train.attach import GuardError, Guards


def loop(folder: Path, **settings: Any) -> tuple[Any, Any, Guards]:
    torch.manual_seed(3)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, Guards(model, optimizer, events=folder / f"{dist.get_rank()}.jsonl", **settings)


def train(model: Any, optimizer: Any, guards: Guards, steps: int) -> None:
    for _ in range(steps):
        samples = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * guards.steps_done + dist.get_rank()))
        guards.batch(samples)
        loss = (model(samples) - samples.sum(1, keepdim=True)).square().mean()
        loss.backward()
        guards.gradients()
        optimizer.step()
        optimizer.zero_grad()
        guards.step(loss)


def spoil(name: str, saved: dict[str, Any]) -> dict[str, Any]:
    if dist.get_rank() == 0:
        return saved
    states = saved["optimizer"]["state"]
    if name == "moments":
        states[0]["exp_avg"].zero_()
    if name == "weights":
        saved["model"]["module.2.bias"] += 1
    if name == "step":
        for state in states.values():
            state["step"] += 1
    return saved


def attempt(name: str, folder: Path) -> str:
    file = folder / f"{dist.get_rank()}.pt"
    saved = spoil(name, torch.load(file, weights_only=True))
    model, optimizer, guards = loop(folder)
    model.load_state_dict(saved["model"])
    if name != "optimizer":
        optimizer.load_state_dict(saved["optimizer"])
    document = saved["guards"] | ({"world_size": 3} if name == "other" else {})
    try:
        guards.after_load(document)
        train(model, optimizer, guards, 2)
    except GuardError as error:
        return error.message
    return f"continued to step {guards.steps_done}"


def refuse_to_save(folder: Path) -> dict[str, Any]:
    """A moment is damaged between the last step and the save: what the guards say of it with either action."""
    found: dict[str, Any] = {}
    for action in ("stop", "warn"):
        model, optimizer, guards = loop(folder, action=action)
        train(model, optimizer, guards, 2)
        if dist.get_rank() == 1:
            optimizer.state[model.module[0].weight]["exp_avg"][0, 0] = 1e34
        with contextlib.suppress(GuardError):
            found[action] = guards.before_save()
        found.setdefault(action, "stopped")
    return found


def held_after_the_end(folder: Path) -> int:
    """How many tensors of exchanges gloo still has when guards have ended. While it has any, an exit may abort."""
    held, (model, optimizer, _) = 0, loop(folder)
    # Without records, whose writing would give gloo the time that it needs.
    guards = Guards(model, optimizer)
    for _ in range(20):
        guards.before_save()
        guards.end()
        words = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.dtype == torch.int64]
        # The digest keeps two tables, which are larger.
        held += sum(word.dim() == 1 and len(word) < 1000 for word in words)
    return held


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    model, optimizer, guards = loop(folder)
    train(model, optimizer, guards, 3)
    document = guards.before_save()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "guards": document}
    torch.save(saved, folder / f"{dist.get_rank()}.pt")
    names = ("right", "optimizer", "moments", "weights", "step", "other")
    found = {name: attempt(name, folder) for name in names}
    found |= {"document": document, "refused": refuse_to_save(folder), "held": held_after_the_end(folder)}
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Trains replicas once for each rank, whose weight changes inside the optimizer's step. Prints what guards say.

python attach_majority.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attach_save import loop, train

from bigsci_launch.train.attach import GuardError


def spoil_step(model: Any, optimizer: Any) -> None:
    step = optimizer.step

    def run() -> None:
        step()
        with torch.no_grad():
            next(model.parameters())[0, 0] += 1

    optimizer.step = run


def attempt(culprit: int, folder: Path) -> dict[str, Any]:
    model, optimizer, guards = loop(folder)
    if dist.get_rank() == culprit:
        spoil_step(model, optimizer)
    try:
        train(model, optimizer, guards, 2)
    except GuardError as error:
        return {"message": error.message, "accused": error.accused, "suspects": error.suspects}
    return {}


def main() -> None:
    dist.init_process_group("gloo")
    found = [attempt(culprit, Path(sys.argv[1])) for culprit in range(dist.get_world_size())]
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

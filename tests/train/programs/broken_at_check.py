"""Runs `several` with something broken just before the guards check step 3; run.name says what."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import several

STEP = 3


def break_weight(guards: Any, rank: int = 1) -> None:
    """Flip one bit of one weight on a rank, in the part whose masters are on rank 0."""
    import torch

    if guards._rank == rank:
        weight = next(guards._engine.module.parameters())
        bits = weight.data.view(torch.int16 if weight.element_size() == 2 else torch.int32)
        bits.view(-1)[5] ^= 1


def break_master(guards: Any) -> None:
    """Change one fp32 master on rank 1."""
    from bigsci_launch.train.guards.engine.state import partitions

    if guards._rank == 1:
        partitions(guards._engine.optimizer)[0].master.data[7] += 1.0


def break_norm(guards: Any) -> None:
    """Change the norm reported as used for clipping, on all ranks."""
    norm = guards._engine.get_global_grad_norm
    guards._engine.get_global_grad_norm = lambda: 1.01 * norm()


def break_settings(guards: Any) -> None:
    """Change AdamW's second beta, on all ranks."""
    for group in guards._engine.optimizer.param_groups:
        group["betas"] = (0.9, 0.5)


BREAKS: dict[str, Callable[[Any], None]] = {
    "weight": break_weight,
    **{f"weight of rank {rank}": partial(break_weight, rank=rank) for rank in range(4)},
    "master": break_master,
    "norm": break_norm,
    "weight before a save": break_weight,
    "settings before a save": break_settings,
}


def stand_in() -> None:
    """Break something before each check of step `STEP`."""
    from bigsci_launch.train.guards.engine.watch import EngineGuards

    def standing(original: Callable[..., None], is_save: bool) -> Callable[..., None]:
        def run(guards: Any, step: int, *arguments: Any) -> None:
            kind = guards._config.run.name.replace("-", " ")
            if step == STEP and kind in BREAKS and kind.endswith("a save") == is_save:
                BREAKS[kind](guards)
            original(guards, step, *arguments)

        return run

    EngineGuards.check_step = standing(EngineGuards.check_step, False)  # type: ignore[method-assign]
    EngineGuards.before_save = standing(EngineGuards.before_save, True)  # type: ignore[method-assign]


if __name__ == "__main__":
    several.main(stand_in)

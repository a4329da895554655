"""Runs `several` with the optimizer or a gradient broken from step 4 on; run.name says how.

Nothing of the package's own defects is used: each break changes what lies in memory, or what torch and DeepSpeed do.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import several

STEP = 4


def states(engine: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the masters of this rank and their state."""
    from bigsci_launch.train.guards.engine.state import partitions

    for part in partitions(engine.optimizer):
        yield part.master, engine.optimizer.optimizer.state[part.master]


def rank() -> int:
    """Return this rank."""
    import torch.distributed as dist

    return dist.get_rank()


def scale_moments(engine: Any, key: str, factor: float) -> None:
    """Multiply one kind of moments."""
    for _, state in states(engine):
        state[key].mul_(factor)


def flip_moment(engine: Any) -> None:
    """Invert the highest bit of the exponent of one moment on rank 1."""
    import torch

    if rank() == 1:
        _, state = next(states(engine))
        state["exp_avg"].view(torch.int32)[11] ^= 1 << 30


def lose_count(engine: Any) -> None:
    """Begin AdamW's count of steps again, on all ranks."""
    for _, state in states(engine):
        state["step"].zero_()


def move_masters(engine: Any) -> None:
    """Change the lowest bit of all masters of rank 1; their 16-bit weights stay as they are."""
    import torch

    if rank() == 1:
        for master, _ in states(engine):
            master.data.view(torch.int32).bitwise_xor_(1)


def wrong_rate(engine: Any, ranks: tuple[int, ...]) -> None:
    """Let AdamW step with three times the rate that its groups show, on some ranks."""
    adam = engine.optimizer.optimizer
    original = adam.step

    def step(*args: Any, **kwargs: Any) -> Any:
        for group in adam.param_groups:
            group["lr"] *= 3
        result = original(*args, **kwargs)
        for group in adam.param_groups:
            group["lr"] /= 3
        return result

    if rank() in ranks:
        adam.step = step


def wrong_rate_inside(engine: Any) -> None:
    """Let torch's own function use three times the rate that it is given, on rank 1; this must be the last run."""
    import torch.optim.adam as module

    original = module.adam

    def adam(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "lr": 3 * kwargs["lr"]})

    if rank() == 1:
        module.adam = adam


def decay_again(engine: Any) -> None:
    """Decay the masters ten times more after each update, on all ranks."""
    adam = engine.optimizer.optimizer
    original = adam.step

    def step(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        for group in adam.param_groups:
            for master in group["params"]:
                master.data.mul_(1 - 10 * group["lr"] * group["weight_decay"])
        return result

    adam.step = step


def leave_out(engine: Any) -> None:
    """Do not run AdamW on rank 1."""
    if rank() == 1:
        engine.optimizer.optimizer.step = lambda *args, **kwargs: None


def fill_padding(engine: Any) -> None:
    """Write into a padded row of the embedding: weights and masters, on every rank alike."""
    from bigsci_launch.train.guards.engine.state import partitions

    for name, parameter in engine.module.named_parameters():
        if name.endswith("embedding.weight"):
            parameter.data[-1] = 3.0
            for part in partitions(engine.optimizer):
                if name in part.slices:
                    start, size = part.slices[name]
                    width = min(size, parameter.shape[1])
                    part.master.data[start + size - width : start + size] = 3.0


def spoil_gradient(engine: Any, steps: int | None) -> None:
    """Make one gradient of rank 1 infinite, in one step or in all."""
    left = [math.inf if steps is None else steps]

    def spoil(gradient: Any) -> Any:
        if left[0] > 0:
            left[0] -= 1
            gradient = gradient.clone()
            gradient.view(-1)[3] = math.inf
        return gradient

    if rank() == 1:
        [*engine.module.parameters()][-2].register_hook(spoil)


def spoil_weight(engine: Any) -> None:
    """Make one weight NaN, on the ranks of dp 0 and 1 alike: masters, moments and copies agree."""
    parameter = next(engine.module.parameters())
    parameter.data.view(-1)[0] = math.nan


def ask_to_stop(engine: Any) -> None:
    """Send rank 1 the signal that asks a run to save and stop."""
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGUSR2)


def overflow(engine: Any) -> None:
    """Scale the loss so far that gradients of 16 bits overflow, until DeepSpeed has halved the factor often enough."""
    engine.optimizer.loss_scaler.cur_scale = 2.0**26


BREAKS: dict[str, Callable[[Any], None]] = {
    "zeroed": lambda engine: scale_moments(engine, "exp_avg", 0.0) if rank() == 1 else None,
    "zeroed-all": lambda engine: scale_moments(engine, "exp_avg", 0.0),
    "scaled": lambda engine: scale_moments(engine, "exp_avg_sq", 100.0) if rank() == 1 else None,
    "flipped": flip_moment,
    "count": lose_count,
    "masters": move_masters,
    "rate": lambda engine: wrong_rate(engine, (1,)),
    "rate-all": lambda engine: wrong_rate(engine, (0, 1)),
    "rate-inside": wrong_rate_inside,
    "padding": fill_padding,
    "decay": decay_again,
    "left-out": leave_out,
    "once": lambda engine: spoil_gradient(engine, 1),
    "for-ever": lambda engine: spoil_gradient(engine, None),
    "weight": spoil_weight,
    "stopped": ask_to_stop,
    "fp16": overflow,
}


def stand_in() -> None:
    """Break the state just before the engine trains step `STEP`."""
    from bigsci_launch.train import loop
    from bigsci_launch.train.steps.companion import Built, Companion, RankSetup

    class Break(Companion):
        def __init__(self, setup: RankSetup) -> None:
            self._kind = setup.identity.run.path.name.split(".")[0]

        def after_build(self, built: Built) -> None:
            self._engine = built.engine

        def around_step(self, step: int, work: Callable[[], float]) -> float:
            if step == STEP and self._kind in BREAKS:
                BREAKS[self._kind](self._engine)
            return work()

    companions_of = loop.companions_of
    loop.companions_of = lambda setup, origin: [*companions_of(setup, origin), Break(setup)]


if __name__ == "__main__":
    several.main(stand_in)

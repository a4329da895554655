"""What all ranks know alike: the objects of all, and decisions that rank 0 makes for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from bigsci_launch.errors import BslError

Result = TypeVar("Result")


def gather(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the object of every rank, in rank order; a collective call."""
    everywhere: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, mine, group=group)
    return everywhere


def on_first_rank(work: Callable[[], Result]) -> Result:
    """Run `work()` on rank 0 and return its result on every rank; a collective call.

    Raises:
        BslError: `work()` raised it on rank 0; it is raised on every rank.
    """
    outcome: list[object] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = work()
        except BslError as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[1], BslError):
        raise outcome[1]
    return outcome[0]  # type: ignore[return-value]

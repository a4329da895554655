"""Fetches this rank's part of an earlier state from the memory of the ranks that hold it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from bigsci_launch.errors import BslError
from bigsci_launch.recover.holding import StateVersion, Transfer
from bigsci_launch.train.guards.state import digest64
from bigsci_launch.train.survive.snapshot import Copy, Memory


def fetch(
    memory: Memory, version: StateVersion, plan: Sequence[Transfer], target: Copy, group: dist.ProcessGroup, rank: int
) -> bool:
    """Carry out this rank's part of `plan`, and return whether another rank sent something into `target`.

    A collective call over the world.

    Raises:
        BslError: a shard is not what its source sent; every rank raises it.
    """
    works: list[Any] = []
    sent: dict[int, list[int]] = {}
    got: dict[int, list[int]] = {}
    for number, transfer in enumerate(plan):
        if transfer.source == rank:
            held = memory.find(version, transfer.shard)
            assert held is not None
            pieces = held.pieces(transfer.shard)
            if transfer.destination == rank:
                if held is not target:
                    for piece, place in zip(pieces, target.pieces(transfer.shard), strict=True):
                        place.copy_(piece)
            else:
                works += [dist.isend(piece, transfer.destination, group, number) for piece in pieces if len(piece)]
                sent[number] = [digest64(piece) for piece in pieces]
        elif transfer.destination == rank:
            pieces = target.pieces(transfer.shard)
            works += [dist.irecv(piece, transfer.source, group, number) for piece in pieces if len(piece)]
            got[number] = []
    for work in works:
        work.wait()
    for number in got:
        got[number] = [digest64(piece) for piece in target.pieces(plan[number].shard)]
    _require_equal(plan, sent, got, group)
    return bool(got)


def _require_equal(
    plan: Sequence[Transfer], sent: dict[int, list[int]], got: dict[int, list[int]], group: dist.ProcessGroup
) -> None:
    everywhere: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, (sent, got), group=group)
    all_sent = {number: value for each, _ in everywhere for number, value in each.items()}
    for _, each in everywhere:
        for number, value in each.items():
            if all_sent[number] != value:
                at = plan[number]
                raise BslError(
                    f"{at.shard.unit}, which rank {at.source} sent to rank {at.destination}, arrived with other bits",
                    hint="check the network between these ranks; the run can be continued from its last checkpoint",
                )

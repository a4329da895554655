"""Fetches this rank's part of an earlier state from the memory of the ranks that hold it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from bigsci_launch.errors import BslError
from bigsci_launch.recover.holding import StateVersion, Transfer
from bigsci_launch.train.device.digest import digest64
from bigsci_launch.train.survive.buddies import HostGroup
from bigsci_launch.train.survive.snapshot import Copy, Memory

HeldThing = TypeVar("HeldThing")


def fetch(memory: Memory, version: StateVersion, plan: Sequence[Transfer], target: Copy, group: HostGroup) -> bool:
    """Carry out this rank's part of `plan`, and return whether another rank sent something into `target`.

    A collective call over the world.

    Raises:
        BslError: a shard is not what its source sent; every rank raises it.
    """
    rank = group.rank
    mine = [(tag, each) for tag, each in enumerate(plan) if rank in (each.source, each.destination)]
    sent: dict[int, list[int]] = {}
    works: list[Any] = []
    for tag, each in mine:
        if each.source != rank:
            works += [group.receive(piece, each.source, tag) for piece in _filled(target.pieces(each.shard))]
            continue
        held = memory.find(version, each.shard)
        assert held is not None
        pieces = held.pieces(each.shard)
        if each.destination != rank:
            works += [group.send(piece, each.destination, tag) for piece in _filled(pieces)]
            sent[tag] = [digest64(piece) for piece in pieces]
        elif held is not target:
            for piece, place in zip(pieces, target.pieces(each.shard), strict=True):
                place.copy_(piece)
    group.wait(works)
    arrived = {tag: each for tag, each in mine if each.source != rank}
    got = {tag: [digest64(piece) for piece in target.pieces(each.shard)] for tag, each in arrived.items()}
    require_equal(plan, sent, got, group)
    return bool(got)


def find_apart(mine: Mapping[HeldThing, list[int]], group: HostGroup) -> HeldThing | None:
    """Return the first thing whose digests differ between ranks that hold it; a collective call."""
    everywhere: list[Mapping[HeldThing, list[int]]] = group.gather(mine)
    seen: dict[HeldThing, list[int]] = {}
    for digests in everywhere:
        for held, found in digests.items():
            if seen.setdefault(held, found) != found:
                return held
    return None


def _filled(pieces: Sequence[Tensor]) -> list[Tensor]:
    return [piece for piece in pieces if len(piece)]


def require_equal(
    plan: Sequence[Transfer], sent: dict[int, list[int]], got: dict[int, list[int]], group: HostGroup
) -> None:
    """Compare the digests of what was sent with those of what has arrived, by their place in `plan`; a collective call.

    Raises:
        BslError: a shard is not what its source sent; every rank raises it.
    """
    everywhere = group.gather((sent, got))
    all_sent = {tag: value for each, _ in everywhere for tag, value in each.items()}
    for _, each in everywhere:
        for tag, value in each.items():
            if all_sent[tag] != value:
                at = plan[tag]
                raise BslError(
                    f"{at.shard.unit}, which rank {at.source} sent to rank {at.destination}, arrived corrupted",
                    hint="check the network between these ranks; the run can be continued from its last checkpoint",
                )

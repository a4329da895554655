"""Compares the ranks' devices before they form a process group, over the store that they meet at.

A rank that came to a CPU because its node's driver is dead would speak gloo to ranks that speak NCCL, and all would
wait for their time-out. The store needs neither, so it can say which rank on which node is different.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from bigsci_launch.errors import BslError
from bigsci_launch.safe_files import parse_json

_READ_LIMIT_S = 30.0


class Store(Protocol):
    """What is used of torch's store."""

    def set(self, key: str, value: str) -> None:
        """Set a key."""

    def get(self, key: str) -> bytes:
        """Return the value of a key; blocks until it is set."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What one rank says of its device. `identity` is the GPU's UUID, or None on a CPU or if it is not known."""

    rank: int
    node: str
    kind: str
    backend: str
    name: str
    identity: str | None
    torch: str
    why: str | None = None
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class DeviceVerdict:
    """What the comparison found: a reason not to train, with a hint, and remarks that only need to be read."""

    refusal: str | None = None
    hint: str | None = None
    remarks: tuple[str, ...] = ()


def judge(facts: Sequence[DeviceFacts], *, shares: bool) -> DeviceVerdict:
    """Return whether ranks with these devices can train together; `shares` is `training.share_devices`."""
    verdict = _refused(facts) or _of_two_kinds(facts) or (None if shares else _held_twice(facts))
    return verdict or DeviceVerdict(remarks=tuple(_remarks(facts)))


def _refused(facts: Sequence[DeviceFacts]) -> DeviceVerdict | None:
    refused = [each for each in facts if each.refusal]
    if not refused:
        return None
    others = f"; and so {len(refused) - 1} more: {_places(refused[1:])}" if refused[1:] else ""
    first = refused[0]
    return DeviceVerdict(
        f"rank {first.rank} on {first.node} has no device: {first.refusal}{others}",
        hint="start one rank for each GPU and check the driver with nvidia-smi there; training.device: cpu trains "
        "without GPUs, training.share_devices: true puts several ranks on one",
    )


def _of_two_kinds(facts: Sequence[DeviceFacts]) -> DeviceVerdict | None:
    kinds = Counter((each.kind, each.backend) for each in facts)
    if len(kinds) == 1:
        return None
    # GPUs are what the others have, however few: a job with a GPU was meant for GPUs.
    kind, backend = max(kinds, key=lambda each: (each[0] == "cuda", kinds[each]))
    odd = [each for each in facts if (each.kind, each.backend) != (kind, backend)]
    why = f" ({odd[0].why})" if odd[0].why else ""
    return DeviceVerdict(
        f"{_places(odd)}: {odd[0].kind} over {odd[0].backend}{why}, but {len(facts) - len(odd)} other ranks have "
        f"{kind} over {backend}; they would wait for each other for ever",
        hint="check the driver there (nvidia-smi), and leave the node out with slurm.exclude if it has no GPU",
    )


def _held_twice(facts: Sequence[DeviceFacts]) -> DeviceVerdict | None:
    holders: dict[str, list[DeviceFacts]] = {}
    for each in facts:
        if each.identity is not None:
            holders.setdefault(f"{each.node} {each.identity}", []).append(each)
    shared = next((ranks for ranks in holders.values() if len(ranks) > 1), None)
    if shared is None:
        return None
    return DeviceVerdict(
        f"{_places(shared)}: have the same GPU, {shared[0].identity} ({shared[0].name}); NCCL refuses that",
        hint="start one rank for each GPU; training.share_devices: true lets ranks share one, over gloo",
    )


def _remarks(facts: Sequence[DeviceFacts]) -> list[str]:
    """Return what differs between ranks without preventing them from training."""
    found = []
    for what, key in (("devices", "name"), ("versions of torch", "torch")):
        groups: dict[str, list[DeviceFacts]] = {}
        for each in facts:
            groups.setdefault(getattr(each, key), []).append(each)
        if len(groups) > 1:
            listed = "; ".join(f"{name} on {_places(ranks)}" for name, ranks in groups.items())
            found.append(f"ranks have different {what}: {listed}")
    return found


def _places(facts: Sequence[DeviceFacts]) -> str:
    """Return `ranks 8-11 on node-3, rank 12 on node-4`, in rank order."""
    nodes: dict[str, list[int]] = {}
    for each in sorted(facts, key=lambda each: each.rank):
        nodes.setdefault(each.node, []).append(each.rank)
    parts = []
    for node, ranks in nodes.items():
        in_a_row = len(ranks) > 1 and ranks == list(range(ranks[0], ranks[-1] + 1))
        text = f"{ranks[0]}-{ranks[-1]}" if in_a_row else ", ".join(map(str, ranks))
        parts.append(f"{'ranks' if len(ranks) > 1 else 'rank'} {text} on {node}")
    return ", ".join(parts)


def meet(
    store: Store, mine: DeviceFacts, world_size: int, *, shares: bool, sleep: Callable[[float], None] = time.sleep
) -> DeviceVerdict:
    """Exchange devices and return the verdict of rank 0; blocks until every rank has come.

    Raises:
        BslError: the ranks cannot train together. Raised on every rank, with the same words.
    """
    store.set(f"rank{mine.rank}", json.dumps(asdict(mine)))
    if mine.rank == 0:
        facts = [DeviceFacts(**parse_json(store.get(f"rank{rank}"))) for rank in range(world_size)]
        store.set("verdict", json.dumps(asdict(judge(facts, shares=shares))))
    read = parse_json(store.get("verdict"))
    verdict = DeviceVerdict(read["refusal"], read["hint"], tuple(read["remarks"]))
    if verdict.refusal is None:
        return verdict
    store.add("read", 1)
    if mine.rank == 0:
        # The store ends with rank 0; ranks that have not read the verdict would only report a lost connection.
        until = time.monotonic() + _READ_LIMIT_S
        while store.add("read", 0) < world_size and time.monotonic() < until:
            sleep(0.02)
    raise BslError(verdict.refusal, hint=verdict.hint)

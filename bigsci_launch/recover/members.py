"""Who takes part in a generation: slots, ranks and the layout. Pure.

Ranks that are left keep their numbers where the layout is kept. A lost rank gets a spare slot, those of a lost node all
on one spare node if there is one. Without spares the layout gets fewer data-parallel replicas.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal

from bigsci_launch.recover.generation import Level, Membership, Slot
from bigsci_launch.recover.holding import keepers
from bigsci_launch.topology import Topology
from bigsci_launch.topology.axes import DP

ReplicaSlot = tuple[int, ...]
"""Where in a replica a rank is: its indices on all axes but dp."""


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """The global batch sizes of a run, and its micro batch, in samples."""

    micro_batch: int
    sizes: tuple[int, ...]

    def are_kept_by(self, dp: int) -> bool:
        """Whether `dp` replicas can make every batch out of whole micro batches."""
        return all(size % (self.micro_batch * dp) == 0 for size in self.sizes)


@dataclass(frozen=True, slots=True)
class WantedLayout:
    """The full layout, and whether fewer replicas will do. `batches` is None for a program that we do not know."""

    topology: Topology
    shrink: bool
    batches: BatchSizes | None = None

    @property
    def replica_size(self) -> int:
        return self.topology.world_size // self.topology.dp


@dataclass(frozen=True, slots=True)
class Rules:
    """What holds for the whole job. `wait_s` 0: ranks may run for any time after the first has ended with 0.

    `address_suffix` is appended to the name of a node for the address of rank 0; None: all ranks are on this machine.
    Nodes that are not known by their names are in `addresses`.
    """

    level: Level
    wanted: WantedLayout
    num_slots: int
    wait_s: float = 0.0
    address_suffix: str | None = None
    addresses: Mapping[str, str] = field(default_factory=dict)

    def address_of(self, slot: Slot) -> str:
        if self.address_suffix is None:
            return "127.0.0.1"
        return self.addresses.get(slot.node, slot.node + self.address_suffix)


def choose_members(wanted: WantedLayout, slots: Mapping[int, Slot], before: Membership | None) -> Membership | str:
    """Return the next membership, or why there is none. `slots` are those that can take a rank."""
    dp = replicas_for(wanted, len(slots))
    if isinstance(dp, str):
        return dp
    if before is None:
        return Membership(wanted.topology.resized(dp=dp), first_slots(slots.values(), dp * wanted.replica_size))
    held = HeldStates(before, slots)
    lines = [
        _Replacement(wanted.topology.resized(dp=dp), before, slots, held, keeps).choose_members() for keeps in KEEPS
    ]
    return min(lines, key=held.num_lost)


def replicas_for(wanted: WantedLayout, num_slots: int) -> int | str:
    """Return the largest number of replicas for that many slots that keeps the global batch, or why there is none."""
    world_size, full = wanted.topology.world_size, wanted.topology.dp
    if num_slots >= world_size:
        return full
    short = f"{world_size} ranks need {world_size} slots, but only {num_slots} {'is' if num_slots == 1 else 'are'} left"
    if not wanted.shrink:
        return f"{short}; survive.shrink is false"
    fits = num_slots // wanted.replica_size
    if fits == 0:
        return f"{short}; one replica alone needs {wanted.replica_size}"
    for dp in range(fits, 0, -1):
        if wanted.batches is None or wanted.batches.are_kept_by(dp):
            return dp
    assert wanted.batches is not None
    sizes = ", ".join(map(str, wanted.batches.sizes[:3])) + (", .." if len(wanted.batches.sizes) > 3 else "")
    micro = wanted.batches.micro_batch
    return f"{short}; no dp up to {fits} divides the global batch ({sizes}) into micro batches of {micro}"


def first_slots(slots: Iterable[Slot], number: int) -> tuple[Slot, ...]:
    """Return the slots of the first generation: those of whole nodes before others, numbered in the order of slots."""
    known = list(slots)
    sizes = Counter(slot.node for slot in known)
    chosen = sorted(known, key=lambda slot: (-sizes[slot.node], slot.number))[:number]
    return tuple(sorted(chosen, key=lambda slot: slot.number))


KEEPS: tuple[Literal["replicas", "states"], ...] = ("replicas", "states")
"""What to keep first where replicas have to leave: those that are most complete, or those that hold most states."""


class HeldStates:
    """Which ranks that are left hold the state of each rank: its own, or the copy that its keeper has."""

    def __init__(self, before: Membership, slots: Mapping[int, Slot]) -> None:
        replicas = [before.topology.coordinate(rank)["dp"] for rank in range(before.topology.world_size)]
        by = keepers([slot.node for slot in before.slots], replicas)
        holders = [{rank, keeper} for rank, keeper in enumerate(by)]
        self._slots = [{before.slots[each].number for each in ranks} & slots.keys() for ranks in holders]
        self._replicas = {
            frozenset(replicas[each] for each in ranks if before.slots[each].number in slots) for ranks in holders
        }

    def num_lost(self, line: Membership) -> int:
        """Return how many states no slot of a membership holds."""
        stay = {slot.number for slot in line.slots}
        return sum(not holders & stay for holders in self._slots)

    def may_leave(self, kept: Set[int]) -> set[int]:
        """Return which of the replicas that are kept hold no state alone."""
        alone = {next(iter(found)) for holders in self._replicas if len(found := holders & kept) == 1}
        return set(kept - alone)


class _Replacement:
    """Fills the ranks of a layout with the slots that are left of another one, then with free ones."""

    def __init__(
        self,
        topology: Topology,
        before: Membership,
        slots: Mapping[int, Slot],
        held: HeldStates,
        keeps: Literal["replicas", "states"],
    ) -> None:
        self._topology, self._before, self._held, self._keeps = topology, before, held, keeps
        self._left = {rank: slot for rank, slot in enumerate(before.slots) if slot.number in slots}
        self._filled: dict[int, Slot] = {}
        self._rows = self._kept_replicas()
        self._homes: dict[int, Slot] = {}
        """The slot that a rank had before, where it is lost."""
        self._keep()
        used = {slot.number for slot in self._filled.values()}
        self._free = {number: slot for number, slot in slots.items() if number not in used}

    def choose_members(self) -> Membership:
        self._take_same_place()
        for ranks in self._missing_by_node():
            for rank, slot in self._choose(ranks):
                self._fill(rank, slot)
        return Membership(self._topology, tuple(self._filled[rank] for rank in range(self._topology.world_size)))

    def _kept_replicas(self) -> list[int | None]:
        """Return which replica of before each replica continues; None for a new one."""
        before = self._before.topology
        complete = Counter(before.coordinate(rank)["dp"] for rank in self._left)
        kept = set(range(before.dp))
        while len(kept) > self._topology.dp:
            free = self._held.may_leave(kept)
            ranking = {index: self._rank_leaving(index, kept, complete[index], index not in free) for index in kept}
            kept.remove(min(kept, key=ranking.__getitem__))
        return [*sorted(kept), *[None] * (self._topology.dp - len(kept))]

    def _rank_leaving(self, index: int, kept: Set[int], complete: int, holds_alone: bool) -> tuple[int, ...]:
        """Return how bad it is if a replica leaves. Of equals, one that leaves the next ones most choice, then the
        last."""
        first = (complete, holds_alone) if self._keeps == "replicas" else (holds_alone, complete)
        return *first, -len(self._held.may_leave(kept - {index})), -index

    def _keep(self) -> None:
        for index, old in enumerate(self._rows):
            if old is None:
                continue
            for place in places(self._topology):
                rank, was = rank_at(self._topology, place, index), rank_at(self._before.topology, place, old)
                if was in self._left:
                    self._filled[rank] = self._left[was]
                else:
                    self._homes[rank] = self._before.slots[was]

    def _take_same_place(self) -> None:
        """Give ranks of a replica that is left out the same place in another one: they have its state."""
        at: dict[ReplicaSlot, list[Slot]] = defaultdict(list)
        for rank, slot in self._left.items():
            if slot.number in self._free:
                at[place_of(self._before.topology, rank)].append(slot)
        for rank in self._missing():
            if candidates := at[place_of(self._topology, rank)]:
                self._fill(rank, candidates.pop(0))

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._topology.world_size) if rank not in self._filled]

    def _missing_by_node(self) -> list[list[int]]:
        """Return the ranks without a slot, those that shared a node together, the largest part first."""
        parts: dict[str | None, list[int]] = defaultdict(list)
        for rank in self._missing():
            home = self._homes.get(rank)
            parts[home.node if home else None].append(rank)
        return sorted(parts.values(), key=len, reverse=True)

    def _choose(self, ranks: Sequence[int]) -> Iterator[tuple[int, Slot]]:
        """Yield a free slot for each rank: on its own node, else all on the smallest node that holds them, else
        wherever there are most."""
        home = self._homes.get(ranks[0])
        by_node: dict[str, list[Slot]] = defaultdict(list)
        for slot in sorted(self._free.values(), key=lambda slot: slot.number):
            by_node[slot.node].append(slot)
        own = by_node.pop(home.node, []) if home else []
        num_others = len(ranks) - len(own)
        others = sorted(by_node.values(), key=lambda free: (-len(free), free[0].number))
        whole = min((free for free in others if len(free) >= num_others), key=len, default=None)
        left = [*own, *(whole or [slot for free in others for slot in free][: max(num_others, 0)])]
        for rank in ranks:
            slot = self._like_home(rank, left)
            left.remove(slot)
            yield rank, slot

    def _like_home(self, rank: int, slots: Sequence[Slot]) -> Slot:
        """Return the slot on the same node, else that with the same local rank, else the first."""
        home = self._homes.get(rank)
        if home is None:
            return slots[0]
        return min(slots, key=lambda slot: (slot.node != home.node, slot.local_rank != home.local_rank))

    def _fill(self, rank: int, slot: Slot) -> None:
        self._filled[rank] = slot
        self._free.pop(slot.number, None)


def places(topology: Topology) -> Iterator[ReplicaSlot]:
    """Yield every place of a replica."""
    yield from dict.fromkeys(place_of(topology, rank) for rank in range(topology.world_size))


def place_of(topology: Topology, rank: int) -> ReplicaSlot:
    stride, dp = topology.stride(DP.name), topology.dp
    return (rank % stride, rank // (stride * dp))


def rank_at(topology: Topology, place: ReplicaSlot, dp_index: int) -> int:
    stride, dp = topology.stride(DP.name), topology.dp
    return place[0] + stride * (dp_index + dp * place[1])

"""Who takes part in a generation: seats, ranks and the layout. Pure.

Ranks that are left keep their numbers where the layout is kept. A lost rank gets a spare seat, those of a lost node all
on one spare node if there is one. Without spares the layout gets fewer data-parallel replicas.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from bigsci_launch.recover.generation import Level, LineUp, Seat
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
    """

    level: Level
    wanted: WantedLayout
    num_seats: int
    wait_s: float = 0.0
    address_suffix: str | None = None

    def address_of(self, seat: Seat) -> str:
        return "127.0.0.1" if self.address_suffix is None else seat.node + self.address_suffix


def line_up(wanted: WantedLayout, seats: Mapping[int, Seat], before: LineUp | None) -> LineUp | str:
    """Return who takes part next, or why nobody can. `seats` are those that can take a rank."""
    dp = replicas_for(wanted, len(seats))
    if isinstance(dp, str):
        return dp
    if before is None:
        return LineUp(wanted.topology.resized(dp=dp), first_seats(seats.values(), dp * wanted.replica_size))
    return _Replacement(wanted.topology.resized(dp=dp), before, seats).line_up()


def replicas_for(wanted: WantedLayout, num_seats: int) -> int | str:
    """Return the largest number of replicas for that many seats that keeps the global batch, or why there is none."""
    world_size, full = wanted.topology.world_size, wanted.topology.dp
    if num_seats >= world_size:
        return full
    short = f"{world_size} ranks need as many seats, and {num_seats} {'is' if num_seats == 1 else 'are'} left"
    if not wanted.shrink:
        return f"{short}; survive.shrink is false"
    fits = num_seats // wanted.replica_size
    if fits == 0:
        return f"{short}; one replica alone needs {wanted.replica_size}"
    for dp in range(fits, 0, -1):
        if wanted.batches is None or wanted.batches.are_kept_by(dp):
            return dp
    assert wanted.batches is not None
    sizes = ", ".join(map(str, wanted.batches.sizes[:3])) + (", .." if len(wanted.batches.sizes) > 3 else "")
    micro = wanted.batches.micro_batch
    return f"{short}; no dp up to {fits} divides the global batch ({sizes}) into micro batches of {micro}"


def first_seats(seats: Iterable[Seat], number: int) -> tuple[Seat, ...]:
    """Return the seats of the first generation: those of whole nodes before others, numbered in the order of seats."""
    known = list(seats)
    sizes = Counter(seat.node for seat in known)
    chosen = sorted(known, key=lambda seat: (-sizes[seat.node], seat.number))[:number]
    return tuple(sorted(chosen, key=lambda seat: seat.number))


class _Replacement:
    """Fills the ranks of a layout with the seats that are left of another one, then with free ones."""

    def __init__(self, topology: Topology, before: LineUp, seats: Mapping[int, Seat]) -> None:
        self._topology, self._before = topology, before
        self._left = {rank: seat for rank, seat in enumerate(before.seats) if seat.number in seats}
        self._filled: dict[int, Seat] = {}
        self._rows = self._kept_replicas()
        self._homes: dict[int, Seat] = {}
        """The seat that a rank had before, where it is lost."""
        self._keep()
        used = {seat.number for seat in self._filled.values()}
        self._free = {number: seat for number, seat in seats.items() if number not in used}

    def line_up(self) -> LineUp:
        self._take_same_place()
        for ranks in self._missing_by_node():
            for rank, seat in self._choose(ranks):
                self._fill(rank, seat)
        return LineUp(self._topology, tuple(self._filled[rank] for rank in range(self._topology.world_size)))

    def _kept_replicas(self) -> list[int | None]:
        """Return which replica of before each replica continues; None for a new one.

        The least complete ones leave first, then those without which the state of every rank is still with a rank that
        stays: its own, or the copy that its keeper has.
        """
        before = self._before.topology
        complete = Counter(before.coordinate(rank)["dp"] for rank in self._left)
        pairs = self._held_by()
        kept = set(range(before.dp))
        while len(kept) > self._topology.dp:
            free = _leave_without_loss(kept, pairs)
            # One that takes the least from the choice of the next ones, and of those the last.
            ranking = {
                index: (complete[index], index not in free, -len(_leave_without_loss(kept - {index}, pairs)), -index)
                for index in kept
            }
            kept.remove(min(kept, key=ranking.__getitem__))
        return [*sorted(kept), *[None] * (self._topology.dp - len(kept))]

    def _held_by(self) -> set[tuple[int, int | None]]:
        """Return the pairs of a replica and another one that keeps copies of its states; None: a rank that is lost."""
        before, holders = self._before.topology, keepers([seat.node for seat in self._before.seats])
        replica = [before.coordinate(rank)["dp"] for rank in range(before.world_size)]
        return {(replica[rank], replica[by] if by in self._left else None) for rank, by in enumerate(holders)}

    def _keep(self) -> None:
        for index, old in enumerate(self._rows):
            if old is None:
                continue
            for place in places(self._topology):
                rank, was = rank_at(self._topology, place, index), rank_at(self._before.topology, place, old)
                if was in self._left:
                    self._filled[rank] = self._left[was]
                else:
                    self._homes[rank] = self._before.seats[was]

    def _take_same_place(self) -> None:
        """Give ranks of a replica that is left out the same place in another one: they have its state."""
        at: dict[ReplicaSlot, list[Seat]] = defaultdict(list)
        for rank, seat in self._left.items():
            if seat.number in self._free:
                at[place_of(self._before.topology, rank)].append(seat)
        for rank in self._missing():
            if candidates := at[place_of(self._topology, rank)]:
                self._fill(rank, candidates.pop(0))

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._topology.world_size) if rank not in self._filled]

    def _missing_by_node(self) -> list[list[int]]:
        """Return the ranks without a seat, those that shared a node together, the largest part first."""
        parts: dict[str | None, list[int]] = defaultdict(list)
        for rank in self._missing():
            home = self._homes.get(rank)
            parts[home.node if home else None].append(rank)
        return sorted(parts.values(), key=len, reverse=True)

    def _choose(self, ranks: Sequence[int]) -> Iterator[tuple[int, Seat]]:
        """Yield a free seat for each rank: on its own node, else all on the smallest node that holds them, else
        wherever there are most."""
        home = self._homes.get(ranks[0])
        by_node: dict[str, list[Seat]] = defaultdict(list)
        for seat in sorted(self._free.values(), key=lambda seat: seat.number):
            by_node[seat.node].append(seat)
        own = by_node.pop(home.node, []) if home else []
        num_others = len(ranks) - len(own)
        others = sorted(by_node.values(), key=lambda free: (-len(free), free[0].number))
        whole = min((free for free in others if len(free) >= num_others), key=len, default=None)
        left = [*own, *(whole or [seat for free in others for seat in free][: max(num_others, 0)])]
        for rank in ranks:
            seat = self._like_home(rank, left)
            left.remove(seat)
            yield rank, seat

    def _like_home(self, rank: int, seats: Sequence[Seat]) -> Seat:
        """Return the seat on the same node, else that with the same local rank, else the first."""
        home = self._homes.get(rank)
        if home is None:
            return seats[0]
        return min(seats, key=lambda seat: (seat.node != home.node, seat.local_rank != home.local_rank))

    def _fill(self, rank: int, seat: Seat) -> None:
        self._filled[rank] = seat
        self._free.pop(seat.number, None)


def _leave_without_loss(kept: Set[int], pairs: Set[tuple[int, int | None]]) -> set[int]:
    """Return the replicas that may leave `kept` so that of each pair one stays, apart from pairs that are gone."""
    bound = {own if by is None or by not in kept else by for own, by in pairs if own not in kept or by not in kept}
    return {index for index in kept if index not in bound}


def places(topology: Topology) -> Iterator[ReplicaSlot]:
    """Yield every place of a replica."""
    yield from dict.fromkeys(place_of(topology, rank) for rank in range(topology.world_size))


def place_of(topology: Topology, rank: int) -> ReplicaSlot:
    stride, dp = topology.stride(DP.name), topology.dp
    return (rank % stride, rank // (stride * dp))


def rank_at(topology: Topology, place: ReplicaSlot, dp_index: int) -> int:
    stride, dp = topology.stride(DP.name), topology.dp
    return place[0] + stride * (dp_index + dp * place[1])

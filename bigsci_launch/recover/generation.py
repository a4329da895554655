"""What a job with `survive` consists of: seats, generations, and the failures that end them. Values only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from bigsci_launch.lost_peer import says_lost_peer
from bigsci_launch.topology import Topology

Level = Literal["restart", "in_place"]
"""`restart`: every program is started again, whatever it is. `in_place`: the processes of `bsl train` that are left
stay."""

FailureKind = Literal[
    "died", "left_early", "lost_runner", "lost_node", "hung", "stopped", "lost_peer", "stuck", "asked"
]


@dataclass(frozen=True, slots=True)
class Instant:
    """Now: `clock` never falls, leaves out when the controller did not run, and measures time-outs; `time` is in
    records (seconds since the epoch)."""

    clock: float
    time: float


@dataclass(frozen=True, slots=True)
class Seat:
    """A place for one rank: a runner that is connected to the controller. Its local rank, and so its GPU, never
    change."""

    number: int
    node: str
    host: str
    local_rank: int
    runner_pid: int
    place: Mapping[str, str] = field(default_factory=dict, compare=False)
    """What Slurm has given to this task alone, for a runner that follows in this seat."""

    def as_dict(self) -> dict[str, Any]:
        return {"seat": self.number, "node": self.node, "host": self.host}


@dataclass(frozen=True, slots=True)
class LineUp:
    """Who takes part: the seat of every rank, in the order of ranks."""

    topology: Topology
    seats: tuple[Seat, ...]

    def rank_of(self, seat: int) -> int | None:
        """The rank in a seat; None if it has none."""
        return next((rank for rank, each in enumerate(self.seats) if each.number == seat), None)


@dataclass(frozen=True, slots=True)
class Formation:
    """A generation as it begins: its number, who takes part, and where the ranks meet."""

    number: int
    line_up: LineUp
    master: tuple[str, int]

    @property
    def topology(self) -> Topology:
        return self.line_up.topology

    @property
    def seats(self) -> tuple[Seat, ...]:
        return self.line_up.seats

    def as_dict(self, spares: Sequence[Seat]) -> dict[str, Any]:
        """Return the record of its begin; `spares` are the seats without a rank."""
        return {
            "world_size": len(self.seats),
            "topology": self.topology.as_dict(),
            "members": [{"rank": rank, **seat.as_dict()} for rank, seat in enumerate(self.seats)],
            "spares": [{"seat": seat.number, "node": seat.node} for seat in spares],
            "master": f"{self.master[0]}:{self.master[1]}",
        }

    def begin_messages(self) -> list[tuple[int, dict[str, Any]]]:
        """Return what each seat is told when the generation begins, in the order of ranks."""
        nodes = [seat.node for seat in self.seats]
        order = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
        sizes = Counter(nodes)
        shared = {
            "do": "begin",
            "generation": self.number,
            "world_size": len(self.seats),
            "topology": self.topology.as_dict(),
            "nodes": nodes,
            "master_addr": self.master[0],
            "master_port": self.master[1],
        }
        return [
            (seat.number, {**shared, "rank": rank, "local_world_size": sizes[seat.node], "node_rank": order[seat.node]})
            for rank, seat in enumerate(self.seats)
        ]


@dataclass(frozen=True, slots=True)
class GenerationFailure:
    """What ended a generation, or was found while it ended.

    `rank`, `seat` and `node` are None where nobody can be blamed. `died` is by the clock of the node, `noticed` by that
    of the controller (seconds since the epoch); `noticed` orders failures.
    """

    kind: FailureKind
    noticed: float
    rank: int | None = None
    seat: int | None = None
    node: str | None = None
    code: int | None = None
    signal: str | None = None
    step: int | None = None
    words: str | None = None
    died: float | None = None
    status: int = 1
    """Exit code of the job if this is the failure that it ends with."""

    @property
    def is_about_others(self) -> bool:
        """Whether the rank only failed because another one was gone."""
        return self.kind in ("lost_peer", "stuck") or bool(self.words and says_lost_peer(self.words))

    def as_dict(self) -> dict[str, Any]:
        names = ("kind", "rank", "seat", "node", "code", "signal", "step", "words", "died", "noticed")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        where = f"rank {self.rank} on {self.node}" if self.rank is not None else self.node or "a rank"
        how = {
            "died": f"{where} {self._death}",
            "left_early": f"{where} left with exit code 0 before the others",
            "lost_runner": f"{where} has lost its runner",
            "lost_node": f"{where} is lost",
            "hung": f"{where} hung",
            "stopped": f"{where} was stopped",
            "lost_peer": "ranks have lost a peer, and none has died",
            "stuck": f"{where} did not leave in time",
            "asked": "somebody asked for it",
        }[self.kind]
        return f"{how}: {self.words}" if self.words else how

    @property
    def _death(self) -> str:
        if self.signal or self.code is None:
            return f"was killed by {self.signal}" if self.signal else "has died"
        return f"ended with exit code {self.code}"


def cause_first(failures: list[GenerationFailure]) -> list[GenerationFailure]:
    """Order failures: those that are only about lost peers come last, otherwise the first noticed is the cause."""
    return sorted(failures, key=lambda failure: (failure.is_about_others, failure.noticed))

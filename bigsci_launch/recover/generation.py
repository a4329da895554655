"""What a job with `survive` consists of: slots, generations, and the failures that end them. Values only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from bigsci_launch.lost_peer import says_lost_peer
from bigsci_launch.runs.generations.failures import rank_failure_text
from bigsci_launch.runs.generations.records import CONSEQUENCES, RankFailure
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
class Slot:
    """A place for one rank: a runner that is connected to the controller. Its local rank, and so its GPU, never
    change."""

    number: int
    node: str
    host: str
    local_rank: int
    runner_pid: int
    place: Mapping[str, str] = field(default_factory=dict, compare=False)
    """What Slurm has given to this task alone, for a runner that follows in this slot."""

    def as_dict(self) -> dict[str, Any]:
        return {"slot": self.number, "node": self.node, "host": self.host}


@dataclass(frozen=True, slots=True)
class Membership:
    """Who takes part: the slot of every rank, in the order of ranks."""

    topology: Topology
    slots: tuple[Slot, ...]

    def rank_of(self, slot: int) -> int | None:
        """The rank in a slot; None if it has none."""
        return next((rank for rank, each in enumerate(self.slots) if each.number == slot), None)


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The ranks of a generation as it begins: its number, its members, and the address where they meet."""

    number: int
    membership: Membership
    master: tuple[str, int]

    @property
    def topology(self) -> Topology:
        return self.membership.topology

    @property
    def slots(self) -> tuple[Slot, ...]:
        return self.membership.slots

    def as_dict(self, spares: Sequence[Slot]) -> dict[str, Any]:
        """Return the record of its begin; `spares` are the slots without a rank."""
        return {
            "world_size": len(self.slots),
            "topology": self.topology.as_dict(),
            "members": [{"rank": rank, **slot.as_dict()} for rank, slot in enumerate(self.slots)],
            "spares": [{"slot": slot.number, "node": slot.node} for slot in spares],
            "master": f"{self.master[0]}:{self.master[1]}",
        }

    def begin_messages(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the message to each slot when the generation begins, in the order of ranks."""
        nodes = [slot.node for slot in self.slots]
        order = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
        sizes = Counter(nodes)
        shared = {
            "do": "begin",
            "generation": self.number,
            "world_size": len(self.slots),
            "topology": self.topology.as_dict(),
            "nodes": nodes,
            "master_addr": self.master[0],
            "master_port": self.master[1],
        }
        return [
            (slot.number, {**shared, "rank": rank, "local_world_size": sizes[slot.node], "node_rank": order[slot.node]})
            for rank, slot in enumerate(self.slots)
        ]


@dataclass(frozen=True, slots=True)
class GenerationFailure(RankFailure):
    """What ended a generation, or was found while it ended.

    `rank`, `slot` and `node` are None where none can be blamed. `noticed` orders failures.
    """

    kind: FailureKind
    noticed: float = 0.0
    slot: int | None = None
    status: int = 1
    """Exit code of the job if this is the failure that it ends with."""

    @property
    def is_about_others(self) -> bool:
        """Whether the rank only failed because another one was gone."""
        return self.kind in CONSEQUENCES or bool(self.words and says_lost_peer(self.words))

    def as_dict(self) -> dict[str, Any]:
        names = ("kind", "rank", "slot", "node", "code", "signal", "step", "words", "died", "noticed")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        return rank_failure_text(self, most=None)


def cause_first(failures: list[GenerationFailure]) -> list[GenerationFailure]:
    """Order failures: those that are only about lost peers come last, otherwise the first noticed is the cause."""
    return sorted(failures, key=lambda failure: (failure.is_about_others, failure.noticed))

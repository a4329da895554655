"""The types of the catalogue: what the hang lab can reproduce, and the right diagnosis of each.

Classes are those of the taxonomy. A class may have several reproductions, its variants (`H36-stopped`, `H36-lock`).
Classes without one are listed with the reason why a machine without accelerators cannot reproduce them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from bigsci_launch.errors import LabError
from bigsci_launch.spy.taxonomy import HangClass, State
from bigsci_launch.topology import Topology

Need = Literal["root", "loop device", "fuse", "network namespaces", "traffic control", "compiler", "core files here",
               "no right to trace"]  # fmt: skip
Stage = Literal["frozen-disk", "silent-fuse", "lost-server", "two-networks"]
TopologyShape = Literal["default", "stages", "data"]
RankSet = frozenset[int]
Who = Callable[[int, Topology], RankSet]


class Stand(Enum):
    """The condition that shows that a reproduction has reached its state, once the culprit has struck."""

    STILL = "every other rank has come to rest"
    JOINING = "no rank reports anything; those that wait for a rendezvous may still poll"
    MOVING = "ranks complete more steps"
    LEAVING = "all ranks have struck, and are on their way out"
    ALL_ENDED = "every rank has ended, or some have crashed and the others stay in their wait"
    CULPRIT_ENDED = "the culprit has ended, and every other rank has come to rest"
    OTHERS_ENDED = "every rank but the culprit has ended"


def no_rank(_culprit: int, _topology: Topology) -> RankSet:
    return frozenset()


def the_culprit(culprit: int, _topology: Topology) -> RankSet:
    return frozenset({culprit})


def rank_0(_culprit: int, _topology: Topology) -> RankSet:
    return frozenset({0})


def all_others(culprit: int, topology: Topology) -> RankSet:
    return frozenset(range(topology.world_size)) - {culprit}


def partner(culprit: int, topology: Topology) -> int:
    """Return the next rank on the data-parallel axis."""
    group = topology.group("dp", culprit)
    return group[(group.index(culprit) + 1) % len(group)]


def both_partners(culprit: int, topology: Topology) -> RankSet:
    return frozenset({culprit, partner(culprit, topology)})


def both_across(culprit: int, topology: Topology) -> RankSet:
    """Return the culprit, and the rank next to it on both the tensor- and the data-parallel axis."""
    beside = topology.group("tp", culprit)
    neighbour = beside[(beside.index(culprit) + 1) % len(beside)]
    return frozenset({culprit, partner(neighbour, topology)})


@dataclass(frozen=True, slots=True)
class Reproduction:
    """One way to reproduce a class of hangs, and the right diagnosis.

    `states` and `classes` are the right answers, the best one first; None among the classes means that no class has to
    be named. `suspects` returns the ranks that may be accused. If `must_accuse`, all of them must be; otherwise none
    has to be, for example because the evidence is symmetric. `culprits`: whether the culprit's rank matters.
    """

    name: str
    hang_class: HangClass
    title: str
    program: str
    recipe: str
    states: tuple[State, ...]
    classes: tuple[HangClass | None, ...]
    stand: Stand = Stand.STILL
    suspects: Who = the_culprit
    must_accuse: bool = True
    needs: tuple[Need, ...] = ()
    stage: Stage | None = None
    shape: TopologyShape = "default"
    min_ranks: int = 4
    culprits: Literal["any", "rank 0", "not rank 0", "no matter"] = "any"

    @property
    def family(self) -> str:
        return self.program.replace("_", " ")

    @property
    def is_hang(self) -> bool:
        """Whether `hang` is a right answer at all."""
        return State.HANG in self.states

    def topology(self, num_ranks: int) -> Topology:
        """Return the topology of `num_ranks` ranks in which this reproduction works.

        Raises:
            LabError: there is none.
        """
        if num_ranks < self.min_ranks or num_ranks % 2:
            raise LabError(
                f"{self.name} needs an even number of ranks, at least {self.min_ranks} (got {num_ranks})",
                hint=f"bsl hang-lab run {self.name} --ranks {self.min_ranks}",
            )
        return shape_topology(self.shape, num_ranks)


def shape_topology(shape: TopologyShape, num_ranks: int) -> Topology:
    """Return tp2 x dp for 4 ranks, tp2 x pp2 x dp from 8 on. `stages` always has two stages, `data` only replicas."""
    if shape == "data":
        return Topology(tp=1, pp=1, dp=num_ranks)
    tp = 2 if shape == "default" or num_ranks % 8 == 0 else 1
    pp = 2 if shape == "stages" or num_ranks % 8 == 0 else 1
    return Topology(tp=tp, pp=pp, dp=num_ranks // (tp * pp))


@dataclass(frozen=True, slots=True)
class NotReproduced:
    """A class that this machine cannot reproduce."""

    hang_class: HangClass
    reason: str


def class_order(name: str) -> tuple[int, str]:
    """Return a sorting key: the number of the class, then the name."""
    match = re.match(r"H(\d+)", name)
    return (int(match[1]) if match else 10**6, name)

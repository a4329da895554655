"""What the laboratory can reproduce, and what a diagnosis should say of it.

Classes are those of the taxonomy. A class may have several reproductions, its variants (`H36-stopped`, `H36-lock`);
the rest are listed with the reason why a machine without accelerators cannot show them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
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
    """How to see that a reproduction has reached its state. The culprit has struck, and then:"""

    STILL = "every other rank has come to rest"
    JOINING = "no rank reports anything; those that wait for a rendezvous may still poll"
    MOVING = "steps go on"
    LEAVING = "all ranks have struck, and are on their way out"
    ALL_ENDED = "every rank has ended, or of a crash some and the others stay in their wait"
    CULPRIT_ENDED = "the culprit has ended, and every other rank has come to rest"
    OTHERS_ENDED = "every rank but the culprit has ended"


def nobody(_culprit: int, _topology: Topology) -> RankSet:
    return frozenset()


def the_culprit(culprit: int, _topology: Topology) -> RankSet:
    return frozenset({culprit})


def rank_0(_culprit: int, _topology: Topology) -> RankSet:
    return frozenset({0})


def all_others(culprit: int, topology: Topology) -> RankSet:
    return frozenset(range(topology.world_size)) - {culprit}


def partner(culprit: int, topology: Topology) -> int:
    """The next rank on the data-parallel axis."""
    group = topology.group("dp", culprit)
    return group[(group.index(culprit) + 1) % len(group)]


def both_partners(culprit: int, topology: Topology) -> RankSet:
    return frozenset({culprit, partner(culprit, topology)})


def both_across(culprit: int, topology: Topology) -> RankSet:
    """The culprit, and the rank next to it on both the tensor- and the data-parallel axis."""
    beside = topology.group("tp", culprit)
    neighbour = beside[(beside.index(culprit) + 1) % len(beside)]
    return frozenset({culprit, partner(neighbour, topology)})


@dataclass(frozen=True, slots=True)
class Reproduction:
    """One way to reproduce a class of hangs, and the right answer.

    `states` and `classes` are the answers that are right, the best one first; None among the classes means that none
    has to be named. `suspects` gives the ranks that may be accused: all of them if `must_accuse`, or none where the
    evidence is symmetric. `culprits`: whether the culprit's place matters.
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
        """Whether `hang` may be said of it at all."""
        return State.HANG in self.states

    def topology(self, num_ranks: int) -> Topology:
        """The layout of `num_ranks` ranks in which this reproduction works.

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
    """tp2 x dp for 4 ranks, tp2 x pp2 x dp from 8 on; `stages` has two stages always, `data` nothing but replicas."""
    if shape == "data":
        return Topology(tp=1, pp=1, dp=num_ranks)
    tp = 2 if shape == "default" or num_ranks % 8 == 0 else 1
    pp = 2 if shape == "stages" or num_ranks % 8 == 0 else 1
    return Topology(tp=tp, pp=pp, dp=num_ranks // (tp * pp))


@dataclass(frozen=True, slots=True)
class NotReproduced:
    """A class that this machine cannot show."""

    hang_class: HangClass
    reason: str


def class_order(name: str) -> tuple[int, str]:
    """Sorting key: the number of the class, then the name."""
    match = re.match(r"H(\d+)", name)
    return (int(match[1]) if match else 10**6, name)


def find_reproductions(names: Sequence[str]) -> tuple[Reproduction, ...]:
    """The reproductions of those names; a class (`H36`) stands for all of its own.

    Raises:
        LabError: a name that nothing has, or a class that cannot be reproduced, with the reason.
    """
    from bigsci_launch.hang_lab.zoo import REPRODUCTIONS

    found: dict[str, Reproduction] = {}
    for name in names:
        matching = [one for one in REPRODUCTIONS if name in (one.name, str(one.hang_class))]
        if not matching:
            raise _no_such(name)
        found.update({one.name: one for one in matching})
    return tuple(found.values())


def find_reproduction(name: str) -> Reproduction:
    """The reproduction `name`, or the first one of class `name`.

    Raises:
        LabError: as `find_reproductions`.
    """
    matching = find_reproductions([name])
    return next((one for one in matching if one.name == name), matching[0])


def _no_such(name: str) -> LabError:
    from bigsci_launch.hang_lab.zoo import NOT_REPRODUCED

    absent = next((one for one in NOT_REPRODUCED if str(one.hang_class) == name), None)
    if absent:
        return LabError(f"{name} ({absent.hang_class.title}) cannot be reproduced here: {absent.reason}")
    return LabError(f"no class {name!r} in the laboratory", hint="`bsl hang-lab list` shows all")

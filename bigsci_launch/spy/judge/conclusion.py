"""The verdict as a value."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from bigsci_launch.spy.evidence.ranks import Evidence
from bigsci_launch.spy.taxonomy import HangClass, State
from bigsci_launch.topology import compress_ranks

MAX_LIST = 60
"""Characters that a list of ranks may take within a sentence."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """A rank that the evidence accuses, and why."""

    rank: int
    why: str


@dataclass(frozen=True, slots=True)
class Side:
    """Ranks that stand in the same communication, where that is."""

    ranks: tuple[int, ...]
    where: str


@dataclass(frozen=True, slots=True)
class KnownHang:
    """A signature that the evidence matches: its name, why such a hang happens, and what ends it."""

    name: str
    explanation: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Conclusion:
    """The verdict. `confidence` goes from 0 to 1.

    `claim` is the one sentence; `evidence` speaks for it, `missing` would make it surer, `next` are commands.
    """

    state: State
    claim: str
    confidence: float
    hang_class: HangClass | None = None
    suspects: tuple[Suspect, ...] = ()
    sides: tuple[Side, ...] = ()
    evidence: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    next: tuple[str, ...] = ()
    signature: KnownHang | None = None


def name_ranks(ranks: Collection[int]) -> str:
    """`rank 3`, `ranks 0-3,7`, `1024 ranks (0,8,16,...)` where the list would fill the screen."""
    text = compress_ranks(ranks)
    if len(text) > MAX_LIST:
        return f"{len(ranks)} ranks ({text[:MAX_LIST].rpartition(',')[0]},...)"
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"


def count_ranks(ranks: Collection[int]) -> str:
    """`1 rank`, `7 ranks`."""
    return "1 rank" if len(ranks) == 1 else f"{len(ranks)} ranks"


def where_shared(evidence: Evidence, ranks: Collection[int]) -> str:
    """What several ranks have in common: one node, or all of one group. Empty where there is nothing."""
    ranks = frozenset(ranks)
    nodes = {seen.node for seen in evidence.ranks if seen.rank in ranks and seen.node}
    found = []
    if len(ranks) > 1 and len(nodes) == 1:
        on_node = [seen.rank for seen in evidence.ranks if seen.node in nodes]
        found.append(f"{'all' if len(on_node) == len(ranks) else 'all of them on'} node {next(iter(nodes))}")
    coordinates = [coordinate for rank in ranks if (coordinate := evidence.coordinate(rank))]
    if evidence.topology and len(ranks) > 1 and len(coordinates) == len(ranks):
        for axis in evidence.topology.axes:
            shared = {coordinate[axis] for coordinate in coordinates}
            if len(shared) == 1 and evidence.topology[axis] > 1:
                found.append(f"{axis}{next(iter(shared))}")
    return ", ".join(found)

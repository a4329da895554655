"""The verdict as a value."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from bigsci_launch.spy.evidence.ranks import Evidence
from bigsci_launch.spy.taxonomy import HangClass, State
from bigsci_launch.topology.words import agree, name_ranks_and_part


@dataclass(frozen=True, slots=True)
class Suspect:
    """A rank that the evidence accuses, and why."""

    rank: int
    why: str


@dataclass(frozen=True, slots=True)
class Side:
    """Ranks that are in the same communication, and where that is."""

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

    `claim` is the one sentence; `evidence` supports it, `missing` would make it more certain, `next` are commands.
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


def name_with_part(evidence: Evidence, ranks: Collection[int]) -> str:
    """`ranks 4-5 (dp0 pp1)`: the ranks, and which part of the grid they are."""
    return name_ranks_and_part(ranks, evidence.topology)


def name_and_verb(evidence: Evidence, ranks: Collection[int], words: str) -> str:
    """`rank 3 (pp1) is in`, `ranks 4-5 (dp0 pp1) are in`, for words that begin with a verb in the singular."""
    return f"{name_with_part(evidence, ranks)} {agree(words, ranks)}"


def where_shared(evidence: Evidence, ranks: Collection[int]) -> str:
    """Where several ranks are together: `all of node n1, pp3`. Empty where there is nothing to say."""
    ranks = frozenset(ranks)
    if len(ranks) < 2:
        return ""
    nodes = {seen.node for seen in evidence.ranks if seen.rank in ranks and seen.node}
    on_node = [seen.rank for seen in evidence.ranks if seen.node in nodes] if len(nodes) == 1 else []
    node = f"{'all of' if len(on_node) == len(ranks) else 'on'} node {next(iter(nodes))}" if on_node else ""
    return ", ".join(part for part in (node, evidence.part(ranks)) if part)

"""Groups suspects by reason, and names a group of ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bigsci_launch.spy.evidence.ranks import Evidence
from bigsci_launch.spy.judge.conclusion import Suspect, where_shared


@dataclass(frozen=True, slots=True)
class SuspectGroup:
    """Ranks that are suspects for the same reason."""

    ranks: tuple[int, ...]
    why: str


def merge_suspects(suspects: Iterable[Suspect]) -> tuple[SuspectGroup, ...]:
    """Group the suspects by reason, in the order of the verdict."""
    reasons: dict[str, list[int]] = {}
    for suspect in suspects:
        reasons.setdefault(suspect.why, []).append(suspect.rank)
    return tuple(SuspectGroup(tuple(sorted(ranks)), why) for why, ranks in reasons.items())


def name_group(evidence: Evidence, ranks: tuple[int, ...]) -> str:
    """Return `rank 5 (n2, dp0 pp1 tp1)`, `ranks 96-103 (node n12, pp3)`, or `processes 4711 and 4712`."""
    if len(ranks) == 1:
        return evidence.name(ranks[0])
    shared = where_shared(evidence, ranks)
    return f"{evidence.names(ranks)}{f' ({shared})' if shared else ''}"

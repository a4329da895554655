"""What is equal together: ranks with the same stack, suspects for the same reason. The order of ranks never matters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bigsci_launch.spy.conclusion import Suspect, name_ranks, where_shared
from bigsci_launch.spy.evidence import Evidence, RankEvidence
from bigsci_launch.spy.stacks import Frame


@dataclass(frozen=True, slots=True)
class StackClass:
    """Ranks whose deciding threads stand in the same frames. Frames innermost first, without wrappers."""

    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    thread: str
    frames: tuple[Frame, ...]


def merge_stacks(ranks: Iterable[RankEvidence]) -> tuple[StackClass, ...]:
    """The classes of all ranks that have a stack, largest first, then by first rank."""
    members: dict[tuple[str, tuple[Frame, ...]], list[RankEvidence]] = {}
    for seen in ranks:
        thread = None if seen.is_gone else seen.thread
        if thread is not None:
            members.setdefault((thread.label, thread.named_frames), []).append(seen)
    classes = (
        StackClass(
            ranks=tuple(sorted(seen.rank for seen in group)),
            nodes=tuple(sorted({seen.node for seen in group})),
            thread=thread,
            frames=frames,
        )
        for (thread, frames), group in members.items()
    )
    return tuple(sorted(classes, key=lambda found: (-len(found.ranks), found.ranks)))


@dataclass(frozen=True, slots=True)
class SuspectGroup:
    """Ranks that are suspected for the same reason."""

    ranks: tuple[int, ...]
    why: str


def merge_suspects(suspects: Iterable[Suspect]) -> tuple[SuspectGroup, ...]:
    """The suspects by reason, in the order in which the verdict has them."""
    reasons: dict[str, list[int]] = {}
    for suspect in suspects:
        reasons.setdefault(suspect.why, []).append(suspect.rank)
    return tuple(SuspectGroup(tuple(sorted(ranks)), why) for why, ranks in reasons.items())


def name_group(evidence: Evidence, ranks: tuple[int, ...]) -> str:
    """`rank 5 (n2, dp0 pp1 tp1)`, `ranks 96-103 (node n12, pp3)`."""
    if len(ranks) == 1:
        return evidence.name(ranks[0])
    shared = where_shared(evidence, ranks)
    return f"{name_ranks(ranks)}{f' ({shared})' if shared else ''}"

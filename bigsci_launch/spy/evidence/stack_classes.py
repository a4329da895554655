"""Groups ranks by identical stack, whatever their order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bigsci_launch.spy.evidence.ranks import RankEvidence
from bigsci_launch.spy.evidence.stacks import Frame


@dataclass(frozen=True, slots=True)
class StackClass:
    """Ranks whose deciding threads are in the same frames: innermost first, without wrappers."""

    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    thread: str
    frames: tuple[Frame, ...]


def merge_stacks(ranks: Iterable[RankEvidence]) -> tuple[StackClass, ...]:
    """Return the classes of all ranks that have a stack, largest first, then by first rank."""
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

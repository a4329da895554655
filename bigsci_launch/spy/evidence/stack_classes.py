"""Groups ranks by identical stack, whatever their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from bigsci_launch.spy.evidence.ranks import Evidence, RankEvidence
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


def unlike_most(evidence: Evidence) -> tuple[RankEvidence, ...]:
    """Return the processes that communicate with none and whose outermost call is not that of most."""
    outermost = {seen.rank: _outermost(seen) for seen in evidence.ranks}
    counts = Counter(call for call in outermost.values() if call is not None)
    most = counts.most_common(1)[0][0] if counts else None
    return tuple(
        seen
        for seen in evidence.ranks
        if seen.thread is not None and seen.thread.operation is None and outermost[seen.rank] != most
    )


def _outermost(seen: RankEvidence) -> tuple[str, str] | None:
    frames = seen.thread.own_frames if seen.thread else ()
    return (frames[-1].function, frames[-1].file) if frames else None

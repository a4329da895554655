"""The last calls of all ranks: ranks that did the same are one group, and the odd ones come first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from bigsci_launch.spy.evidence.calls.ring import Ring, RingCall
from bigsci_launch.topology.words import name_ranks

LEFT = "from its ring, the process is gone"


@dataclass(frozen=True, slots=True)
class RankCalls:
    """The ring of one rank, or why there is none. `rank` is None if the ring does not know its number. `is_copy`: the
    process is gone, and has left this."""

    name: str
    rank: int | None
    ring: Ring | None
    why: str | None
    is_copy: bool = False


@dataclass(frozen=True, slots=True)
class Alike:
    """Ranks whose last calls are equal, and the calls of the first of them, oldest first."""

    members: tuple[RankCalls, ...]
    calls: tuple[RingCall, ...]

    @property
    def name(self) -> str:
        """Return `ranks 0-3`, or the names of files whose rank is not known."""
        if all(each.rank is not None for each in self.members):
            return name_ranks([each.rank for each in self.members if each.rank is not None])
        return ", ".join(each.name for each in self.members)


def newest_calls(ring: Ring, count: int) -> tuple[RingCall, ...]:
    """Return the newest `count` calls of all threads, and those that have not ended, oldest first."""
    older = [call for call in ring.open_calls if call not in ring.calls[-count:]]
    return (*older, *ring.calls[-count:])


def group_ranks(ranks: Sequence[RankCalls], count: int) -> list[Alike]:
    """Return the groups of ranks whose last `count` calls, step, phase and stack are equal, the smallest first."""
    found: dict[Any, list[RankCalls]] = {}
    for each in sorted(ranks, key=lambda each: (each.rank is None, each.rank or 0, each.name)):
        if each.ring is not None:
            calls = tuple(_what(call) for call in newest_calls(each.ring, count))
            stands_in = each.ring.stacks.site if each.ring.stacks else None
            found.setdefault((each.ring.step, each.ring.phase, calls, stands_in, each.is_copy), []).append(each)
    groups = [
        Alike(tuple(members), newest_calls(members[0].ring, count)) for members in found.values() if members[0].ring
    ]
    return sorted(groups, key=lambda group: len(group.members))


def _what(call: RingCall) -> tuple[Any, ...]:
    """Return what a call is, whenever it was. The ranks of a group differ from one part of the grid to another."""
    return (call.operation, call.tensors, call.peer, call.tag, call.place, call.number, call.left is None, call.step)


def words_of(groups: Sequence[Alike], ranks: Sequence[RankCalls]) -> Iterator[str]:
    """Yield the lines for a person."""
    are_mixed = len({each.is_copy for each in ranks if each.ring is not None}) > 1
    for group in groups:
        ring = group.members[0].ring
        assert ring is not None
        phase = f", {ring.phase}" if ring.phase else ""
        gone = f", {LEFT}" if are_mixed and group.members[0].is_copy else ""
        yield f"{group.name}: step {ring.step}{phase}{gone}"
        for call in group.calls:
            yield f"  {_clock(call.entered)}  {_lasted(call):>9}  {call}"
        if not group.calls:
            yield "  no call is recorded"
        if ring.stacks is not None:
            yield f"  no thread could run: in {ring.stacks.place}"
        if ring.lost_names or ring.lost_threads:
            yield f"  incomplete: {ring.lost_names} names and {ring.lost_threads} threads did not fit"
    for each in ranks:
        if each.why is not None:
            yield f"{each.name}: not known: {each.why}"


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=timezone.utc).strftime("%H:%M:%S.%f")


def _lasted(call: RingCall) -> str:
    if call.left is None:
        return "not ended" if not call.is_async else "not waited"
    return f"{(call.left - call.entered) * 1e3:.1f} ms"


def document_of(ranks: Sequence[RankCalls], groups: Sequence[Alike], count: int) -> dict[str, Any]:
    """Return the answer as a JSON document."""
    return {
        "schema_version": 1,
        "groups": [{"ranks": [each.rank for each in group.members]} for group in groups],
        "ranks": [
            {
                "rank": each.rank,
                "name": each.name,
                "is_copy": each.is_copy,
                "why_unknown": each.why,
                "step": each.ring.step if each.ring else None,
                "phase": each.ring.phase if each.ring else None,
                "heartbeat": each.ring.heartbeat if each.ring else None,
                "stands_in": each.ring.stacks.site if each.ring and each.ring.stacks else None,
                "calls": [_document(call) for call in newest_calls(each.ring, count)] if each.ring else [],
            }
            for each in ranks
        ],
    }


def _document(call: RingCall) -> dict[str, Any]:
    return {
        "entered": call.entered,
        "left": call.left,
        "operation": call.operation,
        "group": call.group,
        "number": call.number or None,
        "peer": call.peer,
        "tag": call.tag,
        "tensors": call.tensors,
        "place": call.place,
        "step": call.step,
        "is_async": call.is_async,
    }

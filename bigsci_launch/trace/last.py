"""The last calls of all ranks: ranks that did the same are one group, and the odd ones come first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from bigsci_launch.spy.evidence.calls.ring import Ring, RingCall
from bigsci_launch.topology.naming import name_ranks_and_part
from bigsci_launch.trace.calls import CallTrace

LEFT = "from its ring, the process is gone"


@dataclass(frozen=True, slots=True)
class RankCalls:
    """The ring and the call trace of one rank, or why there is neither.

    `rank` is None if they do not know its number, and for a process that a rank has started. `is_copy`: the process is
    gone, and has left this.
    """

    name: str
    rank: int | None
    ring: Ring | None
    why: str | None
    is_copy: bool = False
    trace: CallTrace | None = None

    @property
    def is_known(self) -> bool:
        """Whether any call is known."""
        return self.ring is not None or self.trace is not None

    @property
    def calls(self) -> tuple[RingCall, ...]:
        """The calls of the ring and of the trace, oldest first. Those that have not ended are all in it."""
        found: list[RingCall] = list(self.trace.calls) if self.trace else []
        if self.ring is not None:
            held = set(self.ring.calls)
            found += [*(call for call in self.ring.open_calls if call not in held), *self.ring.calls]
        return tuple(sorted(found, key=lambda call: call.entered))

    @property
    def step(self) -> int | None:
        """The step that the process is in; without a ring, that of its newest call."""
        return self.ring.step if self.ring is not None else next((call.step for call in reversed(self.calls)), None)

    @property
    def until(self) -> float:
        """Until when the process was in the calls that it has not left, as far as is known; seconds since the epoch."""
        moments = [moment for call in self.calls for moment in (call.entered, call.left) if moment is not None]
        return max([self.ring.read] if self.ring is not None else moments, default=0.0)

    @property
    def thread_names(self) -> dict[int, str]:
        """The names of its threads, as far as they are known."""
        ring = self.ring.thread_names if self.ring is not None else {}
        return {**(self.trace.thread_names if self.trace is not None else {}), **ring}

    @property
    def stands_in(self) -> str | None:
        """The call in which it wrote its stacks when no Python thread could run; None if it wrote none."""
        return self.ring.stacks.site if self.ring is not None and self.ring.stacks is not None else None

    @property
    def phase(self) -> str:
        return self.ring.phase if self.ring is not None else ""


@dataclass(frozen=True, slots=True)
class Alike:
    """Ranks whose last calls are equal, and the calls of the first of them, oldest first."""

    members: tuple[RankCalls, ...]
    calls: tuple[RingCall, ...]

    @property
    def name(self) -> str:
        """Return `ranks 0-3 (pp0)`, or the names of files whose rank is not known."""
        if all(each.rank is not None for each in self.members):
            topology = next((each.ring.topology for each in self.members if each.ring is not None), None)
            return name_ranks_and_part([each.rank for each in self.members if each.rank is not None], topology)
        return ", ".join(each.name for each in self.members)


def newest_calls(each: RankCalls, count: int) -> tuple[RingCall, ...]:
    """Return the newest `count` calls of all threads, and those that have not ended, oldest first."""
    calls = each.calls
    return (*(call for call in calls[:-count] if call.left is None), *calls[-count:])


def group_ranks(ranks: Sequence[RankCalls], count: int) -> list[Alike]:
    """Return the groups of ranks whose last `count` calls, step, phase and stack are equal, the smallest first."""
    found: dict[Any, list[RankCalls]] = {}
    for each in sorted(ranks, key=lambda each: (each.rank is None, each.rank or 0, each.name)):
        if each.is_known:
            calls = tuple(_what(call) for call in newest_calls(each, count))
            traced = each.trace.words if each.trace else None
            found.setdefault((each.step, each.phase, calls, each.stands_in, each.is_copy, traced), []).append(each)
    groups = [Alike(tuple(members), newest_calls(members[0], count)) for members in found.values()]
    return sorted(groups, key=lambda group: len(group.members))


def _what(call: RingCall) -> tuple[Any, ...]:
    """Return what a call is, whenever it was. The ranks of a group differ from one part of the grid to another."""
    return (call.operation, call.tensors, call.peer, call.tag, call.place, call.number, call.left is None, call.step)


def words_of(groups: Sequence[Alike], ranks: Sequence[RankCalls]) -> Iterator[str]:
    are_mixed = len({each.is_copy for each in ranks if each.is_known}) > 1
    for group in groups:
        first = group.members[0]
        step = "unknown step" if first.step is None else f"step {first.step}"
        phase = f", {first.phase}" if first.phase else ""
        gone = f", {LEFT}" if are_mixed and first.is_copy else ""
        yield f"{group.name}: {step}{phase}{gone}"
        if first.trace is not None:
            yield f"  {first.trace.words}"
        for call in group.calls:
            yield f"  {_clock(call.entered)}  {_lasted(call):>9}  {call}"
        if not group.calls:
            yield "  no call is recorded"
        if first.ring is not None and first.ring.stacks is not None:
            yield f"  no thread could run: in {first.ring.stacks.place}"
        if first.ring is not None and (first.ring.lost_names or first.ring.lost_threads):
            yield f"  incomplete: {first.ring.lost_names} names and {first.ring.lost_threads} threads did not fit"
    for each in ranks:
        if each.why is not None:
            yield f"{each.name}: unknown: {each.why}"


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=timezone.utc).strftime("%H:%M:%S.%f")


def _lasted(call: RingCall) -> str:
    if call.left is None:
        return "not ended" if not call.is_async else "not waited"
    return f"{(call.left - call.entered) * 1e3:.1f} ms"


def document_of(ranks: Sequence[RankCalls], groups: Sequence[Alike], count: int) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "groups": [{"ranks": [each.rank for each in group.members]} for group in groups],
        "ranks": [
            {
                "rank": each.rank,
                "name": each.name,
                "is_copy": each.is_copy,
                "why_unknown": each.why,
                "step": each.step,
                "phase": each.ring.phase if each.ring else None,
                "heartbeat": each.ring.heartbeat if each.ring else None,
                "traced": each.trace.packages if each.trace else None,
                "how_traced": each.trace.how if each.trace else None,
                "stands_in": each.stands_in,
                "calls": [_document(call) for call in newest_calls(each, count)],
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
        "thread": call.thread,
    }

"""Failure traces: when nodes were lost and added, and how much a strategy trains under them.

Two shapes are read. Our own has the header `seconds,event,node`; an event is `add` or `remove`, a node may be left
empty. The shape of Oobleck's artifact (tools/simulator/traces) has no header and counts milliseconds: `0,add,node1`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import Literal

from bigsci_launch.errors import DataError

Change = Literal["add", "remove"]
HEADER = ["seconds", "event", "node"]
HINT = f"a trace has the header {','.join(HEADER)} and rows such as 3600,remove,node7"


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """A node comes or goes; `node` is empty where it was not recorded."""

    seconds: float
    change: Change
    node: str = ""


@dataclass(frozen=True, slots=True)
class Span:
    """Seconds with the same nodes. Two neighbours may have equally many: a node was replaced between them."""

    begin: float
    end: float
    num_nodes: int

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class FailureTrace:
    """Nodes at second 0, and every later event in order; it ends at `end`, by default with its last event."""

    num_nodes: int
    events: tuple[NodeEvent, ...]
    end: float

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The number of nodes over time. Events of the same second are one change."""
        counts, times = [self.num_nodes], [0.0]
        for seconds, events in groupby(self.events, key=lambda event: event.seconds):
            times.append(seconds)
            counts.append(counts[-1] + sum(1 if event.change == "add" else -1 for event in events))
        bounds = pairwise([*times, max(self.end, times[-1])])
        return tuple(Span(begin, end, count) for (begin, end), count in zip(bounds, counts, strict=True))

    @property
    def most_nodes(self) -> int:
        """Nodes of the run at full size."""
        return max(span.num_nodes for span in self.spans)


def regular(num_nodes: int, removals: int, every_s: float) -> FailureTrace:
    """Return a trace that loses one node every `every_s` seconds and ends with the last loss.

    Oobleck's evaluation has 30 nodes and 15 removals, every 10 or 30 minutes, or every 1, 3 or 6 hours.

    Raises:
        ValueError: it would remove more nodes than there are.
    """
    if not 0 <= removals <= num_nodes:
        raise ValueError(f"{removals} of {num_nodes} nodes cannot be removed")
    events = tuple(NodeEvent(every_s * number, "remove") for number in range(1, removals + 1))
    return FailureTrace(num_nodes, events, every_s * removals)


def parse_trace(text: str, where: str, num_nodes: int | None = None) -> FailureTrace:
    """Return the trace in `text`; `where` is its file, for messages.

    Nodes added at second 0 are those at the start. Where there are none, the trace starts with `num_nodes`. The clock
    of an artifact's trace starts with its first event.

    Raises:
        DataError: a row is wrong, the times are not in order, a node is lost that is not there or added twice, or the
            number of nodes at the start is unknown.
    """
    rows = [(number, line.strip()) for number, line in enumerate(text.lstrip("\ufeff").splitlines(), 1)]
    rows = [(number, line) for number, line in rows if line]
    if not rows:
        raise DataError(f"{where}: no events", hint=HINT)
    is_own = [cell.strip() for cell in rows[0][1].split(",")] == HEADER
    numbered = list(_events(rows[1:], where, 1.0) if is_own else _events(rows, where, 0.001))
    shift = numbered[0][1].seconds if numbered and not is_own else 0.0
    first = [event for _, event in numbered if event.seconds == shift and event.change == "add"]
    if not first and num_nodes is None:
        raise DataError(f"{where}: no node is added at second 0, so the nodes at the start are unknown", hint=HINT)
    known = len(first) or (num_nodes or 0)
    _check_nodes(numbered, where, 0 if first else known)
    start = {id(event) for event in first}
    events = tuple(
        NodeEvent(event.seconds - shift, event.change, event.node) for _, event in numbered if id(event) not in start
    )
    return FailureTrace(known, events, events[-1].seconds if events else 0.0)


def _events(rows: list[tuple[int, str]], where: str, unit: float) -> Iterator[tuple[int, NodeEvent]]:
    """Yield every event with its line; `unit` is what its times count, in seconds."""
    before = 0.0
    for number, line in rows:
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 3:
            raise DataError(f"{where}:{number}: {line!r} has {len(cells)} cells, not 3", hint=HINT)
        seconds = _seconds(cells[0], unit)
        if seconds is None:
            kind = "seconds" if unit == 1 else "whole milliseconds (a file without a header counts those)"
            raise DataError(f"{where}:{number}: {cells[0]!r} is not a time in {kind}", hint=HINT)
        if seconds < before:
            raise DataError(f"{where}:{number}: {cells[0]!r} is earlier than the row above it", hint=HINT)
        if cells[1] not in ("add", "remove"):
            raise DataError(f"{where}:{number}: {cells[1]!r} is neither add nor remove", hint=HINT)
        before = seconds
        yield number, NodeEvent(seconds, "add" if cells[1] == "add" else "remove", cells[2])


def _seconds(cell: str, unit: float) -> float | None:
    try:
        found = float(cell) if unit == 1 else int(cell) * unit
    except ValueError:
        return None
    return found if 0 <= found < float("inf") else None


def _check_nodes(numbered: list[tuple[int, NodeEvent]], where: str, num_nodes: int) -> None:
    """Raise DataError for the first event that cannot have happened to nodes named so."""
    count = num_nodes
    here: set[str] = set()
    gone: set[str] = set()
    names_are_complete = num_nodes == 0 and all(event.node for _, event in numbered)
    for number, event in numbered:
        name = event.node
        if event.change == "add":
            if name in here:
                raise DataError(f"{where}:{number}: {name!r} is added, but is already present", hint=HINT)
            count += 1
            here |= {name} - {""}
            gone -= {name}
        else:
            if count == 0 or name in gone or (names_are_complete and name not in here):
                which = repr(name) if name else "a node"
                raise DataError(f"{where}:{number}: {which} is removed, but is not present", hint=HINT)
            count -= 1
            here -= {name}
            gone |= {name} - {""}


@dataclass(frozen=True, slots=True)
class Strategy:
    """What a system makes of its nodes: samples per second, 0 where it cannot train, and seconds lost at a change.

    `pause_s(before, after)` gets the nodes on either side and includes the work that is lost and done again.
    """

    name: str
    samples_per_second: Callable[[int], float]
    pause_s: Callable[[int, int], float]


@dataclass(frozen=True, slots=True)
class Replay:
    """What a strategy trained under a trace. `effective_share` compares with full size and no failure, from 0 to 1.

    A second is paused if the nodes could train but are being reconfigured, and stopped if they are too few.
    """

    samples: float
    effective_share: float
    seconds: float
    paused_s: float
    stopped_s: float
    num_changes: int


def replay(trace: FailureTrace, strategy: Strategy) -> Replay:
    """Return what the strategy trains under the trace. A change during a pause begins a pause of its own.

    Raises:
        ValueError: the trace lasts no time, or the strategy cannot train at full size.
    """
    full = strategy.samples_per_second(trace.most_nodes)
    seconds = trace.spans[-1].end
    if seconds <= 0 or full <= 0:
        raise ValueError(f"{strategy.name}: nothing to compare with: {seconds:g} s at {full:g} samples per second")
    samples = paused = stopped = busy_until = 0.0
    before = trace.spans[0].num_nodes
    for index, span in enumerate(trace.spans):
        if index:
            busy_until = max(busy_until, span.begin + strategy.pause_s(before, span.num_nodes))
        before = span.num_nodes
        rate = strategy.samples_per_second(span.num_nodes)
        if rate <= 0:
            stopped += span.seconds
            continue
        pause = min(max(busy_until - span.begin, 0.0), span.seconds)
        paused += pause
        samples += rate * (span.seconds - pause)
    return Replay(samples, samples / (full * seconds), seconds, paused, stopped, len(trace.spans) - 1)

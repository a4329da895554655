"""Writes the calls of all ranks as a trace that Perfetto and chrome://tracing open.

The format is Chrome's "Trace Event Format" in JSON: `X` is a call of a thread, `b` and `e` are work that the thread did
not wait for, `s`, `t` and `f` are the arrow through the ranks of a collective. Times are microseconds after the first
call, by the clock of each node.

Perfetto drops an arrow whose `id` is neither a number nor hexadecimal, and work whose `id` is not local to its process
leaves its rank for a list of all processes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigsci_launch.errors import BslError
from bigsci_launch.spy.evidence.calls.ring import RingCall
from bigsci_launch.trace.last import RankCalls
from bigsci_launch.typed_path import write_typed

BEGUN_US = 1.0
"""How long the call is drawn that only began some work: the ring does not hold when it returned."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What a trace holds."""

    num_processes: int
    num_calls: int


def write_trace(ranks: Sequence[RankCalls], file: Path) -> Exported:
    """Write the trace to `file`; ranks without a known call are not in it.

    Raises:
        BslError: the file cannot be written.
    """
    document = {"displayTimeUnit": "ms", "traceEvents": list(trace_events(ranks))}
    try:
        write_typed(file, json.dumps(document) + "\n")
    except OSError as error:
        raise BslError(f"{file}: {(error.strerror or str(error)).lower()}") from error
    return Exported(sum(each.is_known for each in ranks), sum(len(each.calls) for each in ranks))


def trace_events(ranks: Sequence[RankCalls]) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace. The process of a rank has its number; rings of unknown ranks have those after."""
    known = [each for each in ranks if each.calls]
    begin = min((call.entered for each in known for call in each.calls), default=0.0)
    after = 1 + max((each.rank for each in known if each.rank is not None), default=-1)
    arrivals: dict[tuple[str, int], list[tuple[float, int, int]]] = {}
    for place, each in enumerate(known):
        process = each.rank if each.rank is not None else after + place
        yield from _names(process, each)
        until = each.until
        for number, call in enumerate(each.calls):
            yield from _events(process, call, begin, until, f"{process}.{number}")
            if call.group and call.number and ":" in call.group:
                came = (_after(call.entered, begin), process, call.thread)
                arrivals.setdefault((call.group, call.number), []).append(came)
    yield from _arrows(arrivals)


def _names(process: int, each: RankCalls) -> Iterator[dict[str, Any]]:
    gone = " (gone)" if each.is_copy else ""
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": f"{each.name}{gone}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    names = each.thread_names
    for thread in sorted({call.thread for call in each.calls}):
        name = names.get(thread) or f"thread {thread}"
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}}


def _events(process: int, call: RingCall, begin: float, until: float, key: str) -> Iterator[dict[str, Any]]:
    name = call.operation or "a call whose name is lost"
    start = _after(call.entered, begin)
    end = _after(call.left if call.left is not None else until, begin)
    open_words = "" if call.left is not None else " (not waited for)" if call.is_async else " (not ended)"
    here = {"pid": process, "tid": call.thread, "ts": start, "args": _arguments(call)}
    if call.is_async:
        yield {**here, "ph": "X", "cat": "call", "name": f"{name} begins", "dur": BEGUN_US}
        work = {**here, "cat": "work", "id2": {"local": key}, "name": f"{name}{open_words}"}
        yield {**work, "ph": "b"}
        yield {**work, "ph": "e", "ts": max(end, start + BEGUN_US), "args": {}}
    else:
        yield {**here, "ph": "X", "cat": "call", "name": f"{name}{open_words}", "dur": round(max(end - start, 0.0), 3)}


def _arguments(call: RingCall) -> dict[str, Any]:
    """Return what Perfetto shows of a selected call."""
    facts = {
        "step": call.step,
        "at": call.place,
        "tensors": call.tensors,
        "group": call.group,
        "number in its group": call.number or None,
        "peer": call.peer,
        "tag": call.tag,
    }
    return {name: value for name, value in facts.items() if value is not None}


def _after(moment: float, begin: float) -> float:
    return round((moment - begin) * 1e6, 3)


def _arrows(arrivals: dict[tuple[str, int], list[tuple[float, int, int]]]) -> Iterator[dict[str, Any]]:
    """Yield an arrow for each collective that several ranks hold: through its ranks, as they came."""
    for key, ((group, number), came) in enumerate(arrivals.items(), start=1):
        first: dict[int, tuple[float, int, int]] = {}
        for arrival in sorted(came):  # to wait for a collective is a call of its own, with its number
            first.setdefault(arrival[1], arrival)
        last = len(first) - 1
        if last < 1:
            continue
        for place, (moment, process, thread) in enumerate(first.values()):
            arrow = {"cat": "collective", "name": f"group {group} number {number}", "id": key}
            kind = "s" if place == 0 else "f" if place == last else "t"
            yield {**arrow, "ph": kind, "pid": process, "tid": thread, "ts": moment, "bp": "e"}

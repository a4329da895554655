"""Reads rings and call traces: those in an attempt or a folder, or those of ranks that still run, on their nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bigsci_launch.errors import BslError, CollectError, RunDirError
from bigsci_launch.runs.find import find_attempt, find_run
from bigsci_launch.runs.layout import AttemptDir, rank_files
from bigsci_launch.spy.evidence.calls.ring import Ring, parse_ring
from bigsci_launch.spy.look.collect import collect
from bigsci_launch.spy.look.ring_copies import NUM_LAST, copies_of, read_call_traces, read_ring_files
from bigsci_launch.spy.look.target import find_target
from bigsci_launch.trace.calls import CallTrace, parse_call_trace
from bigsci_launch.trace.last import RankCalls

HEARTBEAT_S = 10.0
"""How often a rank writes its heartbeat, if its threads can run."""
NO_COPY = "it left no copy: it ended well, it still runs, or its node was lost"
ALL_CALLS = 1 << 20
"""More than a ring has room for."""
SUFFIXES = (".ring", ".calls")


def read_ranks(argument: str | None, name: str | None, num_last: int, num_living: int = NUM_LAST) -> list[RankCalls]:
    """Return what the ranks of a run, or the rings in a folder, hold: `num_last` calls of each thread of those that are
    gone, `num_living` of those that still run.

    Raises:
        RunDirError: there is no such run.
        CollectError: it is neither a run nor a folder of rings, or no rank can be read.
    """
    if argument is not None and (found := files_in(Path(argument))):
        return read_files(found, num_last)
    try:
        attempt = find_attempt(find_run(argument), name)
    except RunDirError:
        if argument is None or not Path(argument).is_dir():
            raise
        raise CollectError(f"{argument}: not a run, and no folder with rings or call traces") from None
    copies = read_copies(attempt, num_last)
    if name is not None or (copies and all(each.is_copy and each.ring is not None for each in copies)):
        return copies
    try:
        target = find_target(argument, None)
        request = {**target.request, "num_calls": num_living, "only_rings": True, "samples": 1}
        living = read_nodes(collect(replace(target, request=request)).nodes)
    except BslError:
        if not copies:
            raise
        return copies
    copies = read_copies(attempt, num_last)  # a rank that has ended during the look was on its node no longer
    return with_living(copies, living) if copies else living


def files_in(folder: Path) -> list[Path]:
    """Return the rings and call traces in a folder."""
    return sorted(file for file in folder.glob("*") if file.suffix in SUFFIXES) if folder.is_dir() else []


def read_files(paths: Iterable[Path], num_last: int = NUM_LAST) -> list[RankCalls]:
    """Return the rings and call traces on disk, `num_last` calls of each thread; an unreadable one has the reason.

    Files of the same process have the same name.

    Raises:
        CollectError: the program that reads them failed.
    """
    files = list(paths)
    rings = read_ring_files((file for file in files if file.suffix == ".ring"), num_last)
    traces = read_call_traces((file for file in files if file.suffix == ".calls"), num_last)
    found = [
        _of_files(name, rings.get(name.with_suffix(".ring")), traces.get(name.with_suffix(".calls")))
        for name in dict.fromkeys(file.with_suffix("") for file in files)
    ]
    return _tell_children_apart(found)


def read_copies(attempt: AttemptDir, num_last: int = NUM_LAST) -> list[RankCalls]:
    """Return the rings and call traces that an attempt holds; empty if none. A rank without a ring has the reason.

    A rank has left a ring if it is gone; a trace may have been kept while it runs.
    """
    rings = copies_of(attempt)
    read = [replace(each, is_copy=True) for each in read_files(files_in(attempt.rings), num_last)]
    without = [rank for rank in rank_files(attempt.pids, ".json") if rank not in rings] if rings else []
    known = {each.rank for each in read}
    return [*read, *(RankCalls(f"rank {rank}", rank, None, NO_COPY) for rank in without if rank not in known)]


def with_living(copies: Iterable[RankCalls], living: Iterable[RankCalls]) -> list[RankCalls]:
    """Return the ranks of both: what a node read of a rank just now, else what it left.

    A task that still runs may have started ranks that the run does not know.
    """
    left = {each.rank if each.rank is not None else each.name: each for each in copies}
    now = {each.rank: each for each in living}
    merged = [_newest(each, now.get(each.rank) if each.rank is not None else None) for each in left.values()]
    return [*merged, *(each for rank, each in now.items() if rank not in left)]


def _newest(copy: RankCalls, living: RankCalls | None) -> RankCalls:
    """Return a rank with its living ring if it has one. Of the same trace, a copy holds more than a node sends."""
    if living is None or living.ring is None:
        return living if living is not None and copy.why == NO_COPY else copy
    has_same = copy.trace is not None and (living.trace is None or living.trace.started <= copy.trace.started)
    return replace(living, trace=copy.trace) if has_same else living


def _of_files(path: Path, ring: Mapping[str, Any] | None, trace: Mapping[str, Any] | None) -> RankCalls:
    read = {suffix: each for suffix, each in zip(SUFFIXES, (ring, trace), strict=True) if each is not None}
    good = [each for each in read.values() if "why" not in each]
    if not good:
        whys = (f"{path.name}{suffix}: {each['why']}" for suffix, each in read.items())
        return RankCalls(path.name, None, None, "; ".join(whys))
    rank = next((each["rank"] for each in good if each["rank"] is not None), None)
    process = f"process {trace['pid']}" if trace in good and trace is not None else path.name
    return RankCalls(
        process if rank is None else f"rank {rank}",
        rank,
        _ring_on_disk(path.with_suffix(".ring"), ring) if ring is not None and "why" not in ring else None,
        None,
        trace=parse_call_trace(trace) if trace is not None and "why" not in trace else None,
    )


def _tell_children_apart(found: list[RankCalls]) -> list[RankCalls]:
    """Return the records with one process for each rank: that with a ring, else the oldest.

    Its children, such as the workers of a data loader, have its number in their environment too.
    """
    first: dict[int, RankCalls] = {}
    for each in sorted(found, key=lambda each: (each.ring is None, each.trace.started if each.trace else 0.0)):
        if each.rank is not None:
            first.setdefault(each.rank, each)
    return [
        each
        if each.rank is None or each is first[each.rank] or each.trace is None
        else replace(each, rank=None, name=f"{each.name}, process {each.trace.pid}")
        for each in found
    ]


def _ring_on_disk(path: Path, document: Mapping[str, Any]) -> Ring:
    ring = parse_ring(document)
    return replace(ring, read=_last_known(path, ring))


def _last_known(path: Path, ring: Ring) -> float:
    """Return until when the rank was in the calls that it has not left, as far as a file on disk shows.

    A copy is made when the rank has ended. The time of a ring that is still mapped is that of its start.
    """
    written = path.stat().st_mtime
    return min(ring.read, written if written > ring.heartbeat else ring.heartbeat + HEARTBEAT_S)


def read_nodes(nodes: Iterable[Mapping[str, Any]]) -> list[RankCalls]:
    """Return the rings and call traces of ranks that a node agent has just read; else why there is none."""
    return [_of_rank(rank) for node in nodes for rank in node.get("ranks", [])]


def _of_rank(document: Mapping[str, Any]) -> RankCalls:
    samples = document["samples"]
    ring: Ring | None = next((parse_ring(each["ring"]) for each in reversed(samples) if "ring" in each), None)
    trace: CallTrace | None = next(
        (parse_call_trace(each["calls"]) for each in reversed(samples) if "calls" in each), None
    )
    said = next((each["ring_why"] for each in reversed(samples) if "ring_why" in each), None)
    why = said or document.get("why_no_rings") or "the program was not started with a ring"
    is_known = ring is not None or trace is not None
    return RankCalls(f"rank {document['rank']}", int(document["rank"]), ring, None if is_known else why, trace=trace)

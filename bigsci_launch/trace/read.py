"""Reads rings: copies in an attempt or a folder, or those of ranks that still run, on their nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bigsci_launch.runs.layout import AttemptDir, rank_files
from bigsci_launch.spy.evidence.calls.ring import Ring, parse_ring
from bigsci_launch.spy.look.ring_copies import NUM_LAST, copies_of, read_ring_files
from bigsci_launch.trace.last import RankCalls

NO_COPY = "it left no copy: it ended well, it still runs, or its node was lost"


def read_files(paths: Iterable[Path], num_last: int = NUM_LAST) -> list[RankCalls]:
    """Return what rings on disk say, `num_last` calls of each thread; one that cannot be read says why.

    Raises:
        CollectError: the program that reads them failed.
    """
    return [_of_file(path, document) for path, document in read_ring_files(paths, num_last).items()]


def read_copies(attempt: AttemptDir, num_last: int = NUM_LAST) -> list[RankCalls]:
    """Return the rings that ranks of an attempt have left; empty if none did. A rank that left none says so."""
    copies = copies_of(attempt)
    read = [replace(each, is_copy=True) for each in read_files(copies.values(), num_last)]
    without = [rank for rank in rank_files(attempt.pids, ".json") if rank not in copies] if copies else []
    return [*read, *(RankCalls(f"rank {rank}", rank, None, NO_COPY) for rank in without)]


def with_living(copies: Iterable[RankCalls], living: Iterable[RankCalls]) -> list[RankCalls]:
    """Return the ranks of both: what a node read of a rank just now, else the copy that it left.

    A task that still runs may have started ranks that the run does not know.
    """
    now = {each.rank: each for each in living}
    read = {rank: each for rank, each in now.items() if each.ring is not None}
    left = {each.rank: each for each in copies}
    found = [
        read.get(each.rank, each if each.ring is not None or each.why != NO_COPY else now.get(each.rank, each))
        for each in left.values()
    ]
    return [*found, *(each for rank, each in now.items() if rank not in left)]


def _of_file(path: Path, document: Mapping[str, Any]) -> RankCalls:
    if "why" in document:
        return RankCalls(path.stem, None, None, f"{path.name}: {document['why']}")
    rank = document["rank"]
    return RankCalls(path.stem if rank is None else f"rank {rank}", rank, parse_ring(document), None)


def read_nodes(nodes: Iterable[Mapping[str, Any]]) -> list[RankCalls]:
    """Return what the rings of ranks say that a node agent has just read; one without a ring says why."""
    return [_of_rank(rank) for node in nodes for rank in node.get("ranks", [])]


def _of_rank(document: Mapping[str, Any]) -> RankCalls:
    samples = document["samples"]
    ring: Ring | None = next((parse_ring(each["ring"]) for each in reversed(samples) if "ring" in each), None)
    said = next((each["ring_why"] for each in reversed(samples) if "ring_why" in each), None)
    why = said or document.get("why_no_rings") or "the program was not told to keep one"
    return RankCalls(f"rank {document['rank']}", int(document["rank"]), ring, None if ring else why)

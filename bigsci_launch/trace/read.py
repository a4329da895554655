"""Reads rings: copies in an attempt or a folder, or those of ranks that still run, on their nodes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bigsci_launch.content import packaged
from bigsci_launch.errors import CollectError
from bigsci_launch.runs.layout import AttemptDir, rank_files
from bigsci_launch.spy.evidence.calls.ring import Ring, parse_ring
from bigsci_launch.trace.last import RankCalls

READ_TIMEOUT_S = 120.0
NO_COPY = "it left no copy: it ended well, it still runs, or its node was lost"


def read_files(paths: Iterable[Path]) -> list[RankCalls]:
    """Return what rings on disk say; one that cannot be read says why.

    Raises:
        CollectError: the program that reads them failed.
    """
    files = sorted(paths)
    if not files:
        return []
    argv = [sys.executable, "-I", "-S", str(packaged("diagnostics", "node_ring.py")), *map(str, files)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=READ_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise CollectError(f"the rings could not be read: {done.stderr.strip()[-300:]}")
    return [_of_file(Path(path), document) for path, document in json.loads(done.stdout).items()]


def read_copies(attempt: AttemptDir) -> list[RankCalls]:
    """Return the rings that ranks of an attempt have left; empty if none did. A rank that left none says so."""
    copies = rank_files(attempt.rings, ".ring") if attempt.rings.is_dir() else {}
    without = [rank for rank in rank_files(attempt.pids, ".json") if rank not in copies] if copies else []
    return [*read_files(copies.values()), *(RankCalls(f"rank {rank}", rank, None, NO_COPY) for rank in without)]


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

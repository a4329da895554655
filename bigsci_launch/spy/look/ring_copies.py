"""Reads rings and call traces on disk: those that ranks of an attempt have left, or those in a folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bigsci_launch.content import packaged
from bigsci_launch.errors import CollectError
from bigsci_launch.runs.layout import AttemptDir, rank_files
from bigsci_launch.safe_files import parse_json

READ_TIMEOUT_S = 120.0
LARGEST_ANSWER = 1 << 32
"""Bytes of all calls of a node, which our own program prints."""
NUM_LAST = 32
"""Calls of each thread, as node agents send them."""


def read_ring_files(paths: Iterable[Path], num_last: int = NUM_LAST) -> dict[Path, dict[str, Any]]:
    """Return the content of each ring, as the node agent writes it, or {why} if it cannot be read.

    Of each thread the newest `num_last` calls are in it.

    Raises:
        CollectError: the program that reads them failed.
    """
    return _read_files("node_ring.py", paths, num_last)


def read_call_traces(paths: Iterable[Path], num_last: int = NUM_LAST) -> dict[Path, dict[str, Any]]:
    """Return the content of each call trace, as `read_ring_files` does for rings.

    Raises:
        CollectError: the program that reads them failed.
    """
    return _read_files("node_calls.py", paths, num_last)


def _read_files(program: str, paths: Iterable[Path], num_last: int) -> dict[Path, dict[str, Any]]:
    files = sorted(paths)
    if not files:
        return {}
    argv = [sys.executable, "-I", "-S", str(packaged("diagnostics", program)), str(num_last), *map(str, files)]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=READ_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise CollectError(f"{files[0].parent}: the calls could not be read within {error.timeout:g} s") from error
    if done.returncode != 0:
        raise CollectError(f"the calls could not be read: {done.stderr.strip()[-300:]}")
    try:
        found = parse_json(done.stdout, LARGEST_ANSWER, allow_nan=True)
    except ValueError as error:
        raise CollectError(f"{files[0].parent}: the calls could not be read: {error}") from error
    return {Path(path): document for path, document in found.items()}


def copies_of(attempt: AttemptDir) -> dict[int, Path]:
    """Return the rings that ranks of an attempt have left, by rank."""
    return rank_files(attempt.rings, ".ring") if attempt.rings.is_dir() else {}


def read_ring_copies(attempt: AttemptDir | None) -> list[dict[str, Any]]:
    """Return {rank, ring} of each copy that can be read, for a bundle."""
    found = copies_of(attempt) if attempt is not None else {}
    try:
        documents = read_ring_files(found.values())
    except CollectError:
        return []  # a verdict does not need them
    read = ((rank, documents[path]) for rank, path in found.items())
    return [{"rank": rank, "ring": document} for rank, document in read if "why" not in document]

"""The memory of bad nodes: one file for each folder of runs, with what was wrong, who saw it, and until when.

`examine` adds to it when an attempt ends. A file that cannot be read is an error and never means that
all nodes are good.
"""

from __future__ import annotations

import errno
import fcntl
import getpass
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bigsci_launch.errors import RunDirError
from bigsci_launch.runs.layout import read_json, write_json
from bigsci_launch.safe_files import open_lock

SCHEMA_VERSION = 1
DAY_S = 86400.0
LASTS_S = {
    "ecc": 7 * DAY_S,
    "gpu": 7 * DAY_S,
    "lost": DAY_S,
    "failed_check": DAY_S,
    "slow": DAY_S,
    "hang": DAY_S,
    "by_hand": None,
}
"""For how many seconds a node is left out, by reason. None: until it is forgiven."""
NODE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")
"""A name of a node, for Slurm and for DNS. It goes into options of Slurm and into lines that people read."""
LOCK_TIMEOUT_S = 10.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)


@dataclass(frozen=True, slots=True)
class BadNode:
    """A node that is left out, and why. Times are seconds since the epoch; `expires` None: until it is forgiven.

    `cluster` is None if its name was not known: the entry then holds for every cluster. `run`, `attempt` and `rank` say
    where it was seen; None where that does not apply.
    """

    cluster: str | None
    node: str
    reason: str
    evidence: str
    since: float
    expires: float | None
    run: str | None = None
    attempt: str | None = None
    rank: int | None = None
    by: str | None = None

    def is_left_out(self, now: float, cluster: str | None) -> bool:
        """Whether the node is left out of jobs on `cluster`; None if its name is not known."""
        is_here = self.cluster is None or cluster is None or self.cluster == cluster
        return is_here and (self.expires is None or self.expires > now)

    @property
    def seen_in(self) -> str:
        """`run demo, attempt 0002, rank 3`; empty if no run has seen it."""
        parts = (("run", self.run), ("attempt", self.attempt), ("rank", self.rank))
        return ", ".join(f"{name} {value}" for name, value in parts if value is not None)


def make_entry(node: str, reason: str, evidence: str, *, cluster: str | None, days: float | None = None) -> BadNode:
    """Return an entry that begins now and lasts for `days`; default: as long as its reason usually does.

    Raises:
        RunDirError: that is not a node name.
    """
    if not NODE_NAME.fullmatch(node):
        raise RunDirError(f"{node!r:.80} is not a node name", hint="`sinfo --Node` lists those of the cluster")
    now = time.time()
    lasts_s = LASTS_S[reason] if days is None else days * DAY_S
    expires = None if lasts_s is None else now + lasts_s
    return BadNode(cluster, node, reason, evidence, now, expires, by=getpass.getuser())


def read_nodes(memory: Path) -> list[BadNode]:
    """Return every entry of the memory, also those that have expired, oldest first. No file: none was bad yet.

    Raises:
        RunDirError: the file cannot be read, is damaged, or was written by a later version.
    """
    if not os.path.lexists(memory):
        return []
    document = read_json(memory)
    version = document.get("schema_version") if isinstance(document, dict) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise RunDirError(
            f"{memory}: schema_version {version} is of a later version of bsl",
            hint="use that version: without this file, bad nodes would be used again",
        )
    try:
        entries = [_entry(record) for record in document["nodes"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunDirError(
            f"{memory}: not a list of bad nodes ({error!r})",
            hint="repair it, or remove it if no node needs to be left out",
        ) from error
    return sorted(entries, key=lambda entry: entry.since)


def _entry(record: dict[str, object]) -> BadNode:
    names = BadNode.__dataclass_fields__
    entry = BadNode(**{name: record[name] for name in names if name in record})  # type: ignore[arg-type]
    if not isinstance(entry.node, str) or not NODE_NAME.fullmatch(entry.node):
        raise ValueError(f"{entry.node!r:.80} is not a node")
    if not isinstance(entry.since, (int, float)) or not isinstance(entry.expires, (int, float, type(None))):
        raise ValueError(f"{entry.node}: since and expires are not times")
    return entry


def left_out(entries: Iterable[BadNode], *, cluster: str | None, now: float) -> list[BadNode]:
    """Return the entries that hold now on a cluster."""
    return [entry for entry in entries if entry.is_left_out(now, cluster)]


def add_nodes(memory: Path, entries: Sequence[BadNode]) -> None:
    """Add entries. One with the same cluster, node and reason is replaced.

    Raises:
        RunDirError: the memory cannot be read, locked or written.
    """
    keys = {(entry.cluster, entry.node, entry.reason) for entry in entries}
    _change(
        memory, lambda known: [*(one for one in known if (one.cluster, one.node, one.reason) not in keys), *entries]
    )


def forgive_nodes(memory: Path, nodes: Iterable[str] | None, *, cluster: str | None) -> list[BadNode]:
    """Remove the entries of `nodes` on a cluster (None: of all nodes there), and return what was removed.

    Raises:
        RunDirError: the memory cannot be read, locked or written.
    """
    wanted = None if nodes is None else set(nodes)
    forgiven: list[BadNode] = []

    def without(known: list[BadNode]) -> list[BadNode]:
        forgiven[:] = [
            one
            for one in known
            if (wanted is None or one.node in wanted) and (cluster is None or one.cluster in (None, cluster))
        ]
        return [one for one in known if one not in forgiven]

    if os.path.lexists(memory):
        _change(memory, without)
    return forgiven


def _change(memory: Path, change: Callable[[list[BadNode]], list[BadNode]]) -> None:
    def changed() -> list[dict[str, Any]]:
        return [asdict(entry) for entry in change(read_nodes(memory))]

    change_memory(memory, lambda: {"schema_version": SCHEMA_VERSION, "nodes": changed()})


def change_memory(memory: Path, make: Callable[[], object]) -> None:
    """Write the document that `make` returns, while no other process can change the file.

    Raises:
        RunDirError: the memory cannot be read, locked or written.
    """
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        with _locked(memory):
            write_json(memory, make())
    except OSError as error:
        raise RunDirError(
            f"{memory}: {error.strerror or error}", hint="ask the owner of the folder for write access to it"
        ) from error


@contextmanager
def _locked(memory: Path) -> Iterator[None]:
    """Keep others from changing the memory. Without locks of the file system, the rename still keeps it whole."""
    handle = open_lock(memory.with_name(f".{memory.name}.lock"))
    try:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while not _try_lock(handle):
            if time.monotonic() > deadline:
                raise RunDirError(f"{memory}: locked by another bsl for {LOCK_TIMEOUT_S:g} s", hint="try again")
            time.sleep(0.05)
        yield
    finally:
        os.close(handle)


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True

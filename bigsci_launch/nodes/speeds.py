"""The memory of how fast nodes were: one file for each folder of runs. A watcher adds to it, and `bsl nodes` reads it.

A node is compared with the others of the same run that did the same work. It counts as slow if that was so in several
runs: in one, its share of the work may have been larger.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from bigsci_launch.nodes.memory import DAY_S, NODE_NAME, change_memory
from bigsci_launch.runs.layout import read_record
from bigsci_launch.runs.watching.typed import typed

SCHEMA_VERSION = 1
SLOW = 1.05
"""How many times longer than the others a node needs that is slow in a run."""
MIN_RUNS = 2
MOST_RUNS = 20
LASTS_S = 30 * DAY_S


@dataclass(frozen=True, slots=True)
class NodeSpeed:
    """How many times longer than the others of a run the slowest rank of a node needed, when it was `seen` last.

    `cluster` is None if its name was not known.
    """

    cluster: str | None
    node: str
    run: str
    attempt: str
    times_longer: float
    seen: float


@dataclass(frozen=True, slots=True)
class OftenSlow:
    """A node that was slow in `slow_runs` of its newest `runs`: by `times_longer` in the typical one of these."""

    node: str
    slow_runs: int
    runs: int
    times_longer: float
    newest_run: str


def read_speeds(memory: Path) -> list[NodeSpeed]:
    """Return what is remembered, oldest first. What cannot be read is left out: it only advises."""
    if not os.path.lexists(memory):
        return []
    records = read_record(memory).get("speeds")
    found = []
    for record in records if isinstance(records, list) else ():
        with suppress(ValueError):
            if NODE_NAME.fullmatch((speed := typed(NodeSpeed, record)).node):
                found.append(speed)
    return sorted(found, key=lambda each: each.seen)


def add_speeds(memory: Path, speeds: Sequence[NodeSpeed]) -> None:
    """Remember speeds. Those of the same node in the same run are replaced, and the oldest are forgotten.

    Raises:
        RunDirError: the memory cannot be locked or written.
    """
    keys = {(each.cluster, each.node, each.run) for each in speeds}

    def make() -> dict[str, object]:
        known = [each for each in read_speeds(memory) if (each.cluster, each.node, each.run) not in keys]
        kept = _newest([*known, *speeds])
        return {"schema_version": SCHEMA_VERSION, "speeds": [asdict(each) for each in kept]}

    change_memory(memory, make)


def _newest(speeds: Iterable[NodeSpeed]) -> Iterator[NodeSpeed]:
    for of_node in _by_node(speeds).values():
        yield from of_node[-MOST_RUNS:]


def _by_node(speeds: Iterable[NodeSpeed]) -> Mapping[tuple[str | None, str], list[NodeSpeed]]:
    found: dict[tuple[str | None, str], list[NodeSpeed]] = {}
    for each in speeds:
        found.setdefault((each.cluster, each.node), []).append(each)
    return found


def often_slow(speeds: Iterable[NodeSpeed], *, cluster: str | None, now: float) -> list[OftenSlow]:
    """Return the nodes of a cluster (None: of all) that were slow in at least half of their runs of late, the slowest
    first."""
    of_late = (each for each in speeds if now - each.seen < LASTS_S)
    here = (each for each in of_late if cluster is None or each.cluster in (None, cluster))
    found = []
    for (_, node), runs in _by_node(here).items():
        slow = [each for each in runs if each.times_longer >= SLOW]
        if len(slow) >= max(MIN_RUNS, len(runs) / 2):
            longer = median(each.times_longer for each in slow)
            found.append(OftenSlow(node, len(slow), len(runs), longer, slow[-1].run))
    return sorted(found, key=lambda each: -each.times_longer)

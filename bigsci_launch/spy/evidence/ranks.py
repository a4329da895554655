"""What was seen of a job, as values: samples of ranks, nodes that kept silent, records of the run.

The values are built from the plain documents of a bundle, so that a live and a later analysis share the same code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from bigsci_launch.spy.evidence.calls.flight_recorder import Recorder, parse_recorder
from bigsci_launch.spy.evidence.calls.ring import Ring, parse_ring
from bigsci_launch.spy.evidence.kernel import (
    Connections,
    FileLock,
    MemoryEvents,
    Socket,
    parse_connections,
    parse_locks,
    parse_memory_events,
    parse_sockets,
)
from bigsci_launch.spy.evidence.numbering import (
    NO_NAME,
    NumberedBy,
    Numbering,
    OtherProcess,
    WaitingLauncher,
    list_processes,
    numbering_of,
    parse_others,
    parse_source,
    parse_waiting_launcher,
)
from bigsci_launch.spy.evidence.run_facts import (
    Exit,
    Failure,
    Heartbeat,
    NewLines,
    Restarts,
    RunRecords,
    parse_end,
    parse_printed,
    parse_restarts,
)
from bigsci_launch.spy.evidence.samples import GONE_STATES, Sample, parse_samples
from bigsci_launch.spy.evidence.stacks import ThreadStack, decisive_thread
from bigsci_launch.spy.evidence.steps import without_other_steps
from bigsci_launch.topology import Coordinate, Topology, compress_ranks
from bigsci_launch.topology.naming import count_ranks, name_part, name_ranks

FILES = "files"
"""How the ranks of a document were found if it was made from the files of other tools."""
NOT_FOUND = "no process was found for it"
NOT_IDENTIFIED = "it is none of the processes that could be identified"
ELSEWHERE = "no process was found for it below --pid, where only some of the ranks were started"
NOT_STARTED = "no process was found for it, and the others began only a moment ago"
NO_FILE = "no file holds it"
GONE = {"mono": None, "state": "gone", "why": "its job has ended"}
"""What is seen of a rank whose job has ended."""
MOST_RANKS = 1 << 20
YOUNG_S = 3.0
"""Ranks are started one after the other: while the youngest is younger than this, others may be about to begin."""
TOPOLOGY_UNUSED = "coordinates are left out: it is unknown which process is which rank"
TOPOLOGY_OF_TASKS = "coordinates are left out: the run counts its tasks, and these have started more ranks"
UNREADABLE = "its environment cannot be read"
"""The reason that the node agent gives for a process that it could not identify: it may be any rank."""


@dataclass(frozen=True)
class RankEvidence:
    """All that was seen of one rank. A rank without samples was not reached, and `unreached` is the reason."""

    rank: int
    node: str
    pid: int | None
    clock_ticks_per_s: int
    samples: tuple[Sample, ...]
    recorder: Recorder | None
    exit: Exit | None = None
    error: str | None = None
    """Type and message of the uncaught exception that the rank recorded."""
    unreached: str | None = None
    failure: Failure | None = None
    heartbeat: Heartbeat | None = None
    sockets: tuple[Socket, ...] = ()
    connections: Connections | None = None
    """All of its connections, or None if they are not known."""
    memory_events: MemoryEvents | None = None
    numbered_by: NumberedBy = NumberedBy.UNKNOWN
    ring: Ring | None = None
    store: str = ""
    """Where it looks for the store: MASTER_ADDR and MASTER_PORT in its environment."""

    @property
    def last(self) -> Sample | None:
        return self.samples[-1] if self.samples else None

    @cached_property
    def threads(self) -> tuple[ThreadStack, ...] | None:
        """The newest stacks."""
        return next((sample.threads for sample in reversed(self.samples) if sample.threads is not None), None)

    @cached_property
    def thread(self) -> ThreadStack | None:
        """The thread that decides, in the newest sample that has stacks."""
        return decisive_thread(self.threads, self.pid or 0) if self.threads else None

    @cached_property
    def family(self) -> frozenset[int]:
        """The pids of the process and of its children."""
        children = (self.last.children or ()) if self.last else ()
        return frozenset(filter(None, (self.pid, *(child.pid for child in children))))

    @property
    def place(self) -> str:
        """Where that thread is, in words: `load_batch (train.py:88)`."""
        thread = self.thread
        return str(thread.site) if thread and thread.site else "a place that its stack does not show"

    @cached_property
    def is_gone(self) -> bool:
        """Whether the process has ended."""
        return self.exit is not None or (self.last is not None and self.last.state in GONE_STATES)

    @property
    def was_out_of_reach(self) -> bool:
        """Whether the place where the rank may be was not searched, so that its absence means nothing."""
        return self.unreached in (ELSEWHERE, NO_FILE)

    @property
    def why_unreadable(self) -> str | None:
        """Why there is no stack of a living process, and what it wrote of itself, if it did; or None."""
        if self.threads or self.is_gone:
            return None
        if self.last is None:
            return self.unreached or "it was not found"
        if self.last.state == "?":
            return self.last.why or "no stack"
        kernel = f"state {self.last.state}" + (f", {self.last.wchan}" if self.last.wchan else "")
        written = f"; it is in {self.ring.stacks.place}" if self.ring and self.ring.stacks else ""
        return f"{self.last.why or 'no stack'} ({kernel}){written}"


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that the engine judges."""

    job: str | None
    world_size: int
    topology: Topology | None
    ranks: tuple[RankEvidence, ...]
    nodes_silent: tuple[tuple[str, str], ...]
    problems: tuple[str, ...]
    """What the node agents could not do, each with the name of its node."""
    locks: tuple[FileLock, ...] = ()
    others: tuple[OtherProcess, ...] = ()
    """Processes of the job that are no ranks."""
    steps_left_out: tuple[str, ...] = ()
    """Steps of the job whose processes were not taken for ranks, in words."""
    is_over: bool = False
    """Whether the job had ended, so that no node was asked."""
    printed: tuple[NewLines, ...] = ()
    """What ranks have printed during the look."""
    looked: float | None = None
    """When the look began, in seconds since the epoch."""
    asked: str = ""
    """What the user named on the command line, such as `--jobid 1234`."""
    scheduler: str = ""
    """What runs commands on the nodes; empty if nothing does."""
    job_id: str = ""
    """The job whose nodes they are, as its scheduler takes it."""
    het_groups: Mapping[str, int] = field(default_factory=dict)
    """Of a heterogeneous job: the component of each node."""
    restarts: Restarts | None = None
    launcher: WaitingLauncher | None = None
    """A launcher that has started no rank yet, and waits for other nodes."""
    py_spy: Mapping[str, str] = field(default_factory=dict)
    """What to type for py-spy on each node."""

    @property
    def is_from_files(self) -> bool:
        """Whether all was read from files of other tools."""
        return all(seen.numbered_by.is_of_files for seen in self.ranks if seen.samples)

    @property
    def numbering(self) -> Numbering:
        """Whether the numbers of the ranks that were found are known. If not, a number means nothing by itself."""
        return numbering_of([seen.numbered_by for seen in self.ranks if seen.pid is not None or seen.samples])

    def is_numbered(self, rank: int) -> bool:
        """Whether the number of `rank` is known. Where processes were only counted, any may be one that is missing."""
        if rank >= len(self.ranks):
            return True
        seen = self.ranks[rank]
        if not seen.numbered_by.is_known:
            # A dump of the recorder names no process: a number in its name is all that there is to call it.
            is_named = seen.pid is None and seen.numbered_by is not NumberedBy.FILE_ORDER
            return seen.numbered_by.is_placed and (self.topology is not None or is_named)
        was_found = seen.pid is not None or bool(seen.samples)
        return was_found or self.topology is not None or self.numbering is Numbering.KNOWN

    def coordinate(self, rank: int) -> Coordinate | None:
        """Return the coordinate of `rank`, or None if the topology or the number is not known."""
        known = self.topology is not None and rank < self.topology.world_size and self.is_numbered(rank)
        return self.topology.coordinate(rank) if known and self.topology else None

    def part(self, ranks: Collection[int]) -> str:
        """Which part of the grid `ranks` are: `pp3 tp0-1`. Empty if that is not a part of it."""
        return name_part(ranks, self.topology) if self.topology and all(map(self.is_numbered, ranks)) else ""

    def name(self, rank: int) -> str:
        """Return `rank 5 (n2, dp0 pp1 tp1)` or `process 4711 (n2)`: the name of a rank in every sentence."""
        # Every rank of the world is there, in order.
        node = self.ranks[rank].node if rank < len(self.ranks) else ""
        parts = [part for part in (node, str(self.coordinate(rank) or "")) if part]
        name = self.short_name(rank)
        return f"{name} ({', '.join(parts)})" if parts else name

    def short_name(self, rank: int) -> str:
        """Return `rank 5` or `process 4711`."""
        return self.names((rank,))

    def names(self, ranks: Collection[int]) -> str:
        """Return `ranks 3-5`, `processes 4711, 4712 and 2 more`, or both."""
        numbered = [rank for rank in ranks if self.is_numbered(rank)]
        pids = [self._pid_or_place(rank) for rank in ranks if not self.is_numbered(rank)]
        if pids == [None]:
            counted = "a process that was not found"
        else:
            counted = f"{'process' if len(pids) == 1 else 'processes'} {list_processes(pids)}"
        return " and ".join(([name_ranks(numbered)] if numbered else []) + ([counted] if pids else []))

    def list_names(self, ranks: Collection[int]) -> str:
        """Return `3-5`, or `4711, 4712 and 2 more`: the names without the noun."""
        if all(map(self.is_numbered, ranks)):
            return compress_ranks(ranks)
        if any(map(self.is_numbered, ranks)):
            return self.names(ranks)
        return list_processes([self._pid_or_place(rank) for rank in ranks])

    def _pid_or_place(self, rank: int) -> int | str | None:
        """What tells a process apart whose rank is not known: `#3` is the third in files that do not show its pid."""
        seen = self.ranks[rank]
        return f"#{rank + 1}" if seen.pid is None and seen.numbered_by is NumberedBy.FILE_ORDER else seen.pid

    def count(self, ranks: Collection[int]) -> str:
        """Return `3 ranks`, or `3 processes` if the number of one of them is not known."""
        words = count_ranks(ranks)
        if all(map(self.is_numbered, ranks)):
            return words
        return "1 process" if len(ranks) == 1 else words.replace("ranks", "processes")


def read_evidence(collection: Mapping[str, Any], nodes: Iterable[Mapping[str, Any]]) -> Evidence:
    """Return the evidence in the documents of a bundle: `collection`, and one document per node that answered."""
    nodes, left_out = without_other_steps(sorted(nodes, key=lambda node: str(node["node"])))
    problems = tuple(f"{node['node']}: {problem}" for node in nodes for problem in node.get("problems", []))
    records = RunRecords(collection)

    found = _with_rings(_found_ranks(nodes, records))
    is_counted = any(not seen.numbered_by.is_placed for seen in found.values())
    world_size = _world_size(collection, nodes, found)
    why_missing = _why_missing(nodes, problems, found, world_size)

    def unreached(record: Mapping[str, Any]) -> RankEvidence:
        return _unreached_rank(record, collection, why_missing, records)

    for record in collection.get("expected", []):
        found.setdefault(int(record["rank"]), unreached(record))
    world_size = max([world_size, *(rank + 1 for rank in found)], default=0)
    if world_size > MOST_RANKS:
        raise ValueError(f"its world size is {world_size}")
    for rank in range(world_size):
        found.setdefault(rank, unreached({"rank": rank}))
    found = _with_copies(found, collection)
    topology = collection.get("topology")
    if topology and Topology.parse(topology).world_size < max(_sizes_of_workers(collection, nodes), default=0):
        topology, problems = None, (*problems, TOPOLOGY_OF_TASKS)
    if topology and is_counted:
        topology, problems = None, (*problems, TOPOLOGY_UNUSED)
    return Evidence(
        job=collection.get("job"),
        world_size=world_size,
        topology=Topology.parse(topology) if topology else None,
        ranks=tuple(found[rank] for rank in sorted(found)),
        nodes_silent=tuple((str(silent["node"]), str(silent["why"])) for silent in collection.get("nodes_silent", [])),
        problems=problems,
        locks=tuple(lock for node in nodes for lock in parse_locks(node)),
        others=tuple(other for node in nodes for other in parse_others(node)),
        steps_left_out=tuple(left_out),
        is_over=bool(collection.get("is_over")),
        printed=parse_printed(collection),
        looked=collection.get("time"),
        asked=str(collection.get("asked") or ""),
        scheduler=str(collection.get("scheduler") or ""),
        job_id=str(collection.get("job_id") or ""),
        het_groups=collection.get("het_groups") or {},
        restarts=parse_restarts(nodes),
        launcher=next(filter(None, map(parse_waiting_launcher, nodes)), None),
        py_spy={
            str(node["node"]): "py-spy" if node["py_spy"] == collection.get("py_spy") else str(node["py_spy"])
            for node in nodes
            if node.get("py_spy")
        },
    )


def _found_ranks(nodes: Sequence[Mapping[str, Any]], records: RunRecords) -> dict[int, RankEvidence]:
    """Return the ranks that were found. Processes that were only counted, on each node, get numbers that are free."""
    found: dict[int, RankEvidence] = {}
    counted: list[RankEvidence] = []
    steps = _largest_steps_first(nodes)
    for node in nodes:
        for document in sorted(node.get("ranks", []), key=lambda rank: steps.index(rank.get("step"))):
            seen = _parse_rank(document, node, records)
            if seen.numbered_by.is_placed:
                found.setdefault(seen.rank, seen)
            else:
                counted.append(seen)
    free = (number for number in range(len(found) + len(counted)) if number not in found)
    for seen, number in zip(counted, list(free), strict=False):
        found[number] = replace(seen, rank=number)
    return found


def _with_rings(found: Mapping[int, RankEvidence]) -> dict[int, RankEvidence]:
    """Take the collectives from the rings if more of the ranks that live have a ring than torch's own record.

    The two number collectives differently, so that they cannot be compared with each other. A ring that had no room for
    a thread may lack collectives, and numbers them wrongly.
    """
    rings = {rank: seen.ring for rank, seen in found.items() if seen.ring and not seen.ring.lost_threads}
    living = [seen for seen in found.values() if not seen.is_gone]
    if sum(seen.rank in rings for seen in living) <= sum(bool(seen.recorder) for seen in living):
        return dict(found)
    return {
        rank: replace(seen, recorder=rings[rank].recorder if rank in rings else None) for rank, seen in found.items()
    }


def _with_copies(found: Mapping[int, RankEvidence], collection: Mapping[str, Any]) -> dict[int, RankEvidence]:
    """Give ranks that are gone the rings that they have left."""
    copies = {int(copy["rank"]): copy["ring"] for copy in collection.get("rings") or []}
    return {
        rank: replace(seen, ring=parse_ring(copies[rank])) if rank in copies and _lacks_ring(seen) else seen
        for rank, seen in found.items()
    }


def _lacks_ring(seen: RankEvidence) -> bool:
    return seen.ring is None and seen.is_gone


def _why_missing(
    nodes: Sequence[Mapping[str, Any]], problems: Sequence[str], found: Mapping[int, RankEvidence], world_size: int
) -> str:
    """Why nothing is known about a rank that none of `nodes` reports, although all of them answered."""
    if any(UNREADABLE in problem for problem in problems):
        return NOT_IDENTIFIED
    if not all(seen.numbered_by.is_placed for seen in found.values()):
        return NOT_IDENTIFIED
    if any(other.role == "unknown" for node in nodes for other in parse_others(node)):
        return NOT_IDENTIFIED
    if any(node.get("found_by") == FILES for node in nodes):
        return NO_FILE
    if _is_one_launcher_of_several(nodes) or _is_minor_part(nodes, found, world_size):
        return ELSEWHERE
    ages = [rank["age_s"] for node in nodes for rank in node.get("ranks", []) if rank.get("age_s") is not None]
    return NOT_STARTED if ages and min(ages) < YOUNG_S else NOT_FOUND


def _is_minor_part(nodes: Sequence[Mapping[str, Any]], found: Mapping[int, RankEvidence], world_size: int) -> bool:
    """Whether less than half of the world was found below a launcher, all in one piece: others may have the rest."""
    is_below = any(str(node.get("found_by")).startswith("descendants") for node in nodes)
    is_one_piece = bool(found) and max(found) - min(found) + 1 == len(found)
    return is_below and is_one_piece and 2 * len(found) < world_size


def _is_one_launcher_of_several(nodes: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the search was below a launcher that, according to its ranks, started only a part of the world."""
    below = [node for node in nodes if str(node.get("found_by")).startswith("descendants")]
    sizes = [(rank.get("local_world_size"), rank.get("world_size")) for node in below for rank in node["ranks"]]
    return any(local and world and local < world for local, world in sizes)


def _largest_steps_first(nodes: Iterable[Mapping[str, Any]]) -> list[Any]:
    """The job steps in which ranks were found, the one with most ranks first: a rank found twice is taken from it."""
    counts = Counter(rank.get("step") for node in nodes for rank in node.get("ranks", []))
    return sorted(counts, key=lambda step: (-counts[step], str(step)))


def _world_size(
    collection: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]], found: Mapping[int, RankEvidence]
) -> int:
    said = [int(rank["world_size"]) for node in nodes for rank in node.get("ranks", []) if rank.get("world_size")]
    expected = int(collection.get("world_size") or 0) or max(said, default=0)
    return max([expected, *_sizes_of_workers(collection, nodes), *(rank + 1 for rank in found)], default=0)


def _sizes_of_workers(collection: Mapping[str, Any], nodes: Iterable[Mapping[str, Any]]) -> Iterator[int]:
    """Yield what rings show of the world, whose ranks may be workers that the tasks of a run have started."""
    living = (rank for node in nodes for rank in node.get("ranks", []) if rank.get("source") == NumberedBy.RING.value)
    left = (copy["ring"] for copy in collection.get("rings") or [] if collection.get("is_over"))
    for document in (*living, *left):
        yield int(document.get("world_size") or 0)


def _unreached_rank(
    record: Mapping[str, Any],
    collection: Mapping[str, Any],
    why_missing: str,
    records: RunRecords,
) -> RankEvidence:
    silent = {str(item["node"]): str(item["why"]) for item in collection.get("nodes_silent", [])}
    node = str(record.get("node") or "")
    if not node and len(silent) == 1:
        node = next(iter(silent))
    if node in silent:
        why = f"node {node} is silent: {silent[node]}"
    else:
        why = f"{len(silent)} nodes are silent, and it may be on any of them" if silent and not node else why_missing
    return RankEvidence(
        rank=int(record["rank"]),
        node=node,
        pid=record.get("pid"),
        clock_ticks_per_s=100,
        samples=parse_samples([GONE], 0) if collection.get("is_over") else (),
        recorder=None,
        **records.of(int(record["rank"])),
        unreached=why,
    )


def _parse_rank(document: Mapping[str, Any], node: Mapping[str, Any], records: RunRecords) -> RankEvidence:
    recorders = [sample["recorder"] for sample in document["samples"] if "stream" in sample.get("recorder", {})]
    rings = [sample["ring"] for sample in document["samples"] if "ring" in sample]
    found = records.of(int(document["rank"]))
    if found.get("exit") is None and document.get("end"):
        found = {**found, "exit": parse_end(document["end"], node)}
    return RankEvidence(
        rank=int(document["rank"]),
        node=str(node["node"]),
        pid=document.get("pid"),
        clock_ticks_per_s=int(node.get("clock_ticks_per_s") or 100),
        samples=parse_samples(document["samples"], int(document.get("pid") or 0)),
        recorder=parse_recorder(recorders[-1]) if recorders else None,
        **found,
        store=NO_NAME.sub("?", str(document.get("store") or "")),
        sockets=parse_sockets(document["samples"]),
        connections=parse_connections(document["samples"], str(node["node"])),
        memory_events=parse_memory_events(document["samples"]),
        ring=parse_ring(rings[-1]) if rings else None,
        numbered_by=parse_source(document.get("source"), node.get("found_by") == FILES),
    )

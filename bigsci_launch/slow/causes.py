"""Why a rank is slow, from what its node has counted before and after a look. Each sentence is read, not assumed. Pure.

A cause is one that could slow its rank down. Whether it does, the looks say: it is reported for ranks that are slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bigsci_launch.printable import one_line
from bigsci_launch.spy.evidence.bundle import Bundle
from bigsci_launch.topology import compress_ranks

Counters = Mapping[str, Any]

LEAST_THROTTLED = 0.02
LEAST_ON_CORES, LEAST_LATE = 0.25, 0.05
LEAST_CLOCK = 0.8
LEAST_STOLEN = 0.05
LEAST_BLOCKED = 0.1
LEAST_AGAIN = 0.001
LEAST_AGAIN_COUNT = 10
LEAST_FREE = 0.01
FAULTS_PER_S = 10
PAGES_PER_S = 10
SLOW_TRIP_US = 5000
TIMES_USUAL = 4
GIB = 1 << 20
SLOWED_BY = {
    0x4: "its power limit", 0x8: "a hardware slowdown", 0x20: "its temperature", 0x40: "its temperature (hardware)",
    0x80: "a power brake",
}  # fmt: skip
"""Bits of clocks_throttle_reasons.active, from NVML's header."""


@dataclass(frozen=True, slots=True)
class Counted:
    """A rank and its node: the counters of both before and after the look, and what else the node has."""

    rank: int
    before: Counters
    after: Counters
    record: Counters
    node: Counters
    neighbours: Mapping[int, Counters]
    """The last counters of all ranks of the node, this one too."""

    @property
    def seconds(self) -> float:
        return max(1e-3, float(self.after["mono"] - self.before["mono"]))

    def rise(self, name: str) -> float | None:
        """By how much a counter of the rank has risen; None if it was not read twice."""
        return _rise(self.before, self.after, name)

    def rise_of_node(self, name: str) -> float | None:
        before, after = self.machine
        return _rise(before, after, name)

    @property
    def machine(self) -> tuple[Counters, Counters]:
        found: Sequence[Counters] = self.node.get("machine") or [{}]
        return found[0], found[-1]

    @property
    def cores(self) -> tuple[int, ...]:
        return tuple(self.after.get("cores", ()))


def _rise(before: Counters, after: Counters, name: str) -> float | None:
    first, last = before.get(name), after.get(name)
    return None if first is None or last is None else float(last - first)


def causes_by_rank(bundle: Bundle) -> dict[int, tuple[str, ...]]:
    """Return the causes that the nodes of a bundle show, by rank."""
    evidence = bundle.evidence()
    known = {(each.node, each.pid): each.rank for each in evidence.ranks}
    found: dict[int, tuple[str, ...]] = {}
    for document in bundle.nodes:
        places = list(_places(document, known))
        found |= {place.rank: causes_of(place) for place in places}
    return {rank: causes for rank, causes in found.items() if causes}


def _places(document: Mapping[str, Any], known: Mapping[tuple[str, int | None], int]) -> Iterator[Counted]:
    node = str(document["node"])
    ranks = [(known.get((node, record["pid"])), record) for record in document["ranks"]]
    read = {rank: record for rank, record in ranks if rank is not None and record.get("counters")}
    neighbours = {rank: record["counters"][-1] for rank, record in read.items()}
    for rank, record in read.items():
        yield Counted(rank, record["counters"][0], record["counters"][-1], record, document, neighbours)


def causes_of(place: Counted) -> tuple[str, ...]:
    """Return all that could slow this rank down."""
    return tuple(sentence for find in CAUSES if (sentence := find(place)) is not None)


def limited_by_quota(place: Counted) -> str | None:
    """A limit of CPU time held the rank up."""
    before = {each["cgroup"]: each for each in place.before.get("quotas", ())}
    for quota in place.after.get("quotas", ()):
        if (first := before.get(quota["cgroup"])) is None:
            continue
        times, periods = quota["throttled"] - first["throttled"], quota["periods"] - first["periods"]
        if periods > 0 and times / periods > LEAST_THROTTLED:
            return (
                f"a CPU quota of {quota['cores']:.2g} cores held it up in {times} of {periods} periods "
                f"(cgroup {one_line(str(quota['cgroup']))})"
            )
    return None


def shares_its_core(place: Counted) -> str | None:
    """Ranks are bound to fewer cores than they are."""
    together = [rank for rank, counters in place.neighbours.items() if tuple(counters.get("cores", ())) == place.cores]
    is_bound = len(place.cores) < place.machine[1].get("num_cores", 0)
    if not is_bound or len(together) <= len(place.cores):
        return None
    cores = f"core {place.cores[0]}" if len(place.cores) == 1 else f"cores {compress_ranks(place.cores)}"
    return f"ranks {compress_ranks(together)} are bound to {cores}"


def meets_other_processes(place: Counted) -> str | None:
    """Processes that are no ranks ran on its cores, and the rank was ready without a core."""
    late = _waited_for_core(place)
    if late is None or late < LEAST_LATE or not place.cores:
        return None
    used = {
        (process["pid"], process["comm"]): sum(process["cpu_s"].get(str(core), 0.0) for core in place.cores)
        for process in place.node.get("processes", ())
    }
    share = sum(used.values()) / place.seconds / len(place.cores)
    if share < LEAST_ON_CORES:
        return None
    pid, comm = max(used, key=lambda process: used[process])
    cores = f"core {place.cores[0]}" if len(place.cores) == 1 else f"its {len(place.cores)} cores"
    most = used[pid, comm] / sum(used.values())
    return (
        f"processes that are no ranks took {share:.0%} of {cores}, {most:.0%} of that process {pid} "
        f"({one_line(str(comm))}), and the rank was ready without a core for {late:.0%} of the time"
    )


def _waited_for_core(place: Counted) -> float | None:
    before, after = place.before.get("schedule"), place.after.get("schedule")
    rise = _rise(before, after, "delay_ns") if before and after else None
    return None if rise is None else rise / 1e9 / place.seconds


def has_slow_clock(place: Counted) -> str | None:
    """Its cores run below the clock that they are made for, or were slowed down for their temperature."""
    before, after = (each.get("cores") or {} for each in place.machine)
    for core in place.cores:
        clocks, first = after.get(str(core), {}), before.get(str(core), {})
        hot = _rise(first, clocks, "throttled")
        if hot:
            return f"core {core} was slowed down for its temperature {hot:.0f} times"
        base = clocks.get("base_khz")
        if base and "limit_khz" in clocks and clocks["limit_khz"] < LEAST_CLOCK * base:
            return f"core {core} is limited to {clocks['limit_khz'] / 1e6:.2g} GHz of {base / 1e6:.2g} GHz"
        slow = [each["khz"] for each in (first, clocks) if "khz" in each]
        if base and slow and max(slow) < LEAST_CLOCK * base:
            return f"core {core} runs at {max(slow) / 1e6:.2g} GHz, and is made for {base / 1e6:.2g} GHz"
    return None


def loses_time_to_hypervisor(place: Counted) -> str | None:
    """The hypervisor gave its cores to other machines."""
    before, after = (each.get("stolen_ticks") or {} for each in place.machine)
    rises = [_rise(before, after, str(core)) or 0.0 for core in place.cores]
    share = sum(rises) / (place.seconds * len(rises) * place.node["clock_ticks_per_s"]) if rises else 0.0
    return f"the hypervisor took {share:.0%} of the time of its cores" if share >= LEAST_STOLEN else None


def is_swapped(place: Counted) -> str | None:
    """The node moves pages to and from swap, and the rank waits for pages or has some there."""
    moved = [place.rise_of_node(name) or 0.0 for name in ("swapped_in", "swapped_out")]
    if sum(moved) / place.seconds < PAGES_PER_S or not place.after.get("swapped_kib"):
        return None
    return (
        f"{place.after['swapped_kib'] / GIB:.2g} GiB of it are in swap, and the node moved {moved[0]:.0f} pages in and "
        f"{moved[1]:.0f} out"
    )


def reads_pages_from_disk(place: Counted) -> str | None:
    """It waited for pages of files that are not in memory."""
    faults = place.rise("major_faults")
    if faults is None or faults / place.seconds < FAULTS_PER_S:
        return None
    return f"it fetched {faults / place.seconds:.0f} pages a second from files or swap (major faults)"


def waits_for_device(place: Counted) -> str | None:
    """Its main thread was in a wait of the kernel that nothing interrupts: for a disk or a file server."""
    states = place.record.get("states") or {}
    share = states.get("D", 0) / max(1, sum(states.values()))
    return (
        f"it waited for a disk or a file server for {share:.0%} of the time (state D)"
        if share >= LEAST_BLOCKED
        else None
    )


def has_full_file_system(place: Counted) -> str | None:
    """A file system that it uses has no room left."""
    for space in place.node.get("places", ()):
        if place.record["pid"] not in space["pids"]:
            continue
        for name, what in (("free_share", "space"), ("free_inodes_share", "inodes")):
            if space.get(name, 1.0) < LEAST_FREE:
                return f"the file system of {one_line(str(space['path']))} has {space[name]:.1%} of its {what} left"
    return None


def sends_again(place: Counted) -> str | None:
    """Its connections lose segments."""
    before, after = place.before.get("sockets") or {}, place.after.get("sockets") or {}
    again, sent = _rise(before, after, "retransmitted"), _rise(before, after, "sent")
    if again is None or not sent or again < LEAST_AGAIN_COUNT or again / sent < LEAST_AGAIN:
        return None
    return f"its TCP connections sent {again:.0f} of {sent:.0f} segments again"


def has_slow_connection(place: Counted) -> str | None:
    """A round trip of its takes much longer than those of the other ranks on the node."""
    trips = {rank: (each.get("sockets") or {}).get("round_trip_us") for rank, each in place.neighbours.items()}
    own, others = trips.pop(place.rank), sorted(trip for trip in trips.values() if trip)
    if not own or own < SLOW_TRIP_US or not others or own < TIMES_USUAL * others[len(others) // 2]:
        return None
    return f"a round trip on one of its TCP connections takes {own / 1000:.2g} ms"


def has_slow_gpu(place: Counted) -> str | None:
    """Its card is slowed down, or its link is narrower than it could be."""
    gpus = place.machine[1].get("gpus") or {}
    uuid = (gpus.get("of_processes") or {}).get(str(place.record["pid"]))
    card = next((each for each in gpus.get("cards", ()) if each["uuid"] == uuid), None)
    if card is None:
        return None
    name, width = f"GPU {card['pci.bus_id']}", (card["pcie.link.width.current"], card["pcie.link.width.max"])
    reason = _reason_of(card["clocks_throttle_reasons.active"])
    if reason:
        return f"{name} is slowed down for {reason}: {card['clocks.sm']} of {card['clocks.max.sm']} MHz"
    if all(map(str.isdigit, width)) and int(width[0]) < int(width[1]):
        return f"the PCIe link of {name} has {width[0]} of {width[1]} lanes"
    log = next((line for line in gpus.get("xids") or () if _bus(card["pci.bus_id"]) in line.lower()), None)
    return f"the kernel reported {one_line(log)}" if log else None


def _reason_of(text: str) -> str | None:
    try:
        bits = int(text, 16)
    except ValueError:
        return None
    return next((words for bit, words in SLOWED_BY.items() if bits & bit), None)


def _bus(text: str) -> str:
    """`00000000:3B:00.0` of nvidia-smi is `0000:3b:00` in the kernel's log."""
    return text.lower().rpartition(".")[0][-10:]


CAUSES: tuple[Callable[[Counted], str | None], ...] = (
    limited_by_quota,
    shares_its_core,
    meets_other_processes,
    has_slow_clock,
    loses_time_to_hypervisor,
    is_swapped,
    reads_pages_from_disk,
    waits_for_device,
    has_full_file_system,
    sends_again,
    has_slow_connection,
    has_slow_gpu,
)

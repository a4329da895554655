"""What the kernel knows about a process's surroundings, as values: sockets, connections, file locks, kills for lack of
memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bigsci_launch.spy.evidence.samples import is_still

RESENT_IN_VAIN = 2
ANYWHERE = ("0.0.0.0:", "[0:0:0:0:0:0:0:0]:")
ON_ONE_MACHINE = ("127.", "[0:0:0:0:0:0:0:1]")


@dataclass(frozen=True, slots=True)
class Socket:
    """A TCP socket. `unacked` bytes wait to be sent or acknowledged, `unread` ones to be read by the process.

    `num_resent`: how often in a row the kernel has retransmitted unacknowledged bytes. `is_unsent`: nothing is under
    way, and nothing more can be sent, because the other end has no room (its process does not read) or no packet
    leaves. `has_stood`: the queue was the same in an earlier sample.
    """

    local: str
    remote: str
    state: str
    unacked: int
    unread: int
    num_resent: int
    is_unsent: bool
    has_stood: bool = False

    @property
    def is_stuck(self) -> bool:
        """Whether the network has lost the bytes. A single packet gets lost now and then, but not twice in a row."""
        return self.unacked > 0 and self.num_resent >= RESENT_IN_VAIN and not self.is_unsent


@dataclass(frozen=True, slots=True)
class Connections:
    """All TCP connections of a process that are established, counted by the address of the end that listens.

    `listening`: how many came in at each address at which the process listens. `opened`: how many it opened itself to
    each address. Addresses that mean something on one machine only begin with the name of the node. `devices` are open
    files in /dev, other than terminals and the like, through which it may communicate, too.
    """

    listening: Mapping[str, int]
    opened: Mapping[str, int]
    devices: tuple[str, ...] = ()

    @property
    def of_groups(self) -> tuple[str, ...]:
        """Addresses at which a process group may listen: gloo takes one address, and the store takes all."""
        return tuple(address for address in self.listening if not address.startswith(ANYWHERE))


@dataclass(frozen=True, slots=True)
class FileLock:
    """A file lock that a process waits for: `holder` and `waiters` are pids on `node`; `path` is None if not known."""

    node: str
    holder: int
    waiters: tuple[int, ...]
    holder_comm: str
    holder_state: str
    path: str | None

    def __str__(self) -> str:
        path = f" on {self.path}" if self.path else ""
        state = {"gone": "gone", "T": "stopped"}.get(self.holder_state, "")
        what = ", ".join(part for part in (self.holder_comm, state) if part)
        return f"the lock{path} is held by process {self.holder}{f' ({what})' if what else ''} on {self.node}"


@dataclass(frozen=True, slots=True)
class MemoryEvents:
    """How often the kernel killed a process of this control group for lack of memory."""

    group: str
    num_kills: int


def parse_sockets(samples: Sequence[Mapping[str, Any]]) -> tuple[Socket, ...]:
    """Return the newest sockets in the samples of the node agent, which leaves out zeros."""
    known = [sample["sockets"]["list"] for sample in samples if sample.get("sockets")]
    queues_before = {(each.get("local"), each.get("remote"), each.get("tx")) for old in known[:-1] for each in old}
    return tuple(
        Socket(
            local=str(each.get("local") or ""),
            remote=str(each.get("remote") or ""),
            state=str(each.get("state") or ""),
            unacked=int(each.get("tx") or 0),
            unread=int(each.get("rx") or 0),
            num_resent=int(each.get("retransmits") or 0),
            is_unsent=each.get("timer") == "zero window probe",
            has_stood=bool(each.get("tx")) and (each.get("local"), each.get("remote"), each["tx"]) in queues_before,
        )
        for each in (known[-1] if known else ())
    )


def parse_connections(samples: Sequence[Mapping[str, Any]], node: str) -> Connections | None:
    """Return the connections of a process on `node` at the latest look, or None if they are not known."""
    read: Mapping[str, Any] = next(
        (sample for sample in reversed(samples) if "connections" in sample or not is_still(sample)), {}
    )
    found = read.get("connections")
    if found is None:
        return None
    opened = Counter(f"{host}:{port}" for host, ports in found["opened"].items() for port in ports)
    return Connections(
        listening={_on(node, str(address)): int(count) for address, count in found["listening"].items()},
        opened={_on(node, address): count for address, count in opened.items()},
        devices=tuple(map(str, found["devices"])),
    )


def _on(node: str, address: str) -> str:
    return f"{node}/{address}" if address.startswith(ON_ONE_MACHINE) else address


def parse_locks(node: Mapping[str, Any]) -> tuple[FileLock, ...]:
    """Return the file locks that processes of a node wait for."""
    return tuple(
        FileLock(
            node=str(node["node"]),
            holder=int(each["holder"]),
            waiters=tuple(int(pid) for pid in each["waiters"]),
            holder_comm=str(each.get("holder_comm") or ""),
            holder_state=str(each.get("holder_state") or ""),
            path=each.get("path"),
        )
        for each in node.get("locks") or []
    )


def parse_memory_events(samples: Sequence[Mapping[str, Any]]) -> MemoryEvents | None:
    """Return the newest count of kills for lack of memory, or None if there were none or it is not known."""
    known = [sample["memory_events"] for sample in samples if sample.get("memory_events")]
    if not known or not known[-1].get("oom_kill"):
        return None
    return MemoryEvents(str(known[-1].get("cgroup") or ""), int(known[-1]["oom_kill"]))

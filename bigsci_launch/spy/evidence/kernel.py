"""What the kernel knows about a process's surroundings, as values: sockets, file locks, kills for lack of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RESENT_IN_VAIN = 2


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
class FileLock:
    """A file lock that somebody waits for: `holder` and `waiters` are pids on `node`; `path` is None if not known."""

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


def parse_locks(node: Mapping[str, Any]) -> tuple[FileLock, ...]:
    """Return the file locks that somebody waits for on a node."""
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

"""What the ring of a rank says: the calls that it made last, and those that it has not left.

The ring holds what Python called. Collectives of C++ (DDP's reduction of gradients, functional collectives) are not in
it, so a rank whose ring shows no open call may communicate all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bigsci_launch.spy.evidence.calls.flight_recorder import Recorder, parse_recorder
from bigsci_launch.spy.evidence.known_code import POINT_TO_POINT


@dataclass(frozen=True, slots=True)
class RingCall:
    """A call: `entered` in seconds since the epoch, `left` None until it has ended. Other facts are None if unknown."""

    entered: float
    left: float | None
    operation: str | None
    group: str | None
    place: str | None
    tensors: str | None
    peer: int | None
    tag: int | None
    number: int
    step: int
    is_async: bool

    def __str__(self) -> str:
        number = f" number {self.number}" if self.number else ""
        words = f"{self.operation or 'a call whose name is lost'}{number}"
        if self.peer is not None:
            words += f" {'to' if 'send' in words else 'from'} rank {self.peer} with tag {self.tag}"
        if self.group and self.peer is None:
            words += f" of group {self.group.partition(':')[0]}"
        return words + (f", {self.tensors}" if self.tensors else "") + (f", at {self.place}" if self.place else "")


@dataclass(frozen=True, slots=True)
class Ring:
    """The ring of a process, read at `read`. `calls` are the newest of all its threads, oldest first."""

    step: int
    phase: str
    heartbeat: float
    read: float
    lost_names: int
    lost_threads: int
    calls: tuple[RingCall, ...]
    open_calls: tuple[RingCall, ...]
    recorder: Recorder

    @property
    def open_message(self) -> RingCall | None:
        """The newest message between two ranks that the rank waits for.

        One that only began says nothing: a program need not wait for each.
        """
        found = (call for call in reversed(self.open_calls) if call.operation in POINT_TO_POINT)
        return next((call for call in found if call.peer is not None and not call.is_async), None)


def parse_ring(document: Mapping[str, Any]) -> Ring:
    """Parse a ring as the node agent writes it."""
    calls = [RingCall(*call) for thread in document["threads"] for call in thread["last"]]
    return Ring(
        step=int(document["step"]),
        phase=str(document["phase"]),
        heartbeat=float(document["heartbeat"]),
        read=float(document["read"]),
        lost_names=int(document["lost_names"]),
        lost_threads=int(document["lost_threads"]),
        calls=tuple(sorted(calls, key=lambda call: call.entered)),
        open_calls=tuple(RingCall(*call) for call in document["open"]),
        recorder=parse_recorder(document["recorder"], lists_all=False),
    )

"""What the ring of a rank holds: the calls that it made last, and those that it has not left.

The ring holds what Python called. Collectives of C++ (DDP's reduction of gradients, functional collectives) are not in
it, so a rank whose ring shows no open call may communicate all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from bigsci_launch.spy.evidence.calls.flight_recorder import Recorder, parse_recorder
from bigsci_launch.spy.evidence.calls.written_stacks import WrittenStacks, parse_written_stacks
from bigsci_launch.spy.evidence.known_code import POINT_TO_POINT
from bigsci_launch.topology import Topology
from bigsci_launch.topology.coordinates import PIPELINES

LOCAL = ("torch.save", "torch.load", "next batch")
"""Recorded calls that wait for no other rank."""


@dataclass(frozen=True, slots=True)
class RingCall:
    """A call: `entered` in seconds since the epoch, `left` None until it has ended. Other facts are None if unknown.

    `peer` is the other end of a message, or the root of a collective.
    """

    entered: float
    left: float | None
    operation: str | None
    group: str | None
    place: str | None
    tensors: str | None
    peer: int | None
    tag: int | None
    number: int
    step: int | None
    is_async: bool
    thread: int = 0

    @property
    def is_message(self) -> bool:
        """Whether it is one end of a message whose other end is known."""
        return self.operation in POINT_TO_POINT and self.peer is not None

    def __str__(self) -> str:
        number = f" number {self.number}" if self.number else ""
        words = f"{self.operation or 'a call whose name is lost'}{number}"
        if self.is_message:
            words += f" {'to' if 'send' in words else 'from'} rank {self.peer} with tag {self.tag}"
        elif self.group:
            words += f" of group {self.group.partition(':')[0]}"
            words += f" with root {self.peer}" if self.peer is not None else ""
        return words + (f", {self.tensors}" if self.tensors else "") + (f", at {self.place}" if self.place else "")


@dataclass(frozen=True, slots=True)
class RootsNamed:
    """The roots that one collective of the program has named: (root, how often in a row, number of the newest).

    `group` is torch's name of it with its members: ranks in different groups may use one name.
    """

    group: str
    operation: str
    place: str
    runs: tuple[tuple[int, int, int], ...]

    @property
    def newest(self) -> tuple[int, int]:
        """The newest root and the number of the collective that named it."""
        root, _, number = self.runs[-1]
        return root, number

    @property
    def before(self) -> tuple[int, ...]:
        """The root of each earlier call."""
        *earlier, (root, times, _) = self.runs
        return tuple(each for each, often, _ in (*earlier, (root, times - 1, 0)) for _ in range(often))


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
    set_keys: tuple[str, ...] = ()
    """Keys of a store that the rank has set, the newest last."""
    thread_names: Mapping[int, str] = field(default_factory=dict)
    topology: Topology | None = None
    """Where each rank of its world is; None if the program has made another world than it was started for."""
    is_uneven: bool = False
    """Whether its pipelines have different depths, even where `topology` is not known."""
    stacks: WrittenStacks | None = None
    """What the process wrote of itself when none of its Python threads could run; None if that was not so."""
    steps: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    """{group: {number of the first collective in a step: step}}."""
    roots: tuple[RootsNamed, ...] = ()
    are_blocking: bool = False
    """Whether the work of each collective is done when it returns."""
    phases: tuple[RingCall, ...] = ()
    """What the rank did itself, oldest first: forward and backward passes, and so on. Only where many calls were asked
    for."""

    def waits(self, thread: int | None) -> tuple[RingCall, ...]:
        """Return the calls that a thread is in, the outermost first; those of all threads if it is none of the ring's.

        A call that only began something is left out: a program need not wait for each.
        """
        inside = tuple(call for call in self.open_calls if not call.is_async)
        is_known = any(call.thread == thread for call in (*self.calls, *self.open_calls))
        return tuple(call for call in inside if call.thread == thread) if is_known else inside

    @property
    def shows_no_wait(self) -> bool:
        """Whether the process is in no call that may wait for another rank, as far as Python began it.

        Work on a device, and work that was not waited for yet, may go on unseen.
        """
        is_known = self.are_blocking and not self.lost_threads and any(call.number for call in self.calls)
        return is_known and all(call.operation in LOCAL for call in self.open_calls)

    def open_message(self, thread: int | None) -> RingCall | None:
        """Return the message between two ranks that a thread waits for: the call of the program, not one inside it."""
        return next((call for call in self.waits(thread) if call.is_message), None)


def _parse_call(facts: list[Any], thread: Mapping[str, Any]) -> RingCall:
    return replace(RingCall(*facts), thread=int(thread["tid"]))


def _parse_steps(runs: list[list[int]]) -> dict[int, int]:
    return {
        number + at * numbers: step + at * steps for number, step, numbers, steps, times in runs for at in range(times)
    }


def _topology_of(document: Mapping[str, Any]) -> Topology | None:
    if not document.get("topology"):
        return None
    with suppress(ValueError):  # as any text of a file that was damaged
        found = Topology.parse(document["topology"])
        return found if found.world_size == document["world_size"] else None
    return None


def parse_ring(document: Mapping[str, Any]) -> Ring:
    """Parse a ring as the node agent writes it."""
    calls = [_parse_call(call, thread) for thread in document["threads"] for call in thread["last"]]
    inside = [_parse_call(call, thread) for thread in document["threads"] for call in thread["open"]]
    phases = [_parse_call(call, thread) for thread in document["threads"] for call in thread.get("phases", ())]
    return Ring(
        step=int(document["step"]),
        phase=str(document["phase"]),
        heartbeat=float(document["heartbeat"]),
        read=float(document["read"]),
        lost_names=int(document["lost_names"]),
        lost_threads=int(document["lost_threads"]),
        calls=tuple(sorted(calls, key=lambda call: call.entered)),
        open_calls=tuple(sorted(inside, key=lambda call: call.entered)),
        recorder=parse_recorder(document["recorder"], lists_all=False),
        set_keys=tuple(words.removeprefix("key ") for words in document["set_keys"]),
        thread_names={int(thread["tid"]): str(thread.get("name") or "") for thread in document["threads"]},
        topology=_topology_of(document),
        is_uneven=str(document.get("topology") or "").startswith(PIPELINES),
        stacks=parse_written_stacks(document),
        steps={group: _parse_steps(runs) for group, runs in document.get("steps", {}).items()},
        are_blocking=bool(document.get("are_blocking")),
        phases=tuple(sorted(phases, key=lambda call: call.entered)),
        roots=tuple(
            RootsNamed(group, operation, place, tuple((root, times, at) for root, times, at in runs))
            for group, operation, place, runs in document.get("roots", [])
        ),
    )

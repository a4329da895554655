"""The call trace of a process: which functions of the chosen packages it called last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bigsci_launch.spy.evidence.calls.ring import RingCall


@dataclass(frozen=True, slots=True)
class CallTrace:
    """Calls of a process, oldest first, in the form of a ring's. `how`: how they were recorded, until when."""

    pid: int
    started: float
    packages: str
    how: str
    lost_names: int
    lost_threads: int
    calls: tuple[RingCall, ...]
    thread_names: Mapping[int, str]

    @property
    def open_calls(self) -> tuple[RingCall, ...]:
        """The calls that have not ended."""
        return tuple(call for call in self.calls if call.left is None)

    @property
    def words(self) -> str:
        """What is traced, how, and what is missing."""
        lost = [
            f"{count} {what} did not fit"
            for count, what in ((self.lost_threads, "threads"), (self.lost_names, "names"))
            if count
        ]
        return f"calls of {self.packages}, by {self.how}" + "".join(f"; {each}" for each in lost)


def parse_call_trace(document: Mapping[str, Any]) -> CallTrace:
    """Parse a call trace as the node agent writes it."""
    calls = [
        _parse_call(call, int(thread["tid"]))
        for thread in document["threads"]
        for call in (*thread["calls"], *thread["open"])
    ]
    return CallTrace(
        pid=int(document["pid"]),
        started=float(document["started"]),
        packages=str(document["packages"]),
        how=str(document["how"]),
        lost_names=int(document["lost_names"]),
        lost_threads=int(document["lost_threads"]),
        calls=tuple(sorted(calls, key=lambda call: call.entered)),
        thread_names={int(thread["tid"]): str(thread["name"]) for thread in document["threads"]},
    )


def _parse_call(facts: list[Any], thread: int) -> RingCall:
    entered, left, function, place, step = facts
    return RingCall(
        entered=entered,
        left=left,
        operation=function,
        group=None,
        place=place,
        tensors=None,
        peer=None,
        tag=None,
        number=0,
        step=step,
        is_async=False,
        thread=thread,
    )

"""Stacks that faulthandler has written in a rank none of whose Python threads could run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bigsci_launch.spy.evidence.stacks import Frame, ThreadStack, decisive_thread

THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):$")
OF_THE_RING = ("_heartbeat", "_follow")
"""Functions of ring_hook.py in which its threads are: the heartbeat, and the look for requests to trace calls."""
FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


@dataclass(frozen=True, slots=True)
class WrittenStacks:
    """The threads but those that keep the ring, the main thread first, and how old they are, in seconds."""

    threads: tuple[ThreadStack, ...]
    age_s: float

    @property
    def site(self) -> str:
        """Where the thread is that decides: `save (train.py:88)`."""
        thread = decisive_thread(self.threads, 0)
        return str(thread.site) if thread and thread.site else "an unknown place"

    @property
    def place(self) -> str:
        """`save (train.py:88) (from faulthandler, 35 s old)`."""
        return f"{self.site} (from faulthandler, {self.age_s:.0f} s old)"


def parse_written_stacks(ring: Mapping[str, Any]) -> WrittenStacks | None:
    """Parse the stacks in the document of a ring; None if it has none, or if the process has run since."""
    document = ring.get("stacks")
    if not document or float(ring["heartbeat"]) > float(document["written"]):
        return None
    threads: list[list[Frame]] = []
    for line in str(document["text"]).splitlines():
        if words := THREAD.match(line):
            threads.append([])
        elif (words := FRAME.match(line)) and threads:
            threads[-1].append(Frame(words[3], words[1], int(words[2]) if words[2].isdigit() else 0))
    # faulthandler writes the oldest thread, the main one, last.
    found = [
        ThreadStack(0, None, owns_gil=False, active=False, frames=tuple(frames))
        for frames in reversed(threads)
        if frames and not any(_is_of_the_ring(frame) for frame in frames)
    ]
    age_s = max(0.0, float(ring["read"]) - float(document["written"]))
    return WrittenStacks(tuple(found), age_s) if found else None


def _is_of_the_ring(frame: Frame) -> bool:
    return frame.function in OF_THE_RING and frame.file.endswith("/ring_hook.py")

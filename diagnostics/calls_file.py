"""The call trace: a file of fixed size per thread that holds the newest calls of a process. Stand-alone, Python 3.8.

`calls_trace.py` writes it while a trace is on. As with the ring (ring_file.py), the file is mapped and nothing has to
be flushed: after SIGKILL the kernel still has every byte.

Layout of version 1, little endian:

    0        header: magic, version, pid, start ticks, rank, world size, bytes of names, names lost, lanes used,
             threads without a lane, time of the start (`HEADER`); at 128 which packages are traced, at 384 how
    4096     names, 512 KiB: 2 bytes of length and UTF-8 each, `FUNCTION FILE:LINE`; number 0 is unknown
    528384   lanes of 1 MiB, one per thread, each with a header of 64 bytes: thread id, number of events so far, thread
             name (`LANE`), then events of 16 bytes (`EVENT`)

An event is the time in ns, its kind and number, and its own number in the lane, so one that was torn while it was
written is not taken for another. The lanes of one process are one file, which grows with its threads.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from contextlib import suppress

from ring_file import Names, read_names, text_of

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from typing import Any

MAGIC = b"BSLCALLS"
VERSION = 1
# magic, version, pid, start ticks, rank, world size, bytes of names, names lost, lanes, threads without one, start
HEADER = struct.Struct("<8sIIQiiIIIId")
LANES = struct.Struct("<II")
NAMES_USED_AT, LANES_AT = 32, 40
PACKAGES_AT, HOW_AT, TEXT_BYTES = 128, 384, 256
NAMES_AT, NAMES_BYTES = 4096, 1 << 19
FIRST_LANE_AT, LANE_BYTES = NAMES_AT + NAMES_BYTES, 1 << 20
MAX_LANES = 32
LANE = struct.Struct("<QQ48s")
COUNT = struct.Struct("<Q")
COUNT_AT = 8
# time in ns, kind and number, number in the lane
EVENT = struct.Struct("<QII")
NUM_EVENTS = (LANE_BYTES - LANE.size) // EVENT.size
ENTER, LEAVE, STEP = 0, 1 << 30, 2 << 30
"""Kinds: a call begins, a call ends, and the step that the process has just reached (its number is the step)."""
KINDS = 3 << 30


class CallsFile:
    """The call trace of this process.

    Raises:
        OSError: the file cannot be made, or the disk has no room.
    """

    def __init__(self, path: str, *, packages: str, how: str, rank: int, world_size: int, start_ticks: int) -> None:
        self.path = path
        try:
            self._map = map_part(path, 0, FIRST_LANE_AT, os.O_CREAT | os.O_EXCL)
        except (OSError, ValueError):
            with suppress(FileNotFoundError):
                os.unlink(path)
            raise
        self.name = Names(self._map, NAMES_AT, NAMES_BYTES, NAMES_USED_AT, ~KINDS & 0xFFFFFFFF).number
        self._num_lanes = self._num_without = 0
        self._lock = threading.Lock()
        HEADER.pack_into(
            self._map, 0, MAGIC, VERSION, os.getpid(), start_ticks, rank, world_size, 0, 0, 0, 0, time.time()
        )
        self._write_text(PACKAGES_AT, packages)
        self._write_text(HOW_AT, how)

    def lane(self) -> mmap.mmap | None:
        """Return the memory of a new lane for this thread; None if there is no room: then the file notes that."""
        with self._lock:
            begin = FIRST_LANE_AT + self._num_lanes * LANE_BYTES
            try:
                if self._num_lanes == MAX_LANES:
                    raise OSError("all lanes are taken")
                made = map_part(self.path, begin, LANE_BYTES)
            except (OSError, ValueError):
                self._num_without += 1
                LANES.pack_into(self._map, LANES_AT, self._num_lanes, self._num_without)
                return None
            name = threading.current_thread().name.encode("utf-8", "replace")[:48]
            LANE.pack_into(made, 0, threading.get_native_id(), 0, name)
            self._num_lanes += 1
            LANES.pack_into(self._map, LANES_AT, self._num_lanes, self._num_without)
            return made

    def say(self, how: str) -> None:
        """Write what has become of the trace."""
        self._write_text(HOW_AT, how)

    def _write_text(self, at: int, text: str) -> None:
        self._map[at : at + TEXT_BYTES] = text.encode("utf-8", "replace")[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")


def map_part(path: str, at: int, size: int, flags: int = 0) -> mmap.mmap:
    """Return a part of the file, mapped. It is opened each time: a program may close what it did not open, and then the
    number of a descriptor is that of another file."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o640)
    try:
        # Without its blocks, a write to the mapped file would end the process with SIGBUS on a full disk.
        os.posix_fallocate(descriptor, at, size)
        return mmap.mmap(descriptor, size, offset=at)
    finally:
        os.close(descriptor)


def read_calls_file(data: bytes) -> dict[str, Any]:
    """Return the content of a call trace from its bytes; a file that is cut short gives what is left of it.

    {pid, start_ticks, rank, world_size, started, packages, how, lost_names, lost_threads, threads: [{tid, name, count,
    calls: [call], open: [call]}]}; a call is [entered, left, function, place, step], oldest first. `left` is None while
    it has not ended, and the others are None if they are not known. Calls whose begin is not held are left out.

    Raises:
        ValueError: this is no call trace, or one of another version.
    """
    if len(data) < HEADER.size or data[: len(MAGIC)] != MAGIC:
        raise ValueError("not a call trace")
    _, version, pid, ticks, rank, world, used, lost, num_lanes, without, began = HEADER.unpack_from(data)
    if version != VERSION:
        raise ValueError(f"it has version {version}; this bsl reads version {VERSION}")
    names = read_names(data[NAMES_AT : NAMES_AT + min(used, NAMES_BYTES)])
    lanes = [lane for lane in (_read_lane(data, number) for number in range(num_lanes)) if lane is not None]
    steps = sorted(event for lane in lanes for event in lane["events"] if event[1] & KINDS == STEP)
    return {
        "pid": pid,
        "start_ticks": ticks,
        "rank": rank if rank >= 0 else None,
        "world_size": world if world >= 0 else None,
        "started": began,
        "packages": text_of(data[PACKAGES_AT : PACKAGES_AT + TEXT_BYTES]),
        "how": text_of(data[HOW_AT : HOW_AT + TEXT_BYTES]),
        "lost_names": lost,
        "lost_threads": without,
        "threads": [
            {
                **{key: lane[key] for key in ("tid", "name", "count")},
                **_calls_of(lane["events"], steps, names),
            }
            for lane in lanes
        ],
    }


def _read_lane(data: bytes, number: int) -> dict[str, Any] | None:
    """Return {tid, name, count, events}, the oldest event first; events that are torn are left out."""
    begin = FIRST_LANE_AT + number * LANE_BYTES
    if begin + LANE.size > len(data):
        return None
    tid, count, name = LANE.unpack_from(data, begin)
    if not tid:
        return None
    events = []
    for place in range(max(0, count - NUM_EVENTS), count):
        at = begin + LANE.size + place % NUM_EVENTS * EVENT.size
        if at + EVENT.size <= len(data):
            moment, what, check = EVENT.unpack_from(data, at)
            if check == place & 0xFFFFFFFF:
                events.append((moment, what))
    return {"tid": tid, "name": text_of(name), "count": count, "events": events}


def _calls_of(
    events: list[tuple[int, int]], steps: list[tuple[int, int]], names: list[str | None]
) -> dict[str, list[list[Any]]]:
    """Pair begins and ends to calls: {calls: those that have ended, by their begin; open: the others}.

    An end whose begin is not the newest one also ends what is above it; one without a begin is of a call that began
    before the events that are held.
    """
    ended: list[list[Any]] = []
    inside: list[tuple[int, list[Any]]] = []
    step_of = _Steps(steps)
    for moment, what in events:
        kind, number = what & KINDS, what & ~KINDS
        if kind == ENTER:
            call = [moment / 1e9, None, *_function(names, number), step_of(moment)]
            inside.append((number, call))
        elif kind == LEAVE and any(number == begun for begun, _ in inside):
            begun = -1
            while begun != number:
                begun, call = inside.pop()
                call[1] = moment / 1e9
                ended.append(call)
    ended.sort(key=lambda call: call[0])
    return {"calls": ended, "open": [call for _, call in inside]}


class _Steps:
    """Gives the step at a moment; moments must not decrease."""

    def __init__(self, steps: list[tuple[int, int]]) -> None:
        self._steps, self._at = steps, 0
        self._step: int | None = None

    def __call__(self, moment: int) -> int | None:
        while self._at < len(self._steps) and self._steps[self._at][0] <= moment:
            self._step = self._steps[self._at][1] & ~KINDS
            self._at += 1
        return self._step


def _function(names: list[str | None], number: int) -> tuple[str | None, str | None]:
    """Return (function, place) of a name."""
    name = names[number] if number < len(names) else None
    if name is None:
        return None, None
    function, _, place = name.partition(" ")
    return function, place

"""The ring: a file of fixed size that holds the last calls of one process. Stand-alone, standard library, Python 3.8.

The process maps the file and writes each call when it enters and again when it leaves it. Nothing has to be flushed:
after SIGKILL, in state D or while the GIL is held, the kernel still has every byte, and any process may read them.

Layout of version 1, little endian, 1 MiB:

    0       header: magic, version, pid, start ticks, rank, world size, step, phase, heartbeat (`HEADER`); at 128 the
            sizes of the axes, such as `tp=2,pp=2,dp=2`, which place each rank of the world
    256     16 lanes of 64 bytes: thread id, number of calls so far, thread name (`LANE`); one lane per thread
    4096    names, 128 KiB: 2 bytes of length and UTF-8 each; number 0 is unknown
    135168  calls of 48 bytes (`CALL`): lane 0 has half of them, the other lanes share the rest

The last field of a call is its number in its lane, so one that was torn while it was written is not taken for another.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import threading
from time import time

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

MAGIC = b"BSLRING\0"
VERSION = 1
RING_BYTES = 1 << 20
# magic, version, bytes, pid, start ticks, rank, world size, step, phase, heartbeat, bytes of names, names lost,
# threads without a lane, time of the start
HEADER = struct.Struct("<8sIIIQiiq32sdIIId")
RANK = struct.Struct("<ii")
STEP = struct.Struct("<q32s")
BEAT = struct.Struct("<d")
NAMES_USED = struct.Struct("<II")
NO_LANE = struct.Struct("<I")
RANK_AT, STEP_AT, BEAT_AT, NAMES_USED_AT, NO_LANE_AT = 28, 36, 76, 84, 92
LANE = struct.Struct("<QQ48s")
LANES_AT, NUM_LANES = 256, 16
TOPOLOGY_AT, TOPOLOGY_BYTES = 128, 64
NAMES_AT, NAMES_BYTES = 4096, 1 << 17
# entered, left (0: not yet), operation, group, place, tensors, peer (of a collective: its root), tag, number in its
# group, step, flags, number
CALL = struct.Struct("<ddHHHHiiIIII")
# The same bytes, written as a call begins: entered, what is known of it (`FACTS`), number in its group, step, flags,
# number.
ENTERED = struct.Struct("<d8x16sIIII")
FACTS = struct.Struct("<HHHHii")
PLACE = struct.Struct("<H")
FLAGS = struct.Struct("<I")
LEFT_IN_CALL, FLAGS_IN_CALL = 8, 40
CALLS_AT = NAMES_AT + NAMES_BYTES
NUM_CALLS = (RING_BYTES - CALLS_AT) // CALL.size
FIRST_LANE_CALLS = NUM_CALLS // 2
OTHER_LANE_CALLS = (NUM_CALLS - FIRST_LANE_CALLS) // (NUM_LANES - 1)
NONE = -(1 << 31)
"""No peer, or no tag."""
ASYNC = 1
"""Flag of a call that returned before its work was done: until it is left, the work may be going on."""
BLOCKING = 2
"""Flag of a collective whose work is done when it returns: on a device, the work may be going on after that."""
PHASES = ("forward", "backward", "optimizer step", "garbage collection", "phase")
"""Records of what a rank does itself. `phase` is a moment: its `tensors` are the phase that the program marks."""
REDUCTION = "gradient reduction"
"""Record of DDP: since when a rank has its own gradients, and waits for those of the others."""
MAX_NAME, MAX_NUMBER = 400, 0xFFFF
enter_into = ENTERED.pack_into


def lane_place(lane: int) -> tuple[int, int]:
    """Return where the calls of a lane begin, and how many there are."""
    if lane == 0:
        return CALLS_AT, FIRST_LANE_CALLS
    return CALLS_AT + (FIRST_LANE_CALLS + (lane - 1) * OTHER_LANE_CALLS) * CALL.size, OTHER_LANE_CALLS


class Lane:
    """The calls of one thread. Only that thread writes them."""

    __slots__ = ("_begin", "_count", "_left", "_left_begin", "_map", "_size", "count", "ring")

    def __init__(self, ring: Ring, mapped: Any, lane: int) -> None:
        self.ring, self.count = ring, 0
        at = LANES_AT + lane * LANE.size + 8
        self._begin, self._size = lane_place(lane)
        # To set an item of a view takes a third of the time of `pack_into`. A call is six times 8 bytes.
        self._map = memoryview(mapped)
        self._count, self._left = self._map[at : at + 8].cast("Q"), self._map.cast("d")
        self._left_begin = (self._begin + LEFT_IN_CALL) // 8

    def enter(self, facts: bytes, number: int = 0, flags: int = 0) -> int:
        """Write a call that begins now, collective `number` of its group; return its number in the lane."""
        count = self.count
        self.count = following = count + 1
        at = self._begin + count % self._size * 48
        enter_into(self._map, at, time(), facts, number, self.ring.step, flags, count & 0xFFFFFFFF)
        self._count[0] = following
        return count

    def leave(self, count: int) -> None:
        """Write that call number `count` has ended, if the ring still holds it."""
        if self.count - count <= self._size:
            self._left[self._left_begin + count % self._size * 6] = time()

    def detach(self, count: int) -> None:
        """Write that call number `count` has returned before its work is done."""
        if self.count - count <= self._size:
            FLAGS.pack_into(self._map, self._begin + count % self._size * 48 + FLAGS_IN_CALL, ASYNC)


class Names:
    """The names in a mapped file, each written once: `size` bytes at `at`, and at `used_at` how many are in use."""

    def __init__(self, mapped: Any, at: int, size: int, used_at: int, max_number: int) -> None:
        self._map, self._at, self._size, self._used_at, self._max = mapped, at, size, used_at, max_number
        self._numbers: dict[str, int] = {}
        self._used = self._num_lost = 0
        self._lock = threading.Lock()

    def number(self, text: str) -> int:
        """Return the number of a name; 0, unknown, if there is no room for another one."""
        found = self._numbers.get(text)
        if found is not None:
            return found
        with self._lock:
            found = self._numbers.get(text)
            if found is not None:
                return found
            data = text.encode("utf-8", "replace")[:MAX_NAME]
            number = len(self._numbers) + 1
            if self._used + 2 + len(data) > self._size or number > self._max:
                self._num_lost += 1
                number = 0
            else:
                at = self._at + self._used
                self._map[at : at + 2 + len(data)] = struct.pack("<H", len(data)) + data
                self._used += 2 + len(data)
                self._numbers[text] = number
            NAMES_USED.pack_into(self._map, self._used_at, self._used, self._num_lost)
            return number


class Ring:
    """The ring of this process.

    Raises:
        OSError: the file cannot be made, or the disk has no room for all of it.
    """

    def __init__(
        self,
        path: str,
        *,
        rank: int = -1,
        world_size: int = -1,
        start_ticks: int = 0,
        topology: str = "",
        mode: int = 0o644,
    ) -> None:
        if sys.byteorder != "little":
            raise OSError("rings are little endian, and this machine is not")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        try:
            # Without its blocks, a write to the mapped file would end the process with SIGBUS on a full disk.
            os.posix_fallocate(descriptor, 0, RING_BYTES)
            os.fchmod(descriptor, mode)
            self._map = mmap.mmap(descriptor, RING_BYTES)
        except (OSError, ValueError):
            os.unlink(path)
            raise
        finally:
            os.close(descriptor)
        self.path, self.step = path, 0
        names = Names(self._map, NAMES_AT, NAMES_BYTES, NAMES_USED_AT, MAX_NUMBER)
        self.name = names.number
        self._num_lanes = self._num_without = 0
        self._lock = threading.Lock()
        now = time()
        HEADER.pack_into(
            self._map,
            0,
            MAGIC,
            VERSION,
            RING_BYTES,
            os.getpid(),
            start_ticks,
            rank,
            world_size,
            0,
            b"",
            now,
            0,
            0,
            0,
            now,
        )
        self.place(topology)

    def place(self, topology: str) -> None:
        """Write where each rank is; of a text that is too long, its first bytes."""
        text = topology.encode()[:TOPOLOGY_BYTES]
        self._map[TOPOLOGY_AT : TOPOLOGY_AT + TOPOLOGY_BYTES] = text.ljust(TOPOLOGY_BYTES, b"\0")

    def lane(self) -> Lane | None:
        """Return a new lane for this thread, or None if all are taken: then the ring notes that calls are missing."""
        with self._lock:
            if self._num_lanes == NUM_LANES:
                self._num_without += 1
                NO_LANE.pack_into(self._map, NO_LANE_AT, self._num_without)
                return None
            lane, self._num_lanes = self._num_lanes, self._num_lanes + 1
            name = threading.current_thread().name.encode("utf-8", "replace")[:48]
            LANE.pack_into(self._map, LANES_AT + lane * LANE.size, threading.get_native_id(), 0, name)
            return Lane(self, self._map, lane)

    def set_rank(self, rank: int, world_size: int) -> None:
        RANK.pack_into(self._map, RANK_AT, rank, world_size)

    def mark(self, step: int, phase: str) -> None:
        """Write which step the process is in, and what it does in it."""
        self.step = step
        STEP.pack_into(self._map, STEP_AT, step, phase.encode("utf-8", "replace")[:32])

    def beat(self) -> None:
        BEAT.pack_into(self._map, BEAT_AT, time())


def read_ring(data: bytes) -> dict[str, Any]:
    """Return the content of a ring from its bytes; a file that is cut short gives what is left of it.

    {pid, start_ticks, rank, world_size, topology, step, phase, heartbeat, started, lost_names, lost_threads, is_whole,
    lanes: [{tid, name, count, calls: [call]}]}; a call is [entered, left, operation, group, place, tensors, peer, tag,
    number in its group, step, is_async, is_blocking], with None for what is unknown or not there, oldest first.

    Raises:
        ValueError: this is no ring, or one of another version.
    """
    if len(data) < HEADER.size or data[: len(MAGIC)] != MAGIC:
        raise ValueError("not a ring of calls")
    (_, version, size, pid, ticks, rank, world, step, phase, beat, used, lost, without, began) = HEADER.unpack_from(
        data
    )
    if version != VERSION:
        raise ValueError(f"it has version {version}; this bsl reads version {VERSION}")
    names = read_names(data[NAMES_AT : NAMES_AT + min(used, NAMES_BYTES)])
    return {
        "pid": pid,
        "start_ticks": ticks,
        "rank": rank if rank >= 0 else None,
        "world_size": world if world >= 0 else None,
        "topology": text_of(data[TOPOLOGY_AT : TOPOLOGY_AT + TOPOLOGY_BYTES]) or None,
        "step": step,
        "phase": text_of(phase),
        "heartbeat": beat,
        "started": began,
        "lost_names": lost,
        "lost_threads": without,
        "is_whole": len(data) >= size,
        "lanes": list(read_lanes(data, names)),
    }


def read_names(data: bytes) -> list[str | None]:
    """Return the names by number; number 0 is None."""
    names: list[str | None] = [None]
    at = 0
    while at + 2 <= len(data):
        size = data[at] | data[at + 1] << 8
        if at + 2 + size > len(data):
            break
        names.append(data[at + 2 : at + 2 + size].decode("utf-8", "replace"))
        at += 2 + size
    return names


def read_lanes(data: bytes, names: list[str | None]) -> Iterator[dict[str, Any]]:
    for lane in range(NUM_LANES):
        at = LANES_AT + lane * LANE.size
        if at + LANE.size > len(data):
            return
        tid, count, name = LANE.unpack_from(data, at)
        if tid:
            calls = list(read_calls(data, lane, count, names))
            yield {"tid": tid, "name": text_of(name), "count": count, "calls": calls}


def read_calls(data: bytes, lane: int, count: int, names: list[str | None]) -> Iterator[list[Any]]:
    """Yield the calls of a lane, oldest first; those that are torn are left out."""

    def named(number: int) -> str | None:
        return names[number] if number < len(names) else None

    begin, size = lane_place(lane)
    for number in range(max(0, count - size), count):
        at = begin + number % size * CALL.size
        if at + CALL.size > len(data):
            continue
        entered, left, operation, group, place, tensors, peer, tag, sequence, step, flags, check = CALL.unpack_from(
            data, at
        )
        if check == number & 0xFFFFFFFF:
            yield [
                entered, left or None, named(operation), named(group), named(place), named(tensors),
                None if peer == NONE else peer, None if tag == NONE else tag, sequence, step, bool(flags & ASYNC),
                bool(flags & BLOCKING),
            ]  # fmt: skip


def text_of(data: bytes) -> str:
    return data.rstrip(b"\0").decode("utf-8", "replace")

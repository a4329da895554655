"""Reads processes that may be stuck, for node_agent.py. Standard library only, Python 3.8 or newer.

There are only two ways to read: the files of /proc that always answer (stat, status, wchan, comm, and schedstat, which
reads two numbers without a lock), and forked children that are killed if they take too long. What such a child found
before that is kept.
"""

from __future__ import annotations

import marshal
import os
import select
import time

from safe_files import read_json

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any

    Facts = dict[str, Any]
    Produce = Callable[[list[Any]], Iterable[tuple[Any, str, Any]]]

LARGEST_RECORD = 1 << 22
SIGKILL = 9  # the signal module takes 5 ms to import
GRACE_S = 0.7  # a reader that reports nothing for this long is stuck: the others continue without it


def read_text(path: str, limit: int = 1 << 16) -> str | None:
    """Return the first `limit` bytes of a file as text, or None."""
    try:
        with open(path, "rb") as stream:
            return stream.read(limit).decode("utf-8", "replace")
    except OSError:
        return None


def read_record(path: str) -> Any:
    """Return the content of a JSON file of a run, or None if it cannot be read. Raises ValueError if it is no JSON."""
    try:
        return read_json(path, LARGEST_RECORD)
    except OSError:
        return None


def owner_of(pid: int) -> int:
    """Return the user that a process acts as; -1 if it is gone."""
    lines = (read_text(f"/proc/{pid}/status") or "").splitlines()
    return next((int(line.split()[2]) for line in lines if line.startswith("Uid:")), -1)


def peer_of(connection: Any) -> int:
    """Return the user at the other end of a Unix socket, according to the kernel."""
    import socket
    import struct

    _, user, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(user)


def parse_stat(text: str) -> Facts:
    """Parse the fields of /proc/PID/stat that are needed here; times in clock ticks."""
    head, _, tail = text.rpartition(")")
    field = tail.split()
    return {
        "comm": head.partition("(")[2],
        "state": field[0],
        "ppid": int(field[1]),
        "major_faults": int(field[9]),
        "cpu_ticks": int(field[11]) + int(field[12]),
        "threads": int(field[17]),
        "start_ticks": int(field[19]),
    }


def parse_status(text: str) -> Facts:
    """Parse the main thread's context switches, the tracer, and whether a core dump or a SIGKILL is pending.

    What the text does not hold is None.
    """
    field = dict(line.partition(":")[::2] for line in text.splitlines())
    names = {
        "voluntary": "voluntary_ctxt_switches", "involuntary": "nonvoluntary_ctxt_switches", "tracer_pid": "TracerPid",
    }  # fmt: skip
    pending = int(field.get("SigPnd", "0"), 16) | int(field.get("ShdPnd", "0"), 16)
    return {
        **{name: int(field[words]) if words in field else None for name, words in names.items()},
        "core_dumping": field.get("CoreDumping", "").strip() == "1",
        "kill_pending": bool(pending & 1 << (SIGKILL - 1)),
    }


def read_safe(pid: int) -> Facts:
    """Return the content of the files that never block, or `{"state": "gone"}`."""
    stat = read_text(f"/proc/{pid}/stat")
    status = read_text(f"/proc/{pid}/status")
    facts: Facts = {"mono": time.monotonic(), "state": "gone"}
    if stat and status:
        facts["wchan"] = read_text(f"/proc/{pid}/wchan")
        facts.update(parse_stat(stat))
        facts.update(parse_status(status))
    return facts


def thread_times(pid: int) -> tuple[dict[str, int], int | None]:
    """Return ({thread ID: nanoseconds on a CPU}, nanoseconds that all threads waited for a CPU).

    A thread whose number has not changed has not moved. ({}, None) if it is not known: a kernel that does not count
    shows zeros for every thread.
    """
    try:
        names = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return {}, None
    texts = {name: read_text(f"/proc/{pid}/task/{name}/schedstat") for name in names}
    pairs = {name: text.split() for name, text in texts.items() if text}
    if not any(int(pair[0]) for pair in pairs.values()):
        return {}, None
    return {name: int(pair[0]) for name, pair in pairs.items()}, sum(int(pair[1]) for pair in pairs.values())


def parents() -> dict[int, int]:
    """Return the parent of every visible process: {pid: ppid}."""
    stats = {name: read_text(f"/proc/{name}/stat") for name in os.listdir("/proc") if name.isdigit()}
    return {int(name): parse_stat(stat)["ppid"] for name, stat in stats.items() if stat}


def left_by(launcher_pid: int) -> set[int]:
    """Return the processes that a launcher which has ended has left behind: those of its session or process group."""
    stats = {name: read_text(f"/proc/{name}/stat") for name in os.listdir("/proc") if name.isdigit()}
    fields = {int(name): stat.rpartition(")")[2].split() for name, stat in stats.items() if stat}
    return {pid for pid, field in fields.items() if str(launcher_pid) in field[2:4]}


def end_of(pid: int) -> dict[str, int] | None:
    """Return {code} or {signal} of a process that has ended and was not reaped; None if it may not be known."""
    field = (read_text(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
    if len(field) < 50 or field[0] != "Z" or os.geteuid() not in (0, owner_of(pid)):
        return None  # to others than its user, the kernel shows 0
    status = int(field[49])
    return {"signal": status & 0x7F} if status & 0x7F else {"code": status >> 8 & 0xFF}


def descendants(root: int, parent_of: dict[int, int]) -> set[int]:
    """Return every descendant of `root`, without `root`."""
    children: dict[int, list[int]] = {}
    for pid, ppid in parent_of.items():
        children.setdefault(ppid, []).append(pid)
    below: set[int] = set()
    left = [root]
    while left:
        new = [pid for pid in children.get(left.pop(), ()) if pid not in below and pid != root]
        below.update(new)
        left.extend(new)
    return below


class Reader:
    """A forked child that goes through `items` and reports (item, name, value); it may block forever on one of them.

    After each item it reports (item, "done", True).
    """

    def __init__(self, items: list[Any], produce: Produce) -> None:
        self.left = list(items)
        self.heard = time.monotonic()
        self.is_replaced = False
        self._bytes = b""
        self.descriptor, write_end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _report(items, produce, write_end)
        os.close(write_end)
        try:
            os.setpgid(self.pid, self.pid)
        except OSError:
            pass  # the child has already done it, or is gone

    def receive(self, found: dict[Any, Facts]) -> bool:
        """Put what the child reported into `found`. Returns False at its end."""
        data = os.read(self.descriptor, 1 << 16)
        self._bytes += data
        while len(self._bytes) >= 4:
            size = int.from_bytes(self._bytes[:4], "little") + 4
            if len(self._bytes) < size:
                break
            item, name, value = marshal.loads(self._bytes[4:size])
            self._bytes = self._bytes[size:]
            self.heard = time.monotonic()
            found.setdefault(item, {})[name] = value
            if name == "done" and self.left:
                self.left.pop(0)
        return bool(data)

    def close(self) -> None:
        """Kill the child and its own children. Never waits: a process that sleeps in the kernel stays behind."""
        os.close(self.descriptor)
        for action in (lambda: os.killpg(self.pid, SIGKILL), lambda: os.waitpid(self.pid, os.WNOHANG)):
            try:
                action()
            except OSError:
                pass


def _report(items: list[Any], produce: Produce, write_end: int) -> None:
    try:
        os.setpgid(0, 0)
        for report in produce(items):
            _write(write_end, report)
    except BaseException as error:
        _write(write_end, (None, "error", repr(error)[:300]))
    finally:
        os._exit(0)


def _write(descriptor: int, report: tuple[Any, str, Any]) -> None:
    body = marshal.dumps(report)
    data = len(body).to_bytes(4, "little") + body
    while data:
        data = data[os.write(descriptor, data) :]


def ask_children(items: list[Any], produce: Produce, limit_s: float, workers: int, deadline: float) -> dict[Any, Facts]:
    """Return what readers found about `items`: {item: {name: value}}. An item that was read completely has "done".

    Each of `workers` readers gets a share of the items. A reader that is silent for a moment keeps its item until
    `limit_s` is over; the rest of its share goes to a new reader.
    """
    found: dict[Any, Facts] = {}
    readers = [Reader(items[index::workers], produce) for index in range(workers) if items[index::workers]]
    while readers:
        ready = select.select([reader.descriptor for reader in readers], [], [], 0.05)[0]
        now = time.monotonic()
        for reader in list(readers):
            ended = reader.descriptor in ready and not reader.receive(found)
            if not ended and now - reader.heard > GRACE_S and not reader.is_replaced:
                reader.is_replaced = True
                rest, reader.left = reader.left[1:], reader.left[:1]
                if rest and now < deadline:
                    readers.append(Reader(rest, produce))
            is_over = now - reader.heard > limit_s or now > deadline or (reader.is_replaced and not reader.left)
            if ended or is_over:
                readers.remove(reader)
                reader.close()
    return found


def ask_one(produce: Callable[[], Iterable[tuple[str, Any]]], limit_s: float) -> Facts:
    """Return what one forked child reports, with "done" if it reached its end, and "error" if it failed."""

    def produce_one(_items: list[Any]) -> Iterator[tuple[int, str, Any]]:
        for name, value in produce():
            yield 0, name, value
        yield 0, "done", True

    found = ask_children([0], produce_one, limit_s, 1, time.monotonic() + limit_s)
    return {**found.get(None, {}), **found.get(0, {})}


def run_program(argv: list[str], timeout_s: float, environment: dict[str, str]) -> tuple[int | None, str, str]:
    """Run a program and return its exit status (None: killed, out of time), stdout and stderr. Never waits longer."""
    pipes = [os.pipe(), os.pipe()]
    actions: list[tuple[Any, ...]] = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
    actions += [(os.POSIX_SPAWN_DUP2, pipes[index][1], index + 1) for index in (0, 1)]
    try:
        pid = os.posix_spawnp(argv[0], argv, environment, file_actions=actions)
    except OSError as error:
        pid, failure = 0, str(error)
    for _, write_end in pipes:
        os.close(write_end)
    texts = {read_end: b"" for read_end, _ in pipes}
    deadline = time.monotonic() + timeout_s
    is_over = pid != 0 and _drain(texts, deadline)
    output, errors = (texts[read_end].decode("utf-8", "replace") for read_end, _ in pipes)
    for read_end, _ in pipes:
        os.close(read_end)
    if pid == 0:
        return 127, "", failure
    if not is_over:
        os.kill(pid, SIGKILL)
        os.waitpid(pid, os.WNOHANG)
        return None, output, errors
    status = os.waitpid(pid, 0)[1]
    return (status >> 8 if status & 0x7F == 0 else -(status & 0x7F)), output, errors


def _drain(texts: dict[int, bytes], deadline: float) -> bool:
    """Read every pipe to its end. Returns False if the time is over before."""
    open_ends = list(texts)
    while open_ends:
        ready = select.select(open_ends, [], [], max(0.0, deadline - time.monotonic()))[0]
        if not ready:
            return False
        for read_end in ready:
            data = os.read(read_end, 1 << 16)
            texts[read_end] += data
            if not data:
                open_ends.remove(read_end)
    return True

"""What the kernel has on a process beyond the safe files, for node_agent.py. Standard library, Python 3.8 or newer.

The system call and its file, threads that cannot run, children, bytes read and written, out-of-memory kills, and file
locks. All of it is read in child processes that may be killed (see node_processes.py). If something cannot be read, the
reason is kept.
"""

from __future__ import annotations

import os
import time

from node_processes import parents, parse_stat, read_safe, read_text
from node_sockets import MAX_DESCRIPTORS, read_connections, read_socket_bytes, read_sockets, read_tables

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

    Facts = dict[str, Any]

MAX_CHILDREN = 32
MAX_THREADS = 256
MAX_BLOCKED_THREADS = 8
MAX_WAITING_THREADS = 48
MAX_LOCKS = 16
MAX_PIPE_ENDS = 4
PIPE_SEARCH_S = 0.3
NO_FILES = ("/dev/", "/proc/", "/sys/", "/memfd:")
# System calls that block, by architecture: those whose first argument is a file descriptor, and others.
FD_CALLS = {
    "x86_64": {
        0: "read", 1: "write", 16: "ioctl", 17: "pread64", 18: "pwrite64", 19: "readv", 20: "writev", 40: "sendfile",
        42: "connect", 43: "accept", 44: "sendto", 45: "recvfrom", 46: "sendmsg", 47: "recvmsg", 72: "fcntl",
        73: "flock", 74: "fsync", 75: "fdatasync", 217: "getdents64", 232: "epoll_wait", 281: "epoll_pwait",
        288: "accept4",
    },
    "aarch64": {
        22: "epoll_pwait", 25: "fcntl", 29: "ioctl", 32: "flock", 61: "getdents64", 63: "read", 64: "write",
        65: "readv", 66: "writev", 67: "pread64", 68: "pwrite64", 71: "sendfile", 82: "fsync", 83: "fdatasync",
        202: "accept", 203: "connect", 206: "sendto", 207: "recvfrom", 211: "sendmsg", 212: "recvmsg", 242: "accept4",
    },
}  # fmt: skip
OTHER_CALLS = {
    "x86_64": {
        7: "poll", 9: "mmap", 10: "mprotect", 11: "munmap", 23: "select", 35: "nanosleep", 61: "wait4", 202: "futex",
        230: "clock_nanosleep", 247: "waitid", 257: "openat", 262: "newfstatat", 270: "pselect6", 271: "ppoll",
        332: "statx",
    },
    "aarch64": {
        56: "openat", 72: "pselect6", 73: "ppoll", 98: "futex", 101: "nanosleep", 115: "clock_nanosleep",
        260: "wait4", 291: "statx",
    },
}  # fmt: skip

# Calls that wait for any of some files, and which argument is how many; of none, they sleep.
FILE_COUNTS = {"select": 1, "pselect6": 1, "poll": 2, "ppoll": 2}


def read_rank_kernel(rank: Facts, _request: Facts, known: Facts) -> Iterator[tuple[str, Any]]:
    """Yield everything about a process, in the order of growing risk; `known` is shared within one reader."""
    unread: dict[str, str] = {}
    for name, read in READERS:
        try:
            value = read(rank["pid"], known)
        except (OSError, ValueError) as error:
            unread[name] = getattr(error, "strerror", None) or str(error)
            continue
        if value is not None:
            yield name, value
    if unread:
        yield "unread", unread


def read_file(path: str) -> str:
    """Return the text of a file in /proc. Unlike `read_text`, it raises OSError."""
    with open(path, "rb") as stream:
        return stream.read(1 << 16).decode("utf-8", "replace")


def blocked_threads(pid: int, _known: Facts) -> list[Facts] | None:
    """Return threads other than the main one that are in state D or stopped: [{tid, comm, state, wchan}], or None."""
    found = []
    for name in os.listdir(f"/proc/{pid}/task")[:MAX_THREADS]:
        stat = read_text(f"/proc/{pid}/task/{name}/stat") if name != str(pid) else None
        fact = parse_stat(stat) if stat else {"state": ""}
        if fact["state"] in ("D", "T", "t"):
            wchan = read_text(f"/proc/{pid}/task/{name}/wchan")
            found.append({"tid": int(name), "comm": fact["comm"], "state": fact["state"], "wchan": wchan})
    return found[:MAX_BLOCKED_THREADS] or None


def thread_waits(pid: int, _known: Facts) -> dict[str, list[int]]:
    """Return {kernel function: threads other than the main one that wait in it}; a thread that is missing may run."""
    found: dict[str, list[int]] = {}
    for name in os.listdir(f"/proc/{pid}/task")[:MAX_THREADS]:
        wait = read_text(f"/proc/{pid}/task/{name}/wchan") if name != str(pid) else None
        if wait and wait != "0":
            found.setdefault(wait, []).append(int(name))
    return {wait: threads[:MAX_WAITING_THREADS] for wait, threads in found.items()}


def read_children(pid: int, _known: Facts) -> list[Facts]:
    """Return the descendants of a rank, nearest first, with their states in the kernel; at most 32."""
    found: list[Facts] = []
    left = [pid]
    for parent in left:
        for child in children_of(parent):
            if len(found) < MAX_CHILDREN:
                fact = read_safe(child)
                names = ("comm", "state", "wchan", "ppid", "cpu_ticks")
                found.append({"pid": child, **{name: fact.get(name) for name in names}})
                left.append(child)
    return found


def children_of(pid: int) -> list[int]:
    """Return the children of all threads of a process; from the whole process table if the kernel keeps no lists."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")[:MAX_THREADS]
    except OSError:
        return []
    texts = [read_text(f"/proc/{pid}/task/{thread}/children") for thread in threads]
    if texts and all(text is None for text in texts) and os.path.exists(f"/proc/{pid}"):
        return sorted(child for child, parent in parents().items() if parent == pid)
    return sorted(int(child) for text in texts for child in (text or "").split())


def child_ticks(children: Iterable[Facts]) -> dict[str, int]:
    """Return {pid: CPU ticks so far} of living children, from files that never block."""
    texts = {child["pid"]: read_text(f"/proc/{child['pid']}/stat") for child in children}
    return {str(pid): parse_stat(text)["cpu_ticks"] for pid, text in texts.items() if text}


def read_system_call(pid: int, known: Facts) -> Facts | None:
    """Return the system call in which the main thread waits, with the file it operates on; None while it runs.

    {number, call, and for calls on a file: name, fd, target, and `socket` or, for a pipe, `other_ends`; for a wait for
    any of some files: num_files}.
    """
    field = read_file(f"/proc/{pid}/syscall").split()
    if len(field) < 2 or not field[0].lstrip("-").isdigit():
        return None
    number, machine = int(field[0]), os.uname().machine
    on_file = FD_CALLS.get(machine, {}).get(number)
    if on_file is None:
        call = OTHER_CALLS.get(machine, {}).get(number)
        facts: Facts = {"number": number, "call": call} if call else {"number": number}
        if call in FILE_COUNTS and len(field) > 2:
            facts["num_files"] = int(field[FILE_COUNTS[call]], 16) & 0xFFFFFFFF
        return facts
    descriptor = int(field[1], 16) & 0xFFFFFFFF
    facts = {"number": number, "call": on_file, "name": on_file, "fd": descriptor, "target": None}
    try:
        facts["target"] = target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
    except OSError:
        return facts
    if target.startswith("socket:["):
        facts["socket"] = read_tables(pid, known.setdefault("networks", {})).get(target[8:-1])
    elif target.startswith("pipe:["):
        facts["other_ends"] = pipe_ends(target, pid)
    return facts


def pipe_ends(pipe: str, pid: int) -> list[Facts]:
    """Return other processes that hold a pipe open: [{pid, comm, state}], as far as a short search finds them."""
    found: list[Facts] = []
    until = time.monotonic() + PIPE_SEARCH_S
    for name in os.listdir("/proc"):
        if len(found) >= MAX_PIPE_ENDS or time.monotonic() > until:
            break
        if name.isdigit() and int(name) != pid and holds(name, pipe):
            fact = read_safe(int(name))
            found.append({"pid": int(name), "comm": fact.get("comm"), "state": fact["state"]})
    return found


def holds(pid: str, target: str) -> bool:
    """Whether a process has a file open, judging by the targets of its descriptors."""
    try:
        return any(os.readlink(f"/proc/{pid}/fd/{name}") == target for name in os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return False  # it has ended, or belongs to another user


def read_io(pid: int, _known: Facts) -> dict[str, int]:
    """Return the bytes through system calls (rchar, wchar) and from and to disks (read_bytes, write_bytes)."""
    pairs = (line.split(": ") for line in read_file(f"/proc/{pid}/io").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if pair[0] in ("rchar", "wchar", "read_bytes", "write_bytes")}


def read_file_bytes(pid: int, _known: Facts) -> int:
    """Return the sum of the positions in the files that a process has open for writing: it changes as they grow.

    Not all files move it: those that are mapped, or written at given positions (pwrite), do not.

    Raises:
        OSError, ValueError: its descriptors cannot be read.
    """
    names, total = os.listdir(f"/proc/{pid}/fd"), 0
    if len(names) > MAX_DESCRIPTORS:
        raise ValueError("too many open files")
    for name in names:
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            is_written = os.lstat(f"/proc/{pid}/fd/{name}").st_mode & 0o200  # the link's own, not the file's
        except OSError:
            continue  # it was closed just now
        if is_written and target.startswith("/") and not target.startswith(NO_FILES):
            _, _, position = (read_text(f"/proc/{pid}/fdinfo/{name}") or "").partition("pos:")
            total += int(position.split()[0]) if position else 0
    return total


def read_memory_events(pid: int, known: Facts) -> Facts | None:
    """Return {cgroup, oom_kill, high, max}: how often memory ran short in the job step of this process."""
    for line in read_file(f"/proc/{pid}/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        version = 2 if controllers == "" else 1 if "memory" in controllers.split(",") else 0
        events = known.setdefault("memory", {})
        if version and (version, path) not in events:
            events[version, path] = memory_events(version, path)
        if version and events[version, path] is not None:
            return dict(events[version, path])
    return None


def memory_events(version: int, path: str) -> Facts | None:
    """Return the counts of one cgroup; of the job step's cgroup if Slurm made it, which outlives a killed task."""
    above, found, below = path.partition("/step_")
    top = above + found + below.partition("/")[0]
    base, file = (
        ("/sys/fs/cgroup", "memory.events") if version == 2 else ("/sys/fs/cgroup/memory", "memory.oom_control")
    )
    text = read_text(f"{base}{top}/{file}")
    if text is None:
        return None
    counts = {name: int(value) for name, _, value in (line.partition(" ") for line in text.splitlines())}
    return dict({name: counts[name] for name in ("oom_kill", "high", "max") if name in counts}, cgroup=top)


def read_sockets_of(pid: int, known: Facts) -> Facts | None:
    """Return the TCP sockets of a process, or None if it has none."""
    sockets = read_sockets(pid, known.setdefault("networks", {}))
    return sockets if sockets["count"] else None


def read_connections_of(pid: int, known: Facts) -> Facts:
    """Return which connections a process has with others: see node_sockets.py."""
    return read_connections(pid, known.setdefault("networks", {}))


def parse_locks(text: str) -> list[Facts]:
    """Parse /proc/locks: [{kind, mode, file, holder, waiters}], with the kernel's PIDs, 0 if unknown."""
    rows: dict[str, Facts] = {}
    for line in text.splitlines():
        number, _, rest = line.partition(": ")
        field = rest.replace("->", " ").split()
        if len(field) < 5 or not field[3].lstrip("-").isdigit():
            continue
        if "->" in rest:
            rows.get(number, {"waiters": []})["waiters"].append(max(0, int(field[3])))
        else:
            holder = max(0, int(field[3]))
            rows[number] = {"kind": field[0], "mode": field[2], "file": field[4], "holder": holder, "waiters": []}
    return list(rows.values())


def find_locks(pids: set[int]) -> list[Facts]:
    """Return file locks that one of `pids` waits for or holds, those for which others wait first; with the holder's
    facts. Who tries again and again to get a lock is not seen waiting."""
    found = [row for row in parse_locks(read_file("/proc/locks")) if pids & {row["holder"], *row["waiters"]}]
    found.sort(key=lambda row: not row["waiters"])
    return [dict(row, **describe_holder(row)) for row in found[:MAX_LOCKS]]


def describe_holder(lock: Facts) -> Facts:
    """Return {holder_comm, holder_state, path} of a lock, as far as known without touching its file system."""
    fact, pid = read_safe(lock["holder"]), lock["holder"]
    facts = {"holder_comm": fact.get("comm"), "holder_state": fact["state"], "path": None}
    try:
        names = os.listdir(f"/proc/{pid}/fdinfo")
        held = (name for name in names if f" {lock['file']} " in (read_text(f"/proc/{pid}/fdinfo/{name}") or ""))
        facts["path"] = next((os.readlink(f"/proc/{pid}/fd/{name}") for name in held), None)
    except OSError:
        pass  # it has ended, or belongs to another user
    return facts


READERS = (
    ("blocked_threads", blocked_threads),
    ("thread_waits", thread_waits),
    ("children", read_children),
    ("system_call", read_system_call),
    ("io", read_io),
    ("file_bytes", read_file_bytes),
    ("socket_bytes", read_socket_bytes),
    ("memory_events", read_memory_events),
    ("sockets", read_sockets_of),
    ("connections", read_connections_of),
)

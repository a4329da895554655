"""Pulls torch's flight recorder out of an unprepared process, for node_agent.py. Linux on x86_64 only.

It does what `call` does in a debugger, without the two dangers of that: a thread left in the middle of a foreign call
when the debugger dies, and a process that is stopped while symbols are read. One thread that sleeps in the kernel is
held for less than a millisecond (PTRACE_SEIZE sends no signal, and the kernel releases the thread if we die). Its
program counter is set to `STUB`; nothing else changes. The stub forks, waits for the child (which forks again and
ends), restores every register and returns to where the thread was. From then on the process does not depend on us. The
grandchild, a copy of the process, calls `c10d::dump_fr_trace_json(true, false)`, writes the text to a socket of ours
and ends; after 10 seconds the kernel ends it.

The stub is written to the zeros behind the code of some library, into a private copy of that page.
"""

from __future__ import annotations

import os
import struct
import time

from node_processes import owner_of, parse_stat, peer_of, read_text
from node_recorder import LARGEST_DUMP, compact_records
from safe_files import open_stream, parse_json

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, BinaryIO

    Facts = dict[str, Any]

LIBRARY = "/libtorch_cpu.so"
FUNCTION = b"_ZN4c10d18dump_fr_trace_jsonB5cxx11Ebb"
PULL_TIMEOUT_S = 12.0
STOP_TIMEOUT_S = 1.0
MAX_TRIES = 8
ANSWER_TIMEOUT_S = 10.0
# System calls that a thread may be taken out of: it goes back into them as after an ignored signal.
QUIET_CALLS = ("202", "230", "61", "7")  # futex, clock_nanosleep, wait4, poll
RESTART = (-512, -513, -514)  # include/linux/errno.h: the kernel would repeat the call
RESTART_BLOCK = -516  # the kernel would resume it through restart_syscall
RESTART_SYSCALL = 219
SEIZE, INTERRUPT, GET_REGISTERS, SET_REGISTERS, POKE, DETACH = 0x4206, 0x4207, 12, 13, 4, 17
EVENT_STOP, ALL_CHILDREN = 128, 0x40000000
ELF_64_BITS, ELF_X86_64 = 2, 62
REGISTERS = 27  # struct user_regs_struct
RAX, ORIG_RAX, RIP = 10, 15, 16
# node_injection.s assembled; a test compares the two.
STUB = bytes.fromhex(
    "9090909090909090488d6424809c50515253555657415041514152415341544155415641574889e54883e4f0e8510000004885c07460781a"
    "4889c731f6ba000000404531d2b83d0000000f054883f8fc74e94889ec415f415e415d415c415b415a415941585f5e5d5b5a59589d488da4"
    "2480000000488b050c010000ff250e01000031ff31f631d24531d24531c0b8380000000f05c3e8e7ffffff4885c0740931ffb8e70000000f"
    "054883e4f04881ec000100004889e731c0b920000000f348abb8700000000f05bf040000004889e6b8a00000000f05bf0e0000004889e631"
    "d241ba08000000b80d0000000f05bf020000004889e631d241ba08000000b80e0000000f05bf0a000000b8250000000f054889e7be010000"
    "0031d2ff1577000000bf01000000be0100000031d2b8290000000f054189c489c7488d3560000000ba18000000b82a0000000f054885c00f"
    "884bffffff4c8b2c244c8b7424084d85f60f8439ffffff4489e74c89ee4c89f2b8010000000f054885c00f8e20ffffff4901c54929c6ebd6"
)
STUB_BYTES = len(STUB) + 3 * 8 + 24


def may_pull(rank: Facts, request: Facts) -> bool:
    """Whether the recorder of a rank must be pulled: it was asked for, and it has not been read yet."""
    return request.get("flight_recorder") == "fork" and not any("recorder" in sample for sample in rank["samples"])


def read_rank_pulled(rank: Facts, _request: Facts, known: Facts) -> Iterator[tuple[str, Any]]:
    """Return the collectives that torch recorded."""
    try:
        if os.uname().machine != "x86_64":
            raise OSError(f"--flight-recorder=fork is written for x86_64; this node is {os.uname().machine}")
        text = pull(rank["pid"], known)
        yield "recorder", dict(compact_records(parse_json(text, LARGEST_DUMP)["entries"]), members={})
    except (OSError, ValueError, KeyError, struct.error) as error:
        yield "recorder_why", f"it could not be pulled: {getattr(error, 'strerror', None) or error}"


def pull(pid: int, known: Facts) -> bytes:
    """The recorder's JSON.

    Raises:
        OSError: the process has not loaded torch for x86_64, may not be traced, has no thread that sleeps, or gave no
            answer.
    """
    import socket

    function = address_of(pid, known)
    name = b"\0bsl-" + os.urandom(9).hex().encode()[:17]  # 22 bytes: the stub knows the length
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen(128)
        if not any(inject(pid, quiet_thread(pid), function, name) for _ in range(MAX_TRIES)):
            raise OSError("its threads woke up at every attempt")
        with accept_from(server, owner_of(pid)) as connection:
            connection.settimeout(ANSWER_TIMEOUT_S)
            parts = [connection.recv(1 << 18)]
            while parts[-1]:
                parts.append(connection.recv(1 << 18))
    return b"".join(parts)


def accept_from(server: Any, owner: int) -> Any:
    """Accept a connection from a process of `owner`. Names of this kind have no owner and are no secret: others may
    connect too, and are sent away.

    Raises:
        OSError: none came in time.
    """
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while True:
        server.settimeout(max(0.001, deadline - time.monotonic()))
        connection, _ = server.accept()
        if peer_of(connection) == owner:
            return connection
        connection.close()


def quiet_thread(pid: int) -> int:
    """A thread that sleeps in a call that the kernel can repeat; the main thread before others."""
    names = sorted(os.listdir(f"/proc/{pid}/task"), key=lambda name: (int(name) != pid, int(name)))
    texts = [(name, read_text(f"/proc/{pid}/task/{name}/stat")) for name in names]
    states = {name: parse_stat(text)["state"] for name, text in texts if text}
    if {"T", "t"} & set(states.values()):
        raise OSError("the process is stopped or traced")
    for name, state in states.items():
        call = (read_text(f"/proc/{pid}/task/{name}/syscall") or "").split()
        if state == "S" and call and call[0] in QUIET_CALLS:
            return int(name)
    raise OSError("no thread of it sleeps in a call that can be repeated")


def inject(pid: int, thread: int, function: int, name: bytes) -> bool:
    """Make `thread` run the stub, and release it. False if it woke up before it was held: then nothing was done."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    libc.ptrace.restype = ctypes.c_long

    def trace(request: int, address: Any = None, data: Any = None) -> None:
        if libc.ptrace(request, thread, address, data) == -1:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    place = find_room(pid)
    trace(SEIZE)
    trace(INTERRUPT)
    status = await_stop(thread)
    if status >> 16 != EVENT_STOP:
        trace(DETACH, None, status >> 8 & 0xFF)  # a signal came first: it gets it
        return False
    registers = (ctypes.c_ulonglong * REGISTERS)()
    trace(GET_REGISTERS, None, ctypes.addressof(registers))
    final = resume_point(registers[RAX], registers[ORIG_RAX], registers[RIP])
    if final is not None:
        address = struct.pack("<H22s", 1, name)
        body = STUB + struct.pack("<QQQ", final[0], final[1], function) + address
        for offset in range(0, len(body), 8):
            trace(POKE, place + offset, int.from_bytes(body[offset : offset + 8], "little"))
        registers[RIP], registers[ORIG_RAX] = place + 8, (1 << 64) - 1
        trace(SET_REGISTERS, None, ctypes.addressof(registers))  # from here on the stub returns on its own
    trace(DETACH)
    return final is not None


def resume_point(rax: int, original: int, rip: int) -> tuple[int, int] | None:
    """(rax, program counter) with which the kernel would have resumed the thread; None if it was in no system call."""
    result = rax - (1 << 64) if rax >> 63 else rax
    if original >> 63:
        return None
    if result in RESTART:
        return original, rip - 2
    if result == RESTART_BLOCK:
        return RESTART_SYSCALL, rip - 2
    return None


def await_stop(thread: int) -> int:
    """The status with which a seized thread stopped."""
    until = time.monotonic() + STOP_TIMEOUT_S
    while time.monotonic() < until:
        found, status = os.waitpid(thread, os.WNOHANG | ALL_CHILDREN)
        if found:
            return status
        time.sleep(0.0005)
    raise OSError("its thread did not stop")  # our end sets it free


def mappings(pid: int) -> Iterator[tuple[int, int, str, int, str]]:
    """(start, end, permissions, offset in the file, path) of every mapped file."""
    for line in (read_text(f"/proc/{pid}/maps", 1 << 24) or "").splitlines():
        field = line.split(None, 5)
        if len(field) == 6 and field[5].startswith("/"):
            start, _, end = field[0].partition("-")
            yield int(start, 16), int(end, 16), field[1], int(field[2], 16), field[5]


def find_room(pid: int) -> int:
    """Find an address with enough zeros behind the code of a library."""
    with open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for start, end, permissions, _, _ in mappings(pid):
            if permissions == "r-xp" and end - start >= 4096:
                room = (end - STUB_BYTES - 64) & ~15
                memory.seek(room)
                if not any(memory.read(end - room)):
                    return room
    raise OSError("no room in its code")


def address_of(pid: int, known: Facts) -> int:
    """Address of the dump function in a process."""
    maps = [row for row in mappings(pid) if row[4].endswith(LIBRARY)]
    if not maps:
        raise OSError("it has not loaded torch")
    path = f"/proc/{pid}/root{maps[0][4]}"
    if maps[0][4] not in known:
        with open_stream(path, follow=True) as stream:
            known[maps[0][4]] = offset_of(stream, FUNCTION)
    offset: int = known[maps[0][4]]
    for start, end, _, in_file, _ in maps:
        if in_file <= offset < in_file + end - start:
            return int(start + offset - in_file)
    raise OSError("its torch is not mapped as usual")


def offset_of(stream: BinaryIO, name: bytes) -> int:
    """Where in an ELF file the exported function `name` is. A process that is not x86_64 is known by its libraries."""
    header = stream.read(64)
    if header[:4] != b"\x7fELF":
        raise OSError("its torch is not an ELF library")
    if header[4] != ELF_64_BITS:
        raise OSError("--flight-recorder=fork is written for 64-bit processes; this one is 32-bit")
    machine = struct.unpack_from("<H", header, 18)[0]
    if machine != ELF_X86_64:
        raise OSError(
            f"--flight-recorder=fork is written for x86_64; the torch of this process is not (ELF machine {machine})"
        )
    segments_at, sections_at = struct.unpack_from("<QQ", header, 32)
    size, count, _, num_sections = struct.unpack_from("<HHHH", header, 54)
    stream.seek(segments_at)
    segments = [struct.unpack_from("<IIQQQQ", stream.read(size)) for _ in range(count)]
    stream.seek(sections_at)
    sections = [struct.unpack("<IIQQQQIIQQ", stream.read(64)) for _ in range(num_sections)]
    symbols = next((section for section in sections if section[1] == 11), None)  # SHT_DYNSYM
    if symbols is None:
        raise OSError("its torch exports nothing")
    names = sections[symbols[6]]
    stream.seek(names[4])
    at = stream.read(names[5]).find(b"\0" + name + b"\0") + 1
    stream.seek(symbols[4])
    entries = struct.iter_unpack("<IBBHQQ", stream.read(symbols[5] // 24 * 24))
    value = next((entry[4] for entry in entries if entry[0] == at and entry[4]), 0) if at else 0
    for kind, _, offset, address, _, in_file in segments:
        if kind == 1 and value and address <= value < address + in_file:
            return int(offset + value - address)
    raise OSError("its torch has no flight recorder of this form (2.8 or newer has)")

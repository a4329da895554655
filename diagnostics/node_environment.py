"""Reads the environment that a process has now, for node_agent.py. Standard library only, Python 3.8 or newer.

/proc/PID/environ shows the environment with which the program began. What it sets later (`os.environ["RANK"] = "3"`, as
Lightning, Ray Train and many launchers do) is only in its memory: in the array that the C library's variable `environ`
points to. This module finds that variable in the program or in its C library, and reads the array through
/proc/PID/mem. The process is not paused. Both files may block on a process whose memory map is locked: for readers.
"""

from __future__ import annotations

import os
from struct import calcsize, iter_unpack, unpack, unpack_from

from node_processes import read_text
from safe_files import open_stream

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from typing import Any, BinaryIO

    # (first address, offset in the file, path)
    Regions = list[tuple[int, int, str]]
    # (address in the file, whether the file says where it is loaded)
    Symbol = tuple[int, bool]

NAMES = (b"environ", b"_environ", b"__environ")
C_LIBRARIES = ("libc.so", "libc-", "ld-musl", "libc.musl")
MAX_MAPS_BYTES = 1 << 21
MAX_VARIABLES = 4096
MAX_VALUE_BYTES = 512
ELF_64_LITTLE = b"\x7fELF\x02\x01"
IS_POSITION_INDEPENDENT = 3  # ET_DYN in elf.h
DYNAMIC_SYMBOLS = 11  # SHT_DYNSYM in elf.h
SECTION = "<IIQQQQIIQQ"
SYMBOL = "<IBBHQQ"


def environment_now(pid: int, wanted: tuple[str, ...], known: dict[str, Any]) -> dict[str, str] | None:
    """Return those of the variables `wanted` that the process has now, or None if its memory cannot be read.

    `known` caches what was found in files.
    """
    regions = parse_maps(read_text(f"/proc/{pid}/maps", MAX_MAPS_BYTES) or "")
    try:
        program = os.readlink(f"/proc/{pid}/exe")
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            for path in [program, *c_libraries(regions)]:
                at = address_of_environ(pid, path, regions, known)
                if at is not None:
                    return read_variables(memory, at, wanted)
    except (OSError, ValueError, OverflowError):
        return None
    return None


def parse_maps(text: str) -> Regions:
    """Return the files in a process's memory map: the mapping of the beginning of each file."""
    fields = (line.split(None, 5) for line in text.splitlines())
    return [
        (int(field[0].partition("-")[0], 16), int(field[2], 16), field[5])
        for field in fields
        if len(field) == 6 and field[5].startswith("/") and int(field[2], 16) == 0
    ]


def c_libraries(regions: Regions) -> list[str]:
    """Return the paths of the C library, without repetition."""
    paths = [path for _, _, path in regions if path.rpartition("/")[2].startswith(C_LIBRARIES)]
    return list(dict.fromkeys(paths))


def address_of_environ(pid: int, path: str, regions: Regions, known: dict[str, Any]) -> int | None:
    """Return where the variable is in memory if the file at `path` has it, or None."""
    if path not in known:
        known[path] = find_environ(f"/proc/{pid}/root{path}")
    symbol: Symbol | None = known[path]
    if symbol is None:
        return None
    address, is_fixed = symbol
    base = 0 if is_fixed else min((start for start, _, mapped in regions if mapped == path), default=None)
    return None if base is None else base + address


def find_environ(path: str) -> Symbol | None:
    """Return the address of `environ` that the ELF file at `path` defines, or None."""
    try:
        with open_stream(path, follow=True) as file:
            return find_symbol(file)
    except (OSError, ValueError, LookupError):
        return None


def find_symbol(file: BinaryIO) -> Symbol | None:
    """Return the address of `environ` in an ELF file, and whether it is absolute; None if it is defined elsewhere."""
    head = file.read(64)
    if head[:6] != ELF_64_LITTLE:
        return None
    (kind,) = unpack_from("<H", head, 16)
    (table,) = unpack_from("<Q", head, 40)
    size, count = unpack_from("<HH", head, 58)
    file.seek(table)
    sections = [unpack_from(SECTION, file.read(size)) for _ in range(count)]
    for section in sections:
        if section[1] == DYNAMIC_SYMBOLS:
            names, symbols = read_section(file, sections[section[6]]), read_section(file, section)
            offsets = name_offsets(names)
            whole = symbols[: len(symbols) // calcsize(SYMBOL) * calcsize(SYMBOL)]
            for name, _, _, place, value, _ in iter_unpack(SYMBOL, whole):
                if name in offsets and place and value:
                    return value, kind != IS_POSITION_INDEPENDENT
    return None


def read_section(file: BinaryIO, section: tuple[Any, ...]) -> bytes:
    file.seek(section[4])
    return file.read(section[5])


def name_offsets(names: bytes) -> set[int]:
    """Return where the names of the variable begin in a table of names; one name may be the end of another."""
    found = set()
    at = names.find(NAMES[0] + b"\0")
    while at >= 0:
        for name in NAMES:
            start = at - len(name) + len(NAMES[0])
            if names[start : at + len(NAMES[0])] == name:
                found.add(start)
        at = names.find(NAMES[0] + b"\0", at + 1)
    return found


def read_variables(memory: BinaryIO, at: int, wanted: tuple[str, ...]) -> dict[str, str] | None:
    """Return those of the variables `wanted` that the array has whose address is stored at `at`."""
    array = unpack("<Q", read_memory(memory, at, 8))[0]
    if not array:
        return {}
    found: dict[str, str] = {}
    for first in range(0, MAX_VARIABLES, 256):
        block = read_memory(memory, array + 8 * first, 8 * 256, is_exact=False)
        for (address,) in iter_unpack("<Q", block[: len(block) // 8 * 8]):
            if not address:
                return found
            text = read_memory(memory, address, MAX_VALUE_BYTES, is_exact=False).partition(b"\0")[0]
            name, _, value = text.decode("utf-8", "replace").partition("=")
            if name in wanted:
                found.setdefault(name, value)
    return found


def read_memory(memory: BinaryIO, at: int, size: int, is_exact: bool = True) -> bytes:
    """Return `size` bytes of memory, or fewer where it ends.

    Raises:
        OSError: nothing can be read there. ValueError: there is less, and `is_exact`.
    """
    data = os.pread(memory.fileno(), size, at)
    if is_exact and len(data) != size:
        raise ValueError(f"{len(data)} of {size} bytes at {at:x}")
    return data

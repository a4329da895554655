"""Which processes listen where, from /proc, and what SECURITY.md says about it."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bigsci_launch.procfs import start_ticks

PAGE = Path(__file__).parents[2] / "SECURITY.md"
LISTENS, ACCEPTS = "0A", 0x10000
EVERYWHERE = ("0.0.0.0", "::")
PLACES = {
    "127.0.0.1": "loopback",
    "all addresses": "everywhere",
    "the address": "one address",
    "a Unix socket": "file",
    "an abstract Unix socket": "abstract",
}
"""What a cell of the table says, and which kind of place that is."""


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket at which a process accepts connections. `place` is an address, the path of a file, or `@name`."""

    pid: int
    command: str
    place: str
    port: int | None = None

    @property
    def kinds(self) -> set[str]:
        """Which kinds of places the place is; loopback is one address too."""
        if self.port is None:
            return {"abstract" if self.place.startswith("@") else "file"}
        if self.place in EVERYWHERE:
            return {"everywhere"}
        return {"loopback", "one address"} if self.place == "127.0.0.1" else {"one address"}


def table(heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading of SECURITY.md, without the line of its titles."""
    section = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    (text,) = (part for part in section if part.startswith(heading + "\n"))
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def allowed_places(rows: Iterable[Sequence[str]], row: str, clause: str = "") -> set[str]:
    """Return the kinds of places that a row of the table of ports names, in its clause with these words."""
    (where,) = (each[2] for each in rows if each[0] == row)
    (words,) = (each for each in where.split(";") if clause in each)
    return {kind for phrase, kind in PLACES.items() if phrase in words}


def processes_of(*folders: Path) -> list[int]:
    """Return every process that has one of these folders in its arguments or its environment, but this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_bytes() + (path / "environ").read_bytes()
            if any(bytes(folder) + end in words for folder in folders for end in (b"/", b"\0")):
                found.append(int(path.name))
    return [pid for pid in found if pid != os.getpid() and start_ticks(pid) is not None]


def listeners(pids: Iterable[int]) -> list[Listener]:
    """Return the sockets at which processes listen, each process in its own network."""
    return [each for pid in pids for each in _listeners_of(Path(f"/proc/{pid}"))]


def _listeners_of(process: Path) -> Iterator[Listener]:
    pid, links, command = int(process.name), set(), ""
    with contextlib.suppress(OSError):
        command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        for link in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                links.add(str(link.readlink()))
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for row in _rows(process / "net" / name):
            if row[3] == LISTENS and f"socket:[{row[9]}]" in links:
                host, port = row[1].split(":")
                yield Listener(pid, command, _address(family, host), int(port, 16))
    for row in _rows(process / "net" / "unix"):
        if int(row[3], 16) & ACCEPTS and f"socket:[{row[6]}]" in links:
            yield Listener(pid, command, row[7])


def _rows(path: Path) -> list[list[str]]:
    try:
        return [line.split() for line in path.read_text().splitlines()[1:]]
    except OSError:
        return []


def _address(family: socket.AddressFamily, words: str) -> str:
    """Return an address that the kernel wrote as numbers of 32 bits in the order of this machine."""
    numbers = (bytes.fromhex(words[start : start + 8])[::-1] for start in range(0, len(words), 8))
    return socket.inet_ntop(family, b"".join(numbers))

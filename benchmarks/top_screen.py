"""Starts `bsl top` on a pseudo-terminal with a queue of thousands of jobs: how soon frames come, and how many bytes.

    chrt -f 10 python benchmarks/top_screen.py docs/measurements/top.md [--before CLONE]

`squeue` is a program that prints a queue which was made up. The terminal has 80 x 24; a slow one takes 960 bytes a
second, as a line of 9600 baud. CLONE is another tree of `bsl`, to compare with. As root, `chrt -f` keeps other programs
of a busy machine out of the way. The sections of the page stay.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import signal
import statistics
import struct
import sys
import tempfile
import termios
import threading
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
JOBS = {"RUNNING": 300, "PENDING": 4300, "COMPLETED": 400}
STARTS = 7
QUIET_S = 20.0
SLOW = 960
"""Bytes a second."""
FRAME, ROWS = b"bsl top", b"300 running"
KEYS = {"next row": b"j", "next page": b"\x1b[6~", "end of the list": b"G"}


class TopOnTerminal:
    """`bsl top` of a tree, whose output is read as fast as its terminal allows."""

    def __init__(self, tree: Path, work: Path, speed: int | None = None) -> None:
        self._began, self._speed = time.monotonic(), speed
        self.output = bytearray()
        self._pid, self._terminal = pty.fork()
        if self._pid == 0:
            environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(tree), "BSL_RUNS": str(work)}
            environment["PATH"] = f"{work / 'bin'}:{environment['PATH']}"
            environment.pop("PYTHONDONTWRITEBYTECODE", None)
            os.chdir(work)
            os.execve(sys.executable, [sys.executable, "-P", "-m", "bigsci_launch", "top"], environment)
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                got = os.read(self._terminal, 1 << 16 if self._speed is None else self._speed // 10)
            except OSError:
                return
            if not got:
                return
            if self._speed is not None:
                time.sleep(len(got) / self._speed)
            self.output += got

    def seconds_to(self, words: bytes, since: int = 0, most_s: float = 60.0) -> float:
        """Return the seconds from the start until words are there; infinity if they do not come."""
        while words not in self.output[since:]:
            if time.monotonic() - self._began > most_s:
                return float("inf")
            time.sleep(0.002)
        return time.monotonic() - self._began

    def press(self, key: bytes) -> tuple[float, int]:
        """Press a key, and return the seconds until nothing comes for half a second, and the bytes until then."""
        before = size = len(self.output)
        pressed = last = time.monotonic()
        os.write(self._terminal, key)
        while time.monotonic() - last < (0.5 if size > before else 5.0):
            time.sleep(0.01)
            if len(self.output) > size:
                size, last = len(self.output), time.monotonic()
        return last - pressed, size - before

    def processor_s(self) -> float:
        fields = Path(f"/proc/{self._pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._reader.join()
        os.close(self._terminal)


@dataclass(frozen=True, slots=True)
class Measured:
    """What a tree of `bsl` shows when, each the median of STARTS; seconds, and bytes."""

    frame_s: float
    rows_s: float
    first_bytes: int
    idle_bytes: float
    idle_processor_s: float
    slow_rows_s: float
    keys: dict[str, tuple[float, int]]


def measure(tree: Path, work: Path) -> Measured:
    times: dict[bytes, list[float]] = {FRAME: [], ROWS: []}
    for _ in range(STARTS):
        top = TopOnTerminal(tree, work)
        for words in times:
            times[words].append(top.seconds_to(words))
        top.end()
    top = TopOnTerminal(tree, work)
    top.seconds_to(ROWS)
    time.sleep(20)  # all rows are read
    first, used = len(top.output), top.processor_s()
    time.sleep(QUIET_S)
    idle, idle_s = (len(top.output) - first) / QUIET_S, (top.processor_s() - used) / QUIET_S
    top.end()
    slow = TopOnTerminal(tree, work, SLOW)
    slow_rows_s = slow.seconds_to(ROWS)
    time.sleep(25)
    keys = {name: slow.press(key) for name, key in KEYS.items()}
    slow.end()
    return Measured(*(statistics.median(each) for each in times.values()), first, idle, idle_s, slow_rows_s, keys)


def make_queue(work: Path) -> None:
    """Write a `squeue` that prints JOBS."""
    now, lines = time.time(), []
    when = [time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(now + hours * 3600)) for hours in (-3, 17, -4)]
    for state, count in JOBS.items():
        for _ in range(count):
            number = len(lines)
            nodes = "(null)" if state == "PENDING" else f"n[{number % 50}-{number % 50 + 3}]"
            fields = [f"{400000 + number} {400000 + number}", state, "me", "gpu", "4", nodes, "Priority", *when[:2],
                      "3:12:40", when[2], f"job-{number}", "(null)"]  # fmt: skip
            lines.append("|".join(["gres/gpu:8", *fields]))
    (work / "queue").write_text("\n".join(lines) + "\n")
    (work / "bin").mkdir()
    squeue = work / "bin" / "squeue"
    squeue.write_text(f"#!/bin/sh\nexec cat {work / 'queue'}\n")
    squeue.chmod(0o755)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--before", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_queue(Path(folder))
        trees = {"before": options.before, "now": ROOT} if options.before else {"now": ROOT}
        found = {name: measure(tree.resolve(), Path(folder)) for name, tree in trees.items()}
    text = page_of(found)
    print(text)
    _, mark, rest = options.page.read_text().partition("\n## ")
    options.page.write_text(text + mark + rest)


def page_of(found: dict[str, Measured]) -> str:
    def row(name: str, values: list[str]) -> str:
        return f"| {' | '.join([name, *values])} |"

    each = list(found.values())
    load = float(Path("/proc/loadavg").read_text().split()[0])
    rows = [
        row("first frame", [f"{one.frame_s * 1e3:.0f} ms" for one in each]),
        row("rows of all jobs", [f"{one.rows_s * 1e3:.0f} ms" for one in each]),
        row("bytes until all rows are read", [f"{one.first_bytes:,}" for one in each]),
        row("bytes a second, while nothing happens", [f"{one.idle_bytes:.0f}" for one in each]),
        row("processor time of that", [f"{one.idle_processor_s:.1%}" for one in each]),
        row("9600 baud: rows of all jobs", [f"{one.slow_rows_s:.1f} s" for one in each]),
        *(row(f"9600 baud: {key}", [f"{one.keys[key][0]:.1f} s, {one.keys[key][1]:,} bytes" for one in each])
          for key in KEYS),
    ]  # fmt: skip
    head = (
        f"{time.strftime('%Y-%m-%d')}, by `benchmarks/top_screen.py`, Python {sys.version.split()[0]}, with a load of "
        f"{load:.0f} on {os.cpu_count()} cores,\nunder `chrt -f`: {sum(JOBS.values()):,} jobs in a queue that was made "
        "up, on a terminal of 80 x 24."
    )
    return "\n".join(["# `bsl top`: frames and bytes", "", head, "", row("what", list(found)),
                      row("---", ["---"] * len(found)), *rows, ""])  # fmt: skip


if __name__ == "__main__":
    main()

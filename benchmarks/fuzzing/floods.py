"""Inputs that are large, or no files at all: bombs, endless lines, pipes, devices, links in a circle, odd names."""

from __future__ import annotations

import gzip
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fuzzing import seeds

SPY = "stacks, in all layouts"
WHY = "`bsl why`: logs and error files"
STEPS = "lines of steps, forms for them"
RUN_FILES = "run files"
MIB = 1 << 20
LARGE = 256 * MIB
"""Of a bomb, when it is unpacked."""


@dataclass(frozen=True)
class Flood:
    """`make` fills a folder, which each of `readers` gets."""

    name: str
    make: Callable[[Path], object]
    readers: tuple[str, ...]
    cpu_s: float = 2.0
    """More where each line is worth reading, such as 16 MiB of stacks."""


def bomb(unit: bytes, name: str) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        stream = io.BytesIO()
        with gzip.GzipFile(fileobj=stream, mode="wb", compresslevel=6, mtime=0) as packed:
            for _ in range(LARGE // MIB):
                packed.write(unit * (MIB // len(unit)))
        (folder / name).write_bytes(stream.getvalue())

    return make


def filled(unit: bytes, name: str, size: int) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        with (folder / name).open("wb") as stream:
            for _ in range(size // MIB):
                stream.write(unit * (MIB // len(unit)))

    return make


def sparse(folder: Path) -> None:
    """A file of a terabyte, of which nothing is on the disk."""
    for name in ("a.log", "b.txt", "c.json"):
        with (folder / name).open("wb") as stream:
            stream.truncate(1 << 40)


def pipes(folder: Path) -> None:
    """Pipes that nothing is written to, next to a sound file."""
    for name in ("a.log", "rank-1.txt", "error.json"):
        os.mkfifo(folder / name)
    (folder / "rank-0.txt").write_bytes(seeds.py_spy(0).encode())
    (folder / "rank-0.log").write_bytes(b"ValueError: 3\n")


def devices(folder: Path) -> None:
    for name, target in (
        ("a.log", "/dev/zero"),
        ("b.txt", "/dev/random"),
        ("c.json", "/dev/full"),
        ("d.out", "/proc/self/mem"),
    ):
        (folder / name).symlink_to(target)


def circles(folder: Path) -> None:
    """Links to themselves, to each other and to the folder they are in, and folders in folders in folders."""
    (folder / "a.log").symlink_to("a.log")
    (folder / "b.txt").symlink_to("c.txt")
    (folder / "c.txt").symlink_to("b.txt")
    (folder / "again").symlink_to(".")
    (folder / "look-1").symlink_to("..")
    deep = folder.joinpath(*["look-2"] * 200)
    deep.mkdir(parents=True)
    (deep / "x.log").write_bytes(b"ValueError: 3\n")


def odd_names(folder: Path) -> None:
    """Names that are no text, move a cursor, are as long as can be, or hold numbers that are no ranks."""
    names = (
        b"rank-\xff.txt",
        b"a\n\x1b[2J.log",
        b"r" * 250 + b".log",
        b"rank-99999999999999999999.txt",
        "rank-\u0663.log".encode(),
    )
    for name in (*names, b"rank--1.txt", b" .txt", b"-rf.log", b"rank-999999.log", b"nccl_trace_rank_4294967296"):
        (folder / os.fsdecode(name)).write_bytes(seeds.py_spy(0).encode() + b"ValueError: 3\n")


def nothing(folder: Path) -> None:
    for name in ("rank-0.txt", "a.log", "error.json", "nccl_trace_rank_0", "run.yaml"):
        (folder / name).write_bytes(b"")


def closed(folder: Path) -> None:
    """Files and a folder that may not be read; root may."""
    (folder / "a.log").write_bytes(b"ValueError: 3\n")
    (folder / "a.log").chmod(0)
    (folder / "look-1").mkdir(mode=0)


def many(folder: Path) -> None:
    for number in range(8000):
        (folder / f"rank-{number}.log").write_bytes(b"ValueError: 3\n")


ALL = (SPY, WHY)
FLOODS = (
    Flood("bomb of zeros", bomb(b"\0", "rank-0.gz"), ALL),
    Flood("bomb of newlines", bomb(b"\n", "rank-0.txt"), ALL),
    Flood("bomb of stacks", bomb(seeds.py_spy(0).encode().ljust(512), "rank-0.txt"), ALL, 15.0),
    Flood("bomb of one line", bomb(b"Thread 1 (active): ", "rank-0.log"), ALL),
    Flood("bomb of labels", bomb(b"3: \n", "rank-0.log"), ALL),
    Flood("newlines", filled(b"\n", "rank-0.log", 128 * MIB), ALL),
    Flood("one line", filled(b"Error: ", "rank-0.log", 128 * MIB), ALL),
    Flood("JSON that does not end", filled(b'[{"a":', "rank-0.json", 32 * MIB), ALL),
    Flood("a terabyte of nothing", sparse, ALL),
    Flood("pipes", pipes, ALL),
    Flood("devices", devices, ALL),
    Flood("links in a circle", circles, ALL),
    Flood("odd names", odd_names, ALL),
    Flood("empty files", nothing, ALL),
    Flood("closed files", closed, ALL),
    Flood("8000 files", many, ALL),
    Flood("steps in one line", filled(b"iteration 3/ 10 | lm loss: 3.1 | ", "a.log", 16 * MIB), (STEPS,)),
    Flood("lines of steps", filled(b"step: 4  loss: 2.5\n", "a.log", 8 * MIB), (STEPS,)),
)

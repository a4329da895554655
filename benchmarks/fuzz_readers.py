"""Gives damaged files to every reader of what other programs, people and clusters hand over.

    python benchmarks/fuzz_readers.py [--seconds 300] [--seed 1] [--only WORD] [--keep FOLDER]

A case is a folder of small sound files of one kind (benchmarks/fuzzing/seeds.py), of which some are damaged: bytes are
flipped, cut, spliced, repeated, encoded otherwise; numbers become huge; values of documents get another type; lines
become endless, brackets deep (benchmarks/fuzzing/mutations.py). Then come floods and places that are no files: gzip
bombs, files of only newlines, FIFOs, devices, links in a circle, names that are no text. Each case must end with an
answer or one of the project's own errors, take less than 2 s of CPU (15 s for a bomb of 256 MiB of sound stacks) and
500 MB more than before, and never wait for a writer. An answer accuses no rank that no file holds, and can be printed.

Prints a table, a row for each reader, and each kind of failure once. Exit code 1 if there is one.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuzzing.floods import FLOODS
from fuzzing.mutations import changed, damaged
from fuzzing.readers import READERS, Reader, as_bytes, write
from fuzzing.seeds import Pickled

from bigsci_launch.cli.boundary import error_text
from bigsci_launch.errors import BslError
from bigsci_launch.printable import printable

CPU_S, WALL_S = 2.0, 120
MEMORY = 500_000_000
LONGEST_LINE = 5000
UNTOUCHED = 0.4
"""Share of the files of a case that stay sound: damage then meets readings that are right."""


class TooLong(BaseException):
    """A case that waits, or computes for ever. No reader may catch it as an error of its own."""


@dataclass
class Tally:
    """What a reader was given, and how it ended."""

    cases: int = 0
    refused: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    most_bytes: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    """By kind: how it looks, and the case that shows it."""


def damage(reader: Reader, draw: random.Random) -> Callable[[str, Any], bytes]:
    """Return how each file of a case is written: some as they are, the others damaged as bytes or as documents."""
    others = [as_bytes(content) for files in reader.seeds[:40] for content in list(files.values())[:4]]

    def written(_name: str, content: Any) -> bytes:
        if draw.random() < UNTOUCHED:
            return as_bytes(content)
        if not isinstance(content, bytes) and draw.random() < 0.7:
            with suppress(ValueError, RecursionError, OverflowError):
                if isinstance(content, Pickled):
                    return content.dumped(changed(content.document, draw))
                return as_bytes(changed(content, draw))
        return damaged(as_bytes(content), others, draw)

    return written


def run_case(reader: Reader, folder: Path, tally: Tally, name: str, limit_s: float = CPU_S) -> bool:
    """Read the folder, and note how that ends; return whether something was wrong."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak of the memory begins here
    before, began, cpu = memory("VmRSS"), time.monotonic(), time.process_time()
    kind, handler = "", signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, WALL_S)
    try:
        reader.read(folder)
    except reader.own_errors as error:
        tally.refused += 1
        kind = own_words(error)
    except TooLong:
        kind = f"no end after {WALL_S} s: {place(sys.exc_info()[2])}"
    except RecursionError as error:
        kind = f"RecursionError: {place(error.__traceback__)}"
    except Exception as error:
        kind = f"{type(error).__name__} ({str(error)[:80]}): {place(error.__traceback__)}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    used, taken = time.process_time() - cpu, memory("VmHWM") - before
    tally.cases += 1
    tally.seconds += time.monotonic() - began
    tally.slowest_s, tally.most_bytes = max(tally.slowest_s, used), max(tally.most_bytes, taken)
    kind = kind or (f"{used:.0f} s of CPU" if used > limit_s else f"{taken / 1e6:.0f} MB" if taken > MEMORY else "")
    if kind:
        tally.failures.setdefault(
            kind if "CPU" not in kind and " MB" not in kind else kind.split()[-1], f"{kind}  [{name}]"
        )
    return bool(kind)


def own_words(error: Exception) -> str:
    """Why an error of the project cannot be printed as one line of text; empty if it can."""
    words = error_text(error) if isinstance(error, BslError) else str(error)
    with suppress(UnicodeEncodeError):
        printable(words).encode()
        longest = max(map(len, words.splitlines()), default=0)
        return "" if words.strip() and longest < LONGEST_LINE else f"an error of {longest} characters"
    return f"an error that cannot be printed ({type(error).__name__})"


def place(trace: Any) -> str:
    """Where in the package it happened."""
    frames = [frame for frame in traceback.extract_tb(trace) if "bigsci_launch" in frame.filename]
    frames = frames or traceback.extract_tb(trace)[-1:]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno} {frames[-1].name}" if frames else "?"


def memory(name: str) -> int:
    """Bytes, as /proc says them."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def fuzz(reader: Reader, seconds: float, seed: int, keep: Path | None) -> Tally:
    """Give damaged files to a reader for so long."""
    tally, until, number = Tally(), time.monotonic() + seconds, 0
    while time.monotonic() < until:
        draw = random.Random(f"{seed} {reader.name} {number}")
        with tempfile.TemporaryDirectory(prefix="bsl-fuzz-") as place:
            folder = Path(place)
            write(folder, draw.choice(reader.seeds), damage(reader, draw))
            known = len(tally.failures)
            if run_case(reader, folder, tally, f"case {number}") and keep and len(tally.failures) > known:
                shutil.copytree(folder, keep / f"{reader.name[:12].strip().replace(' ', '-')}-{number}")
        number += 1
    return tally


def flood(only: str) -> Tally:
    """Give each flood, and each place that is no file, to the readers of folders and files."""
    tally = Tally()
    for each in FLOODS:
        for reader in READERS:
            if reader.name in each.readers and only in f"{each.name} {reader.name}":
                with tempfile.TemporaryDirectory(prefix="bsl-fuzz-") as place:
                    each.make(Path(place))
                    run_case(reader, Path(place), tally, f"{each.name}: {reader.name}", each.cpu_s)
    return tally


def alarm(*_: object) -> None:
    raise TooLong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0, help="for all readers together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", metavar="WORD", help="only readers with this in their names")
    parser.add_argument("--keep", type=Path, help="folder for the first case of each kind of failure")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    readers = [reader for reader in READERS if options.only in reader.name]
    print("| reader | cases | refused | seconds | slowest | most memory | failures |\n|---|---|---|---|---|---|---|")
    found = {}
    for reader in readers:
        found[reader.name] = fuzz(reader, options.seconds / len(readers), options.seed, options.keep)
        show(reader.name, found[reader.name])
    found["floods, and places that are no files"] = flood(options.only)
    show("floods, and places that are no files", found["floods, and places that are no files"])
    for name, tally in found.items():
        for words in tally.failures.values():
            print(f"{name}: {json.dumps(words)}")
    sys.exit(any(tally.failures for tally in found.values()))


def show(name: str, tally: Tally) -> None:
    print(
        f"| {name} | {tally.cases:,} | {tally.refused:,} | {tally.seconds:.0f} | {tally.slowest_s:.2f} s "
        f"| {tally.most_bytes / 1e6:.0f} MB | {len(tally.failures)} |",
        flush=True,
    )


if __name__ == "__main__":
    main()

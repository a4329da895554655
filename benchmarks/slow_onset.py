"""Measures the seconds from the onset of a slow rank to the message that names it, while `bsl watch` runs.

    python benchmarks/slow_onset.py --results onset.jsonl [--page docs/measurements/slow-onset.md]

The program of `slow_runs.py` runs as `bsl submit --local` starts it, with a watcher next to it. From step ONSET on, one
rank is disturbed; it notes when. A case that is in --results is not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from seconds_to_the_name import RANKS, START_S, Trial, load, notices, show, submitted, tail_of, wait_for
from slow_looks import hurry
from slow_runs import NICE, WORDS

ONSET, LAST = 50, 1000000
LIMIT_S, HEALTHY_S = 300.0, 120.0
CASES = (("loader", 0.5), ("backward", 0.2), ("none", 0.0))
Row = dict[str, Any]


def run(kind: str, share: float, rank: int) -> Row:
    """Return when which message came, in seconds since the onset."""
    with tempfile.TemporaryDirectory(prefix="slow-onset-", ignore_cleanup_errors=True) as name:
        home = Path(name)
        due = {"kind": kind, "share": share, "ranks": [rank], "first": ONSET, "last": LAST}
        (home / "schedule.json").write_text(json.dumps([due]))
        program = Path(__file__).parent / "slowing" / "reported.py"
        command = (sys.executable, str(program), "ddp", str(LAST), str(home / "schedule.json"), str(home / "onset"))
        row: Row = {"kind": kind, "share": share, "rank": rank, "onset": None, "said": []}
        with submitted(Trial("onset, rings", kind, command, RANKS, (rank,)), home) as folder:
            hurry_all(str(home))
            onset = wait_for(lambda: (home / "onset").exists() or None, START_S + LIMIT_S)
            if onset is None:
                return {**row, "log": tail_of(folder)}
            began = (home / "onset").stat().st_mtime
            limit = HEALTHY_S if kind == "none" else LIMIT_S

            def slow() -> list[tuple[float, str]] | None:
                return [each for each in notices(folder) if "slow rank" in each[1]] or None

            wait_for(slow, limit - (time.time() - began))
            said = [(round(at - began, 1), subject) for at, subject in notices(folder)]
            return {**row, "onset": began, "said": said, "load": load()}


def hurry_all(home: str) -> None:
    """Give the sessions of the run's processes, its watcher's too, the priority of this one."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if home in (process / "cmdline").read_text():
                (process / "autogroup").write_text(os.environ.get("RANKS_NICE", "0"))


HEAD = """\
<!-- Made by `python benchmarks/slow_onset.py --results onset.jsonl --page docs/measurements/slow-onset.md`. -->

# Seconds from the onset of a slow rank to its name

Four ranks of DDP run as `bsl submit --local` starts them, with a watcher next to them, on a machine with two cores that
other programs use. From step {onset} on, one rank is disturbed by a share of a step, as in [who makes a job
slow](slow.md). It notes when; the time of the message is that of the program in `monitor.notify.command`. The goal is
60 s. A watcher names a rank if two answers in a row do, 20 s apart at least. It asks each half minute, and at once when
steps are slower beyond their noise. One run of each.

| disturbed | load | seconds to the name | the message |
|---|---|---|---|
"""


def page_of(rows: Sequence[Row]) -> str:
    return HEAD.format(onset=ONSET) + "".join(map(_line, rows))


def _line(row: Row) -> str:
    named = [(at, subject) for at, subject in row["said"] if "slow rank" in subject]
    at, subject = named[0] if named else (None, "none")
    seconds = ("-" if row["kind"] == "none" else show_s(at)) if row["onset"] else "it did not start"
    share = f", {row['share']:.0%}" if row["share"] else ""
    who = f" (rank {row['rank']})" if row["share"] else ""
    return f"| {WORDS[row['kind']]}{share}{who} | {row.get('load', 0):.0f} | {seconds} | {subject} |\n"


def show_s(seconds: float | None) -> str:
    return show(seconds) if seconds is not None else f"more than {LIMIT_S:.0f} s"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--results", type=Path, required=True)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--most", type=int, default=len(CASES), help="cases")
    options.add_argument("--page", type=Path)
    given = options.parse_args()
    if os.geteuid() == 0:
        hurry(NICE)
        os.environ["RANKS_NICE"] = str(NICE)
    rows = [json.loads(line) for line in given.results.read_text().splitlines()] if given.results.exists() else []
    done, draw = {(row["kind"], row["share"]) for row in rows}, random.Random(given.seed)
    for kind, share in CASES[: given.most]:
        rank = draw.randrange(RANKS)
        if (kind, share) not in done:
            rows.append(run(kind, share, rank))
            print(rows[-1], flush=True)
            with given.results.open("a") as results:
                results.write(json.dumps(rows[-1]) + "\n")
    if given.page:
        given.page.write_text(page_of(rows))


if __name__ == "__main__":
    main()

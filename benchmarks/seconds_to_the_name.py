"""Measures the seconds from the onset of a hang to the notification that names the rank, while `bsl watch` runs.

    python benchmarks/seconds_to_the_name.py --results seconds.jsonl [--page docs/measurements/seconds-to-name.md]

Each program runs as `bsl submit --local` starts it, with a watcher next to it (`monitor.watch: observe`) and a program
as `monitor.notify.command` that writes down when each message came. Programs of the hang lab strike at a random step,
those of `foreign/` when they always do. The onset is what the program itself notes. A case that is already in
--results is not repeated, so that a series can be run in parts; --jobs cases run at a time, since a hung one rests.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreign.case import ForeignCase
from foreign.field import PROGRAMS
from foreign.table import all_cases
from ranks import free_port

from bigsci_launch.hang_lab.catalogue import Stand
from bigsci_launch.hang_lab.programs import lab_program
from bigsci_launch.hang_lab.zoo import REPRODUCTIONS

Row = dict[str, Any]
LIMIT_S, START_S, HEALTHY_S = 120.0, 150.0, 90.0
"""How long a notification is waited for, a start, and how long a healthy program is watched."""
POLL_S = 0.2
RANKS = 4
MOST_STEPS = 2000
MODEL = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "sequence_length": 8, "vocab_size": 64}
NOTE = 'printf "%s\\t%s\\n" "$(date +%s.%N)" "$BSL_SUBJECT" >> "$1"'
KINDS = ("hang lab, rings", "foreign, rings", "foreign, no rings", "healthy, rings", "healthy, no rings")
GOALS = {"hang lab, rings": 15.0, "foreign, rings": 15.0, "foreign, no rings": 45.0}
MARK = "<!-- {}seconds -->"


@dataclass(frozen=True, slots=True)
class Trial:
    """One program. One of `guilty` is right; empty where no rank has to be named."""

    kind: str
    name: str
    command: tuple[str, ...]
    num_tasks: int
    guilty: tuple[int, ...]
    case: ForeignCase | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="names of cases, or patterns, with commas (default: all)")
    parser.add_argument("--kind", choices=KINDS, action="append", help="default: all")
    parser.add_argument("--most", type=int, default=1000, help="so many cases of a kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="cases that run at a time")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--page", type=Path, help="write the tables of the results into this page, between its marks")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that programs end with this process
    known = [json.loads(line) for line in options.results.read_text().splitlines()] if options.results.exists() else []
    done = {(row["kind"], row["name"], row["seed"]) for row in known}
    todo = [each for each in chosen(options) if (each.kind, each.name, options.seed) not in done]
    with options.results.open("a") as results, ThreadPoolExecutor(options.jobs) as pool:
        try:
            for future in as_completed([pool.submit(run_trial, trial, options.seed) for trial in todo]):
                if error := future.exception():
                    print(f"not started: {error}", file=sys.stderr, flush=True)
                    continue
                row = future.result()
                known.append(row)
                results.write(json.dumps(row) + "\n")
                results.flush()
                print(line_of(row), flush=True)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)  # those that run end their programs first
    text = tables(known)
    print(text)
    if options.page:
        put(options.page, text)


def chosen(options: argparse.Namespace) -> list[Trial]:
    """Return the trials that are wanted, the kinds in turn, and each kind in an order drawn from the seed."""
    wanted = [
        trial
        for trial in (*lab_trials(options.seed), *foreign_trials())
        if (options.kind is None or trial.kind in options.kind)
        and any(fnmatch.fnmatch(trial.name, pattern) for pattern in options.only.split(","))
    ]
    random.Random(options.seed).shuffle(wanted)
    by_kind = [[trial for trial in wanted if trial.kind == kind][: options.most] for kind in KINDS]
    return [trial for turn in range(options.most) for kind in by_kind for trial in kind[turn : turn + 1]]


def lab_trials(seed: int) -> Iterator[Trial]:
    """Yield the reproductions that are hangs, stand still, and need nothing set up around their ranks."""
    for one in REPRODUCTIONS:
        if not one.is_hang or one.stage or one.needs or one.stand is not Stand.STILL or one.min_ranks > RANKS:
            continue
        dice = random.Random(f"{seed} {one.name}")
        culprit = 0 if one.culprits == "rank 0" else dice.randrange(1, RANKS)
        step = round(math.exp(dice.uniform(math.log(2), math.log(MOST_STEPS))))
        topology = one.topology(RANKS)
        words = (one.recipe, "--topology", str(topology), "--culprit", str(culprit), "--step", str(step))
        guilty = tuple(sorted(one.suspects(culprit, topology)))
        command = (sys.executable, str(lab_program(one.program)), *words)
        yield Trial("hang lab, rings", one.name, command, RANKS, guilty if one.must_accuse else ())


def foreign_trials() -> Iterator[Trial]:
    """Yield the foreign programs that one task can start: hangs, and those that are well or slow."""
    for case in all_cases():
        if case.needs != ("torch",) or case.moment not in ("steady",) or case.environment or case.interpreter:
            continue
        if case.state == "hang" or case.state in ("progressing", "slow"):
            words = {"python": sys.executable, "program": PROGRAMS / case.program, "programs": PROGRAMS,
                     "culprit": case.culprit, "world_size": case.world_size}  # fmt: skip
            command = tuple(word.format(port="{port}", folder="{folder}", **words) for word in case.command)
            kinds = ("foreign", case.culprits) if case.state == "hang" else ("healthy", ())
            for rings in ("rings", "no rings"):
                yield Trial(f"{kinds[0]}, {rings}", case.name, command, 1, tuple(kinds[1]), case)


def run_trial(trial: Trial, seed: int) -> Row:
    """Run a program until its hang was notified, or long enough; return what came when."""
    row: Row = {"kind": trial.kind, "name": trial.name, "seed": seed, "guilty": list(trial.guilty)}
    with (
        tempfile.TemporaryDirectory(prefix="seconds-", ignore_cleanup_errors=True) as name,
        submitted(trial, Path(name)) as folder,
    ):
        onset = wait_for(lambda: onset_of(trial, folder), START_S)
        if onset is None:
            return {**row, "load": load(), "onset": None, "said": [], "seconds": None, "log": tail_of(folder)}
        if trial.kind.startswith("healthy"):
            wait_for(lambda: None, HEALTHY_S)
        else:
            wait_for(lambda: is_enough(trial, notices(folder)), LIMIT_S - (time.time() - onset))
        said = [(round(at - onset, 1), subject) for at, subject in notices(folder)]
        return {**row, "load": load(), "onset": onset, "said": said, **scored(trial, said)}


@contextmanager
def submitted(trial: Trial, folder: Path) -> Iterator[Path]:
    """Have a program run in a folder; at the end it is cancelled."""
    port = str(free_port())
    command = [word.replace("{port}", port).replace("{folder}", str(folder)) for word in trial.command]
    values = {"FOREIGN_LOG": str(folder / "diary.txt"), "OMP_NUM_THREADS": "1"}
    config = {
        "run": {"name": "hang", "command": command},
        "slurm": {"site": "local"},
        "parallelism": {"data_parallel_size": trial.num_tasks},
        "model": MODEL,
        "training": {"steps": 10, "micro_batch_size": 1, "global_batch_size": trial.num_tasks},
        "data": {"prefix": "none"},
        "env": {name: {"value": value, "reason": "measurement"} for name, value in values.items()},
        "monitor": {
            "watch": "observe",
            "ring": "none" if trial.kind.endswith("no rings") else "auto",
            "notify": {"command": ["sh", "-c", NOTE, "sh", str(folder / "told")]},
        },
    }
    (folder / "run.yaml").write_text(json.dumps(config))
    done = bsl(folder, "submit", "run.yaml", "--local", "--detach")
    if done.returncode:
        raise RuntimeError(f"{trial.name}: {done.stderr}")
    try:
        yield folder
    finally:
        bsl(folder, "cancel", "hang")


def bsl(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "bigsci_launch", *words]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=600, check=False)


def onset_of(trial: Trial, folder: Path) -> float | None:
    """Return when the program struck; None if it has not. What is well begins when it has reached its state."""
    if trial.case is None:
        struck = [path.stat().st_mtime for path in (folder / "runs" / "hang" / "lab").glob("struck-*")]
        return min(struck, default=None)
    diary = folder / "diary.txt"
    lines = [line.split(" ", 1) for line in diary.read_text().splitlines()] if diary.exists() else []
    times = sorted(float(at) for at, words in lines if re.match(trial.case.sign, words))
    return times[trial.case.sign_count - 1] if len(times) >= trial.case.sign_count else None


def wait_for(found: Any, seconds: float) -> Any:
    until = time.monotonic() + seconds
    while (seen := found()) is None and time.monotonic() < until:
        time.sleep(POLL_S)
    return seen


def notices(folder: Path) -> list[tuple[float, str]]:
    told = folder / "told"
    lines = told.read_text().splitlines() if told.exists() else []
    return [(float(at), subject) for at, _, subject in (line.partition("\t") for line in lines)]


def is_enough(trial: Trial, said: Sequence[tuple[float, str]]) -> bool | None:
    return True if any(is_right(trial, subject) for _, subject in said) else None


def first_named(subject: str) -> int | None:
    """Return the first rank that a subject names."""
    found = re.search(r"\branks? (\d+)", subject)
    return int(found[1]) if found else None


def is_right(trial: Trial, subject: str) -> bool:
    """Whether a message says the right thing: a guilty rank first, or anything where nobody has to be named."""
    return first_named(subject) in trial.guilty if trial.guilty else True


def scored(trial: Trial, said: Sequence[tuple[float, str]]) -> Row:
    right = next((seconds for seconds, subject in said if is_right(trial, subject)), None)
    wrong = [subject for _, subject in said if trial.guilty and not is_right(trial, subject)]
    return {"seconds": right, "wrong": wrong}


def load() -> float:
    return round(os.getloadavg()[0], 1)


def tail_of(folder: Path) -> str:
    logs = sorted((folder / "runs" / "hang").glob("attempts/*/logs/*.log"))
    return "".join(path.read_text(errors="replace")[-800:] for path in logs[:1])


def tables(rows: Iterable[Row]) -> str:
    """Return the tables of the page: the distribution by kind, then every case that struck."""
    rows = [row for row in rows if row["onset"] is not None]
    head = ["kind", "cases", "notified", "p50", "p90", "right rank first", "another rank first", "p50", "p90", "goal"]
    lines = [head, ["---"] * len(head)]
    for kind in KINDS[:3]:
        found = [row for row in rows if row["kind"] == kind]
        if found:
            lines.append([kind, *distribution(found), f"{GOALS[kind]:.0f} s"])
    healthy = [row for row in rows if row["kind"].startswith("healthy")]
    alarms = sum(len(row["said"]) for row in healthy)
    loads = [row["load"] for row in rows]
    middle = f"{min(loads):.0f} to {max(loads):.0f}, median {statistics.median(loads):.0f}" if loads else "-"
    after = (
        f"{len(healthy)} programs that are well or slow, {HEALTHY_S:.0f} s each: {alarms} messages. "
        f"Load of this machine ({os.cpu_count()} cores): {middle}."
    )
    cases = [["kind", "case", "load", "seconds", "the message"], ["---"] * 5]
    cases += [
        [
            row["kind"],
            row["name"],
            f"{row['load']:.0f}",
            show(row["seconds"]) if not row["kind"].startswith("healthy") else "-",
            message_of(row),
        ]
        for row in sorted(rows, key=lambda row: (KINDS.index(row["kind"]), row["name"], row["seed"]))
    ]
    return "\n\n".join(("\n".join(map(line, lines)), after, "\n".join(map(line, cases))))


def distribution(rows: Sequence[Row]) -> list[str]:
    """Return the cells of a kind. A case without a message, or without the right one, counts as longer than all."""
    named = [row for row in rows if row["guilty"]]
    right = sum(row["seconds"] is not None for row in named)
    wrong = sum(bool(row["wrong"]) for row in named)
    notified = [row["said"][0][0] if row["said"] else None for row in rows]
    told = str(len(rows) - notified.count(None))
    to_the_name = shares([row["seconds"] for row in rows])
    return [str(len(rows)), told, *shares(notified), f"{right} of {len(named)}", str(wrong), *to_the_name]


def shares(seconds: Iterable[float | None]) -> list[str]:
    """Return the median and what nine of ten do not exceed."""
    found = sorted(math.inf if each is None else each for each in seconds)
    return [show(found[math.ceil(share * len(found)) - 1]) for share in (0.5, 0.9)]


def show(seconds: float | None) -> str:
    return f"more than {LIMIT_S:.0f} s" if seconds is None or seconds == math.inf else f"{seconds:.1f} s"


def message_of(row: Row) -> str:
    if not row["said"]:
        return "none"
    right = next((subject for at, subject in row["said"] if at == row["seconds"]), row["said"][0][1])
    return str(right)


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def line_of(row: Row) -> str:
    return f"{row['kind']}: {row['name']}: {row['seconds']} of {row['guilty']} at load {row['load']}: {row['said']}"


def put(page: Path, text: str) -> None:
    begin, end = MARK.format(""), MARK.format("/")
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Looks at healthy jobs at random times, as often as a watch of 24 hours would, and counts the alarms.

    python benchmarks/healthy_looks.py --looks 2000 --jobs 2 --results looks.jsonl --alarms looks-alarms

The jobs are healthy programs of the table of foreign programs, of different frameworks and launchers, and one in which
rank 0 saves every 20 s. A job is started, and several threads look at it, each after random times (exponential, --mean
seconds on average) from the moment of its start; after --round looks it is ended and another one is started. A look
does what `bsl spy --local --pid` does, in this process. What needs packages that are in no folder given by --site (may
be repeated) is left out, and reported.

An alarm is a look that says "hang" or "crashed", or that accuses a rank. Its evidence is kept below --alarms. Looks at
a program that failed by itself are not counted as looks at a healthy job, and reported. Exits with 1 after an alarm.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import json
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreign.case import ForeignCase
from foreign.cases_ddp import torchrun
from foreign.field import Running, Setup, started
from foreign.scoring import FAILURES
from foreign.table import all_cases
from foreign_hangs import missing_modules

from bigsci_launch.errors import BslError
from bigsci_launch.spy.evidence.bundle import Bundle, write_bundle
from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.look.collect import collect
from bigsci_launch.spy.look.target import target_of_process
from bigsci_launch.spy.show.document import to_document
from bigsci_launch.spy.show.report import to_lines, to_text

Row = dict[str, Any]
SAVES = torchrun("saves-often", "keeps_model.py", state="progressing", sign="step 5 ", sign_count=4)
USUAL = (
    "ddp-exchanges", "fsdp2-steps", "accelerate-steps", "pipeline-steps", "spawn-steps", "mpi-steps", "jax-steps",
    "loader-steps", SAVES.name,
)  # fmt: skip
MAX_FAILURES = 3
"""A program that fails so often before a round is complete is not healthy."""


@dataclass(frozen=True, slots=True)
class LookPlan:
    """One round: a job, how often to look at it, and the seed of the times."""

    case: ForeignCase
    setup: Setup
    looks: int
    seed: str


@dataclass(frozen=True, slots=True)
class LookSettings:
    """What all rounds share. `until_s` is a time of the monotonic clock, after which no look begins."""

    lookers: int
    mean_s: float
    until_s: float
    scratch: Path
    alarms: Path


class Quota:
    """How many looks of a round are left, for several threads."""

    def __init__(self, looks: int) -> None:
        self._left, self._lock = looks, threading.Lock()

    def take(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left >= 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Count the false alarms of `bsl spy` on healthy jobs.")
    parser.add_argument("--only", default=",".join(USUAL), help="names of healthy cases, or patterns, with commas")
    parser.add_argument("--looks", type=int, default=2000, help="looks in all")
    parser.add_argument("--round", type=int, default=50, help="looks at one job before it is started again")
    parser.add_argument("--jobs", type=int, default=2, help="jobs that run at a time")
    parser.add_argument("--lookers", type=int, default=3, help="threads that look at one job")
    parser.add_argument("--mean", type=float, default=1.0, help="seconds between the looks of a thread, on average")
    parser.add_argument("--limit", type=float, default=1e6, help="begin no look after so many seconds")
    parser.add_argument("--results", type=Path, default=Path("looks.jsonl"))
    parser.add_argument("--alarms", type=Path, default=Path("looks-alarms"), help="folder for the evidence of alarms")
    parser.add_argument("--site", type=Path, action="append", default=[], help="folder of packages for the programs")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the programs")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that programs end with this process
    kinds = [(case, setup) for case in healthy_cases(options.only) if (setup := setup_of(case, options)) is not None]
    if not kinds:
        sys.exit("nothing to look at")
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="looks-") as scratch:
        settings = LookSettings(
            options.lookers, options.mean, began_s + options.limit, Path(scratch), options.alarms.resolve()
        )
        rows = look_at_all(plans(kinds, options), settings, options)
    print(summary(rows, time.monotonic() - began_s))
    sys.exit(1 if any(is_alarm(row) for row in rows) else 0)


def healthy_cases(patterns: str) -> list[ForeignCase]:
    """The cases that are healthy from their start on, by name."""
    healthy = [case for case in (*all_cases(), SAVES) if case.state == "progressing" and case.moment == "steady"]
    return [case for case in healthy if any(fnmatch.fnmatch(case.name, pattern) for pattern in patterns.split(","))]


def setup_of(case: ForeignCase, options: argparse.Namespace) -> Setup | None:
    """Return the first setup in which a case finds all that it needs; None, and say so, if there is none."""
    commands = [need.removeprefix("command:") for need in case.needs if need.startswith("command:")]
    modules = tuple(need for need in case.needs if not need.startswith("command:"))
    if all(map(shutil.which, commands)) and not case.interpreter:
        for site in (None, *(path.resolve() for path in options.site)):
            if not missing_modules(options.python, modules, site):
                return Setup({"": options.python}, site)
    print(f"{case.name}: left out, needs {', '.join((*case.needs, *filter(None, [case.interpreter])))}", flush=True)
    return None


def plans(kinds: Sequence[tuple[ForeignCase, Setup]], options: argparse.Namespace) -> Iterator[LookPlan]:
    """Yield the rounds: every kind in turn, until each has had its share of the looks."""
    shares = [options.looks // len(kinds) + (index < options.looks % len(kinds)) for index in range(len(kinds))]
    for begun in range(0, max(shares), options.round):
        for (case, setup), share in zip(kinds, shares, strict=True):
            if share > begun:
                looks = min(options.round, share - begun)
                yield LookPlan(case, setup, looks, f"{options.seed}-{case.name}-{begun}")


def look_at_all(todo: Iterator[LookPlan], settings: LookSettings, options: argparse.Namespace) -> list[Row]:
    """Run all rounds, and write down every look."""
    rows: list[Row] = []
    with options.results.open("w") as results, ThreadPoolExecutor(options.jobs) as pool:
        futures = [pool.submit(run_round, plan, settings) for plan in todo]
        try:
            for future in as_completed(futures):
                found = future.result()
                rows += found
                results.write("".join(json.dumps(row) + "\n" for row in found))
                results.flush()
                if found:
                    alarms = sum(map(is_alarm, found))
                    print(f"{found[0]['kind']}: {len(found)} looks, {alarms} alarms; {len(rows)} so far", flush=True)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return rows


def run_round(plan: LookPlan, settings: LookSettings) -> list[Row]:
    """Start a job, as often as it ends by itself, until it has been looked at as often as planned."""
    quota, rows, failures = Quota(plan.looks), [], 0
    while len(rows) < plan.looks and time.monotonic() < settings.until_s and failures < MAX_FAILURES:
        folder = settings.scratch / f"{plan.seed}-{len(rows)}-{failures}"
        with started(plan.case, plan.setup, folder) as running:
            found = look_from_threads(plan, running, quota, settings, len(rows))
            diary, code = running.diary(), running.launcher.poll()
        is_failed = code not in (None, 0)
        failures += is_failed or not found
        for row in found:
            row["is_failed"] = is_failed
            row["notes_after"] = sum(entry.at_s > row["ended_s"] for entry in diary)
        if is_failed:
            print(f"{plan.case.name}: the program failed ({code}): {running.output()[-300:]}", flush=True)
        rows += found
        shutil.rmtree(folder, ignore_errors=True)
    return rows


def look_from_threads(
    plan: LookPlan, running: Running, quota: Quota, settings: LookSettings, already: int
) -> list[Row]:
    """Return the looks at one job, from several threads, in the order of their beginnings."""
    seeds = [f"{plan.seed}-{already}-{number}" for number in range(settings.lookers)]
    with ThreadPoolExecutor(settings.lookers) as lookers:
        look = functools.partial(look_now_and_then, running, quota, settings)
        rows = [row for found in lookers.map(look, seeds) for row in found]
    return sorted(rows, key=lambda row: row["began_s"])


def look_now_and_then(running: Running, quota: Quota, settings: LookSettings, seed: str) -> list[Row]:
    """Look after random times, until the quota is used up, the job has ended, or the time is over."""
    times, rows = random.Random(seed), []
    while True:
        time.sleep(times.expovariate(1 / settings.mean_s))
        is_over = running.launcher.poll() is not None or time.monotonic() >= settings.until_s
        if is_over or not quota.take():
            return rows
        rows.append(look_once(running, settings))


def look_once(running: Running, settings: LookSettings) -> Row:
    """Look at a job once; keep the evidence of an alarm."""
    began_s, bundle = time.time(), None
    try:
        bundle = collect(target_of_process(running.launcher.pid))
        said = answer_of(bundle)
    except BslError as error:
        said = {"state": "unanswered", "class": None, "claim": str(error), "suspects": [], "confidence": None}
    ended_s = time.time()
    row = {"kind": running.case.name, "began_s": began_s, "ended_s": ended_s, "seconds": round(ended_s - began_s, 2),
           "age_s": round(began_s - running.began_s, 2), "phase": phase_of(running, began_s), **said}  # fmt: skip
    if bundle is not None and is_alarm(row):
        keep(bundle, row, settings)
    return row


def answer_of(bundle: Bundle) -> Row:
    conclusion = judge(bundle.evidence())
    return {"state": conclusion.state.value, "class": str(conclusion.hang_class) if conclusion.hang_class else None,
            "claim": conclusion.claim, "suspects": [suspect.rank for suspect in conclusion.suspects],
            "confidence": conclusion.confidence}  # fmt: skip


def phase_of(running: Running, began_s: float) -> str:
    """Whether a look began before all ranks made steps ("starting"), during them, or saw the launcher end ("over")."""
    if running.launcher.poll() is not None:
        return "over"
    reached_s = running.reached_s()
    return "starting" if reached_s is None or reached_s > began_s else "steady"


def is_alarm(row: Row) -> bool:
    return not row.get("is_failed") and (row["state"] in FAILURES or bool(row["suspects"]))


def keep(bundle: Bundle, row: Row, settings: LookSettings) -> None:
    """Store the evidence of an alarm as `bsl spy --output` would, with what is known of the look."""
    folder = settings.alarms / f"{row['kind']}-{row['began_s']:.3f}"
    evidence = bundle.evidence()
    conclusion = judge(evidence)
    write_bundle(folder, bundle, to_document(evidence, conclusion), to_text(to_lines(evidence, conclusion)))
    (folder / "look.json").write_text(json.dumps(row) + "\n")


def summary(rows: Sequence[Row], seconds: float) -> str:
    """Return the looks by kind and state, then every alarm."""
    counted = [row for row in rows if not row["is_failed"]]
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        mine = [row for row in counted if row["kind"] == kind]
        states = ", ".join(f"{count} {state}" for state, count in Counter(row["state"] for row in mine).most_common())
        lines.append(f"  {kind:24s} {len(mine):5d} looks: {states}; {sum(map(is_alarm, mine))} alarms")
    for title, key in (("states", "state"), ("phases", "phase")):
        lines.append(f"{title}: {dict(Counter(row[key] for row in counted).most_common())}")
    unsure = sum(row["notes_after"] == 0 for row in counted)
    lines.append(f"{unsure} looks after which the job noted no step before it was ended or ended by itself")
    lines.append(f"{len(rows) - len(counted)} looks at programs that failed by themselves, not counted")
    alarms = [row for row in counted if is_alarm(row)]
    for row in alarms:
        lines.append(f"ALARM {row['kind']} ({row['phase']}, {row['age_s']:g} s old, {row['notes_after']} notes after): "
                     f"{row['state']} {row['class']} suspects {row['suspects']}: {row['claim']}")  # fmt: skip
    lines.append(f"{len(alarms)} alarms in {len(counted)} looks at {len({row['kind'] for row in counted})} kinds of "
                 f"healthy jobs, in {seconds:.0f} s")  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""Asks `bsl spy` about programs that it was not built on, and scores what it says.

    python benchmarks/foreign_hangs.py --results foreign.jsonl --bundles foreign-bundles --jobs 2
    python benchmarks/foreign_hangs.py --rejudge foreign-bundles --results again.jsonl

Each case of the table (`foreign/table.py`) is started in a fresh folder, and `bsl spy --local`
is asked about it twice, at two random moments, as its user would ask: nothing in the program was prepared for it. What
is true at that moment is known from how the program was written, and from the lines that it writes to its diary. A case
that is already in --results is not repeated. --held-out takes another set, which the rules of the verdict have not seen
(`foreign/cases_held_out.py`, `foreign/cases_unseen.py`). --rejudge judges the kept evidence with the current engine, in
seconds.

Exits with 1 if a question ended in a wrong accusation, a false alarm, a miss, or a healthy job called slow.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import functools
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import IO, Any

from foreign import cases_held_out as held_out
from foreign import cases_unseen as unseen
from foreign.case import ForeignCase, Truth, truth_of
from foreign.field import POLL_S, Running, Setup, started
from foreign.scoring import HARMFUL, figures, line_of, outcome, read_answer, summary
from foreign.table import all_cases

from bigsci_launch.spy.evidence.bundle import read_bundle
from bigsci_launch.spy.judge.facts import elapsed_s
from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.show.document import to_document

Row = dict[str, Any]
BSL = Path(sys.executable).parent / "bsl"
ASK_LIMIT_S = 400.0
GAP_S = {"ending": (0.0, 2.0)}
USUAL_GAP_S = (1.0, 8.0)


class NotReached(Exception):
    """A program did not reach its state."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Score `bsl spy` on programs that it was not built on.")
    parser.add_argument("--only", default="*", help="names of cases, or patterns, with commas (default: all)")
    parser.add_argument("--held-out", action="store_true", help="run the held-out sets instead of the table")
    parser.add_argument("--list", action="store_true", help="list the cases and exit")
    parser.add_argument("--jobs", type=int, default=1, help="cases that run at a time")
    parser.add_argument("--results", type=Path, default=Path("foreign.jsonl"))
    parser.add_argument("--bundles", type=Path, help="folder to keep the evidence in")
    parser.add_argument("--rejudge", type=Path, metavar="BUNDLES", help="judge kept evidence again, run nothing")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the programs")
    parser.add_argument("--interpreter", action="append", default=[], metavar="NAME=PATH", help="one more, by name")
    parser.add_argument("--site", type=Path, help="folder of extra packages for the programs")
    parser.add_argument("--settle", type=float, help="let the second question look for so many seconds")
    parser.add_argument("--native", action="store_true", help="let the second question read native frames too")
    parser.add_argument("--recorder", action="store_true", help="let the second question get torch's recorder too")
    parser.add_argument("--without-recorder", action="store_true", help="with --rejudge: as if none had been read")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that programs end with this process
    patterns = options.only.split(",")
    table = (*held_out.CASES, *unseen.CASES) if options.held_out else all_cases()
    cases = [case for case in table if any(fnmatch.fnmatch(case.name, pattern) for pattern in patterns)]
    if options.list:
        for case in cases:
            print(f"{case.name:40s} {case.framework:12s} {case.launcher:12s} {case.state:12s} {case.moment}")
        return
    if options.rejudge:
        rows = [row for case in cases for row in judge_again(case, options.rejudge, options.without_recorder)]
        options.results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        rows = run_missing(cases, options)
    print(summary(rows))
    sys.exit(1 if any(row["outcome"] in HARMFUL for row in rows) else 0)


def run_missing(cases: list[ForeignCase], options: argparse.Namespace) -> list[Row]:
    """Run the cases that are not in the results yet; return all rows of these cases."""
    names = {case.name for case in cases}
    rows = [json.loads(line) for line in options.results.read_text().splitlines()] if options.results.exists() else []
    rows = [row for row in rows if row["case"] in names]
    known = {row["case"] for row in rows}
    interpreters = {"": options.python, **dict(pair.split("=", 1) for pair in options.interpreter)}
    setup = Setup(interpreters, options.site.resolve() if options.site else None)
    todo = [case for case in cases if case.name not in known and can_run(case, setup)]
    with options.results.open("a") as results, ThreadPoolExecutor(options.jobs) as pool:
        futures = {pool.submit(run_case, case, setup, options): case for case in todo}
        try:
            for future in as_completed(futures):
                rows += keep(futures[future], future, results)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)  # those that run end their programs first
    return rows


def keep(case: ForeignCase, future: Future[list[Row]], results: IO[str]) -> list[Row]:
    """Write down the questions about one case; none if the program did not reach its state."""
    try:
        rows = future.result()
    except NotReached as error:
        print(f"NOT REACHED: {case.name}: {error}", flush=True)
        return []
    results.write("".join(json.dumps(row) + "\n" for row in rows))
    results.flush()
    for row in rows:
        print(line_of(row), flush=True)
    return rows


def can_run(case: ForeignCase, setup: Setup) -> bool:
    """Whether everything that a case needs is there; says what is not."""
    missing = [need for need in case.needs if need.startswith("command:") and not shutil.which(need.split(":")[1])]
    modules = [need for need in case.needs if not need.startswith("command:")]
    if case.interpreter not in setup.interpreters:
        missing.append(f"--interpreter {case.interpreter}=PATH")
    elif modules:
        missing += missing_modules(setup.interpreters[case.interpreter], tuple(modules), setup.site)
    if missing:
        print(f"{case.name}: skipped, needs {', '.join(missing)}", flush=True)
    return not missing


@functools.cache
def missing_modules(python: str, modules: tuple[str, ...], site: Path | None) -> tuple[str, ...]:
    """Return those of `modules` that an interpreter does not find."""
    test = f"import importlib.util as u, sys; sys.exit(' '.join(n for n in {modules!r} if not u.find_spec(n)))"
    environment = {"PYTHONPATH": str(site)} if site else {}
    done = subprocess.run([python, "-c", test], env=environment, capture_output=True, check=False)
    return tuple(done.stderr.decode().split()) if done.returncode else ()


def run_case(case: ForeignCase, setup: Setup, options: argparse.Namespace) -> list[Row]:
    """Start one program, ask twice, end it; return both questions with their scores.

    Raises:
        NotReached: the program did not reach its state.
    """
    dice = random.Random(f"{options.seed} {case.name}")
    with (
        tempfile.TemporaryDirectory(prefix="foreign-", ignore_cleanup_errors=True) as scratch,
        started(case, setup, Path(scratch) / case.name) as running,
    ):
        rows = []
        for number, at_s in enumerate(moments(running, dice), 1):
            time.sleep(max(0.0, at_s - time.time()))
            rows.append(ask(running, number, options, Path(scratch)))
        return rows


def moments(running: Running, dice: random.Random) -> Any:
    """Yield the times of both questions, in seconds of the clock; the second is chosen after the first is answered.

    Raises:
        NotReached: the program did not reach its state.
    """
    case = running.case
    if case.moment in ("starting", "random"):
        first, second = sorted(dice.uniform(*case.between_s) for _ in range(2))
        yield running.began_s + first
        yield running.began_s + second
        return
    yield wait_for_sign(running) + case.settle_s + dice.uniform(*case.between_s)
    yield time.time() + dice.uniform(*GAP_S.get(case.moment, USUAL_GAP_S))


def wait_for_sign(running: Running) -> float:
    until = running.began_s + running.case.limit_s
    while time.time() < until:
        reached_s = running.reached_s()
        if reached_s is not None:
            return reached_s
        if running.launcher.poll() is not None and not running.told.exists():
            raise NotReached(f"the launcher ended with {running.launcher.returncode}: {running.output()[-1500:]}")
        time.sleep(POLL_S)
    raise NotReached(f"not within {running.case.limit_s:g} s: {running.output()[-1500:]}")


def ask(running: Running, number: int, options: argparse.Namespace, scratch: Path) -> Row:
    """Ask `bsl spy` once and score its answer."""
    case, began_s = running.case, time.time()
    folder = (options.bundles.resolve() if options.bundles else scratch / "bundles") / case.name / f"ask-{number}"
    command = [str(BSL), "spy", *running.whom(), "--json", "--output", str(folder)]
    command += ["--settle", f"{options.settle:g}"] if options.settle is not None and number == 2 else []
    command += ["--native"] if options.native and number == 2 else []
    command += ["--flight-recorder=fork"] if options.recorder and number == 2 else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_LIMIT_S, check=False)
        said, error = done.stdout, done.stderr[-500:]
    except subprocess.TimeoutExpired:
        said, error = "", f"no answer in {ASK_LIMIT_S:g} s"
    phase = phase_of(running, began_s, time.time())
    pids = running.pids()
    facts = {"case": case.name, "ask": number, "phase": phase, "pids": pids, "asked_s": began_s - running.began_s}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "truth.json").write_text(json.dumps(facts) + "\n")
    (folder / "diary.txt").write_text("".join(f"{each.at_s:.3f} {each.words}\n" for each in running.diary()[-400:]))
    row = scored(case, number, phase, pids, json.loads(said) if said.strip() else None)
    seconds = {"asked_s": round(began_s - running.began_s, 1), "seconds": round(time.time() - began_s, 1)}
    return {**row, **seconds, **({"error": error} if row["answer"] is None else {})}


def phase_of(running: Running, began_s: float, ended_s: float) -> str:
    """Return whether the state had been reached when a question was asked: "before", "reached" or "between"."""
    case = running.case
    if case.moment == "starting":
        return "reached"
    reached_s = running.reached_s()
    if reached_s is None or reached_s > ended_s:
        return "before"
    return "reached" if reached_s + case.settle_s <= began_s + POLL_S else "between"


def scored(case: ForeignCase, number: int, phase: str, pids: dict[int, int], document: Any) -> Row:
    """Return one question with its score; `document` is that of `bsl spy --json`, None if it gave none."""
    truth: Truth = truth_of(case, phase, pids)
    row: Row = {"case": case.name, "framework": case.framework, "launcher": case.launcher, "ask": number,
                "phase": phase, "truth": truth.document(), "answer": None}  # fmt: skip
    if document is None:
        return {**row, "outcome": "unanswered" if phase != "between" else "not scored"}
    answer = read_answer(document, pids)
    row["answer"] = answer.document()
    if phase == "between":
        return {**row, "outcome": "not scored"}
    return {**row, "outcome": outcome(truth, answer), "figures": figures(truth, answer)}


def judge_again(case: ForeignCase, bundles: Path, without_recorder: bool) -> list[Row]:
    """Return the questions about a case whose evidence was kept, with the current engine's answers."""
    rows = []
    for folder in sorted((bundles / case.name).glob("ask-*")):
        facts = json.loads((folder / "truth.json").read_text())
        pids = {int(pid): rank for pid, rank in facts["pids"].items()}
        document, looked_s = None, 0.0
        if (folder / "collection.json").exists():
            evidence = read_bundle(folder).evidence()
            if without_recorder:
                ranks = tuple(dataclasses.replace(seen, recorder=None) for seen in evidence.ranks)
                evidence = dataclasses.replace(evidence, ranks=ranks)
            document = to_document(evidence, judge(evidence))
            looked_s = max((elapsed_s(seen) or 0.0 for seen in evidence.ranks), default=0.0)
        rows.append({**scored(case, facts["ask"], facts["phase"], pids, document), "looked_s": round(looked_s, 1)})
    return rows


if __name__ == "__main__":
    main()

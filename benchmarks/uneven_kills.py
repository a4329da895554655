"""Kills ranks of uneven pipelines at random moments, and compares each run with one process on DeepSpeed.

    python benchmarks/uneven_kills.py [--seeds 0:100] [--held-out] [--folder DIR] [--page PAGE]

A seed decides which ranks of 2 + 3 stages are killed (SIGKILL), when, and whether two die at once. The runs are
started with `bsl submit --local` and `survive`: a standby takes the place of each victim, and the pipelines are made
again. A run must end with exit code 0, and every step must have the loss and the gradient norm of the one process, to
1e-6 relative, and its samples once; `bsl diff-weights` compares the last checkpoints. `--held-out` adds seeds that
nothing was tuned to.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ranks import draw_corpus
from recovering.cases import Layout
from recovering.injured_run import BSL, LIMIT_S, run_undisturbed, write_run_file
from recovery_chaos import parse_seeds

from bigsci_launch.runs.events import read_events
from bigsci_launch.runs.layout import AttemptDir, RunDir, rank_files, read_json

RANKS, STEPS = 5, 40
LOSSES, WEIGHTS = 1e-6, 1e-5
HELD_OUT = range(1000, 1020)
BEGIN, END = "<!-- kills -->", "<!-- /kills -->"
SETTINGS: dict[str, Any] = {
    "model": {"biases": False},
    "training": {"steps": STEPS},
    "checkpoint": {"save_interval": STEPS},
    "monitor": {"watch": "off", "eval_interval": None},
    "guards": {"interval": "off"},
}
UNEVEN = {"engine": "uneven", "pipeline_parallel_size": 2, "data_parallel_size": None, "zero_stage": 0}


@dataclass(frozen=True, slots=True)
class Kill:
    """After `step`, and `delay_s` more, these ranks die."""

    step: int
    delay_s: float
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KilledRun:
    """What became of a seed. `seconds` are those from the failure to the first step, for each recovery."""

    seed: int
    kills: int
    generations: int
    sources: tuple[str, ...]
    seconds: tuple[float, ...]
    worst: float
    problems: tuple[str, ...]


def draw_kills(seed: int) -> list[Kill]:
    draw = random.Random(seed)
    steps = sorted(draw.sample(range(2, STEPS - 6), draw.choice((1, 1, 2))))
    return [
        Kill(step, draw.uniform(0, 0.1), tuple(draw.sample(range(RANKS), draw.choice((1, 1, 1, 1, 2)))))
        for step in steps
    ]


class KilledRuns:
    """The folder of all runs."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._corpus = folder, folder / "corpus"
        draw_corpus(self._corpus)
        sites = folder / "sites"
        sites.mkdir(exist_ok=True)
        (sites / "five.yaml").write_text(f"description: five ranks here\nscheduler: local\nranks_per_node: {RANKS}\n")
        self._alone = RunDir(folder / "runs" / "alone")
        run_undisturbed(self._file("alone", None, SETTINGS), self._alone)

    def _file(self, name: str, survive: dict[str, Any] | None, more: dict[str, Any]) -> Path:
        layout = Layout(1, 1, 1, "fp32", 0.0)
        return write_run_file(self._folder, name, layout, self._corpus, survive, more)

    def outcome(self, seed: int) -> KilledRun:
        """Run a seed, and judge it."""
        run, kills = RunDir(self._folder / "runs" / f"case-{seed}"), draw_kills(seed)
        path = self._file(f"case-{seed}", {}, {**SETTINGS, "parallelism": UNEVEN, "slurm": {"site": "five"}})
        with path.with_suffix(".out").open("wb") as output:
            command = [sys.executable, "-c", BSL, "submit", str(path), "--local"]
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        done = sum(_kill(process, run, each) for each in kills)
        found = self._judge(seed, done, run, _end_of(process))
        print(json.dumps({"seed": seed, "kills": done, "problems": found.problems, "worst": found.worst}), flush=True)
        if not found.problems:
            shutil.rmtree(run.path, ignore_errors=True)
        return found

    def _judge(self, seed: int, kills: int, run: RunDir, code: int) -> KilledRun:
        attempt = run.latest_attempt()
        assert attempt is not None
        problems = [f"exit code {code}"] if code else []
        mine, theirs = steps_of(attempt), steps_of(self._alone.attempt("0001"))
        worst = 0.0
        for step, wanted in theirs.items():
            if step not in mine:
                problems.append(f"no record of step {step}")
                continue
            apart = [abs(mine[step][key] / wanted[key] - 1) for key in ("loss", "grad_norm")]
            worst = max(worst, *apart)
            if mine[step]["consumed_samples"] != wanted["consumed_samples"]:
                problems.append(f"step {step} has other samples")
        if worst > LOSSES:
            problems.append(f"a loss or a norm differs by {worst:.1e}")
        saved = [str(each.checkpoints / f"global_step{STEPS}") for each in (run, self._alone)]
        compare = [sys.executable, "-c", BSL, "diff-weights", *saved, "--tolerance", str(WEIGHTS)]
        if subprocess.run(compare, capture_output=True).returncode:
            problems.append("the weights differ")
        records = [json.loads(line) for line in attempt.generations.read_text().splitlines()]
        restored = [each for each in records if each.get("phase") == "restored"]
        sources = tuple(str(each["source"]) for each in restored[1:])
        return KilledRun(seed, kills, len(restored), sources, tuple(recoveries(records)), worst, tuple(problems))


def recoveries(records: Sequence[dict[str, Any]]) -> list[float]:
    """Return the seconds from each failure to the first step that all ranks have finished after it."""
    found, failed = [], None
    for each in records:
        if each["event"] == "failed" and failed is None:
            failed = each["time"]
        elif each.get("phase") == "first_step" and failed is not None:
            found.append(each["time"] - failed)
            failed = None
    return found


def steps_of(attempt: AttemptDir) -> dict[int, dict[str, Any]]:
    files = [attempt.event_file(rank) for rank in range(RANKS)]
    records = [record for path in files if path.exists() for record in read_events(path) if record["kind"] == "step"]
    return {record["step"]: record for record in records}


def _end_of(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code; 124 for a run that did not end in time."""
    try:
        return process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        process.wait(60)
        return 124


def _kill(process: subprocess.Popen[bytes], run: RunDir, kill: Kill) -> int:
    """Wait for the moment of a kill, and return how many processes were killed."""
    until = time.monotonic() + LIMIT_S
    while process.poll() is None and time.monotonic() < until:
        attempt = run.latest_attempt()
        if attempt is not None and max(steps_of(attempt), default=0) >= kill.step:
            time.sleep(kill.delay_s)
            files = rank_files(attempt.pids, ".json")
            victims = [int(read_json(files[rank])["pid"]) for rank in kill.ranks if rank in files]
            for pid in victims:
                subprocess.run(["kill", "-9", str(pid)], capture_output=True)
            return len(victims)
        time.sleep(0.005)
    return 0


def page_of(outcomes: Sequence[KilledRun], held_out: Sequence[KilledRun]) -> str:
    """Return the table."""
    both = (outcomes, held_out)
    seconds = [sorted(each for outcome in some for each in outcome.seconds) for some in both]
    rows = [
        ("runs", [len(some) for some in both]),
        ("ended with 0 and the numbers of one process", [sum(not each.problems for each in some) for some in both]),
        ("ranks killed", [sum(each.kills for each in some) for some in both]),
        ("recoveries", [sum(map(len, (each.seconds for each in some))) for some in both]),
        ("largest relative difference", [f"{max((each.worst for each in some), default=0):.1e}" for some in both]),
        ("seconds to the next step, p50", [_quantile(some, 0.5) for some in seconds]),
        ("the same, p95", [_quantile(some, 0.95) for some in seconds]),
        ("from a checkpoint or the start, since all copies were lost", [_from_disk(some) for some in both]),
    ]
    lines = ["| | seeds | held out |", "|---|---:|---:|"]
    lines += [f"| {name} | {first} | {second} |" for name, (first, second) in rows]
    wrong = [each for some in both for each in some if each.problems]
    return "\n".join([*lines, "", *(f"- seed {each.seed}: {'; '.join(each.problems)}" for each in wrong)]).rstrip()


def _from_disk(outcomes: Sequence[KilledRun]) -> int:
    return sum(source in ("checkpoint", "start") for each in outcomes for source in each.sources)


def _quantile(values: Sequence[float], share: float) -> str:
    return f"{values[min(len(values) - 1, int(share * len(values)))]:.1f}" if values else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:100", help="FIRST:LAST, or seeds separated by commas")
    parser.add_argument("--held-out", action="store_true", help="also run what nothing was tuned to")
    parser.add_argument("--folder", type=Path, help="keep the runs here")
    parser.add_argument("--page", type=Path, help="write the table into this page, between its marks")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="uneven-"))
    folder.mkdir(parents=True, exist_ok=True)
    runs = KilledRuns(folder)
    outcomes = [runs.outcome(seed) for seed in parse_seeds(options.seeds)]
    held_out = [runs.outcome(seed) for seed in HELD_OUT] if options.held_out else []
    text = page_of(outcomes, held_out)
    print(text)
    if options.page:
        before, rest = options.page.read_text().split(BEGIN)
        options.page.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")
    sys.exit(any(each.problems for each in (*outcomes, *held_out)))


if __name__ == "__main__":
    main()

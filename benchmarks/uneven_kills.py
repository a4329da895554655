"""Kills ranks of uneven pipelines at each phase, and compares each run with one process on DeepSpeed.

    python benchmarks/uneven_kills.py [--seeds 0:100] [--held-out] [--folder DIR] [--minutes M] [--page PAGE]

A seed decides which rank of 2 + 3 stages is killed (SIGKILL), in which step, and at which phase of it; a third of the
seeds kill another rank while the first kill is recovered from. The runs are started with `bsl submit --local` and
`survive`: a standby takes the place of each victim, and the pipelines are made again. A run must end with exit code 0,
and every step must have the loss and the gradient norm of the one process, to 1e-6 relative, and its samples once;
`bsl diff-weights` compares the last checkpoints. `--held-out` adds seeds that nothing was tuned to. With `--minutes`,
no seed is begun later than that. What a folder already has is not run again, so the same command continues.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ranks import draw_corpus
from recovering.cases import Layout
from recovering.injured_run import BSL, run_undisturbed, write_run_file
from recovery_chaos import parse_seeds

from bigsci_launch.runs.events import read_events
from bigsci_launch.runs.layout import AttemptDir, RunDir

RANKS, STEPS = 5, 40
PHASES = Path(__file__).parent / "uneven_phases"
PER_STEP = {"forward": 4, "backward": 4, "reduce": 2, "barrier": 1, "apply": 1, "applied": 1, "anywhere": 0}
"""How often a rank passes each phase in a step, at least."""
LOSSES, WEIGHTS = 1e-6, 1e-5
LIMIT_S = 1200.0
HELD_OUT = range(1000, 1005)
BEGIN, END = "<!-- kills -->", "<!-- /kills -->"
SETTINGS: dict[str, Any] = {
    "model": {"biases": False},
    "training": {"steps": STEPS},
    "checkpoint": {"save_interval": STEPS},
    "monitor": {"watch": "off", "eval_interval": None},
    "guards": {"interval": "off"},
}
UNEVEN = {"engine": "uneven", "pipeline_parallel_size": 2, "data_parallel_size": None, "zero_stage": 1}


@dataclass(frozen=True, slots=True)
class Kill:
    """In a generation, a rank dies at the `count`-th passage of a phase; see `uneven_phases/sitecustomize.py`."""

    generation: int
    rank: int
    phase: str
    count: int

    def __str__(self) -> str:
        return f"{self.generation}:{self.rank}:{self.phase}:{self.count}"


@dataclass(frozen=True, slots=True)
class KilledRun:
    """What became of a seed. `seconds` are those from the failure to the first step, for each recovery."""

    seed: int
    kills: int
    generations: int
    sources: Sequence[str]
    seconds: Sequence[float]
    worst: float
    problems: Sequence[str]


def draw_kills(seed: int) -> list[Kill]:
    """Return the kills of a seed; each phase is that of every seventh seed."""
    draw = random.Random(seed)
    phase, step = list(PER_STEP)[seed % len(PER_STEP)], draw.randrange(2, STEPS - 6)
    first, second = draw.sample(range(RANKS), 2)
    count = draw.randrange(500, 8000) if phase == "anywhere" else (step - 1) * PER_STEP[phase] + 1
    kills = [Kill(0, first, phase, count)]
    if seed % 3 == 0:
        # In the recovery: while the ranks meet, while they copy, or in the first step after it.
        kills.append(Kill(1, second, draw.choice(("meeting", "copy", "forward")), 1))
    return kills


def path_of_ranks() -> str:
    """Return PYTHONPATH with the module that kills first."""
    return os.pathsep.join(filter(None, (str(PHASES), os.environ.get("PYTHONPATH"))))


class KilledRuns:
    """The folder of all runs."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._corpus = folder, folder / "corpus"
        draw_corpus(self._corpus)
        sites = folder / "sites"
        sites.mkdir(exist_ok=True)
        (sites / "five.yaml").write_text(f"description: five ranks here\nscheduler: local\nranks_per_node: {RANKS}\n")
        self._outcomes = folder / "outcomes.jsonl"
        self._alone = RunDir(folder / "runs" / "alone")
        if not (self._alone.checkpoints / f"global_step{STEPS}").exists():
            run_undisturbed(self._file("alone", None, SETTINGS), self._alone)

    def _file(self, name: str, survive: dict[str, Any] | None, more: dict[str, Any]) -> Path:
        layout = Layout(1, 1, 1, "fp32", 0.0)
        return write_run_file(self._folder, name, layout, self._corpus, survive, more)

    def outcomes(self, seeds: Sequence[int], until: float) -> list[KilledRun]:
        """Return the outcomes of seeds; those that are not known are run, as long as it is before `until`."""
        for seed in seeds:
            if seed not in self._known() and time.monotonic() < until:
                found = self.outcome(seed)
                with self._outcomes.open("a") as output:
                    output.write(json.dumps(asdict(found)) + "\n")
        known = self._known()
        return [known[seed] for seed in seeds if seed in known]

    def _known(self) -> dict[int, KilledRun]:
        lines = self._outcomes.read_text().splitlines() if self._outcomes.exists() else []
        return {each["seed"]: KilledRun(**each) for each in map(json.loads, lines)}

    def outcome(self, seed: int) -> KilledRun:
        """Run a seed, and judge it."""
        run, kills = RunDir(self._folder / "runs" / f"case-{seed}"), draw_kills(seed)
        path = self._file(f"case-{seed}", {}, {**SETTINGS, "parallelism": UNEVEN, "slurm": {"site": "five"}})
        environment = {**os.environ, "PYTHONPATH": path_of_ranks(), "UNEVEN_KILLS": ",".join(map(str, kills))}
        with path.with_suffix(".out").open("wb") as output:
            command = [sys.executable, "-c", BSL, "submit", str(path), "--local"]
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        found = self._judge(seed, run, _end_of(process))
        said = {"seed": seed, "wanted": list(map(str, kills)), "kills": found.kills, "problems": found.problems}
        print(json.dumps({**said, "sources": found.sources, "worst": found.worst}), flush=True)
        if not found.problems:
            shutil.rmtree(run.path, ignore_errors=True)
        return found

    def _judge(self, seed: int, run: RunDir, code: int) -> KilledRun:
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
        kills = sum(each["event"] == "failed" and each.get("signal") == "SIGKILL" for each in records)
        problems += [] if kills else ["no rank was killed"]
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
    for signum, limit_s in ((None, LIMIT_S), (signal.SIGINT, 120.0), (signal.SIGKILL, 120.0)):
        if signum is not None:
            process.send_signal(signum)
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(limit_s)
            return code if signum is None else 124
    return 124


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
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no seed later")
    parser.add_argument("--page", type=Path, help="write the table into this page, between its marks")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="uneven-"))
    folder.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 60 * options.minutes
    runs = KilledRuns(folder)
    outcomes = runs.outcomes(parse_seeds(options.seeds), until)
    held_out = runs.outcomes(HELD_OUT, until) if options.held_out else []
    text = page_of(outcomes, held_out)
    print(text)
    if options.page:
        before, rest = options.page.read_text().split(BEGIN)
        options.page.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")
    sys.exit(any(each.problems for each in (*outcomes, *held_out)))


if __name__ == "__main__":
    main()

"""Kills ranks of uneven pipelines at each phase, and compares each run with one process on DeepSpeed.

    python benchmarks/uneven_kills.py [--seeds 0:100] [--held-out] [--whole] [--folder DIR] [--minutes M] [--page PAGE]

A seed decides which rank of 2 + 3 stages is killed (SIGKILL), in which step, and at which phase of it; a third of the
seeds kill another rank while the first kill is recovered from. Ten seeds share a run of `STEPS` steps, one after the
other, which is started with `bsl submit --local` and `survive`: a standby takes the place of each victim, and the
pipelines are made again. A run must end with exit code 0, and every step must have the loss and the gradient norm of
the one process, to 1e-6 relative, and its samples once; `bsl diff-weights` compares the last checkpoints. `--held-out`
adds seeds that nothing was tuned to. `--whole` makes the same kills of 2 + 2 stages, at any moment of a step, with the
uneven engine and with DeepSpeed's whole replicas. With `--minutes`, no run is begun later than that. Seeds that a
folder has are not run again, so the same command continues.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from ranks import draw_corpus
from recovering.cases import Layout
from recovering.injured_run import BSL, run_undisturbed, write_run_file
from recovering.judged import phase_table, recoveries
from recovery_chaos import parse_seeds

from bigsci_launch.runs.events import read_events
from bigsci_launch.runs.layout import AttemptDir, RunDir

TOGETHER, APART = 10, 8
STEPS = TOGETHER * APART
"""Seeds of a run, and the steps that each has."""
PHASES = Path(__file__).parent / "uneven_phases"
MOST = {"forward": 3, "backward": 3, "reduce": 1, "barrier": 1, "apply": 1, "applied": 1, "anywhere": 300}
"""How often a rank passes each phase in a step, at least; for the last, milliseconds."""
LOSSES, WEIGHTS = 1e-6, 1e-5
LIMIT_S = 1200.0
HELD_OUT, COMPARED = range(1000, 1020), range(2000, 2010)
BEGIN, END = "<!-- kills -->", "<!-- /kills -->"
SETTINGS: dict[str, Any] = {
    "model": {"biases": False},
    "training": {"steps": STEPS},
    "checkpoint": {"save_interval": STEPS // 2},
    "monitor": {"watch": "off", "eval_interval": None},
    "guards": {"interval": "off"},
}


@dataclass(frozen=True, slots=True)
class Fleet:
    """The ranks of a run, and what they run. `life` is the class that says when a step begins."""

    name: str
    ranks: int
    parallelism: dict[str, Any]
    life: str


UNEVEN: dict[str, Any] = {"engine": "uneven", "pipeline_parallel_size": 2, "data_parallel_size": None, "zero_stage": 1}
FIVE = Fleet("five", 5, UNEVEN, "bigsci_launch.train.uneven.life.UnevenLife")
FOUR = replace(FIVE, name="four", ranks=4)
WHOLE = Fleet(
    "whole",
    4,
    {"pipeline_parallel_size": 2, "data_parallel_size": 2, "zero_stage": 1},
    "bigsci_launch.train.survive.life.RankLife",
)


@dataclass(frozen=True, slots=True)
class Kill:
    """A rank dies at the `count`-th passage of a phase, in `step` or in the recovery from the kill `after`; see
    `uneven_phases/sitecustomize.py`."""

    name: str
    rank: int
    phase: str
    count: int
    step: int | None = None
    after: str | None = None


@dataclass(frozen=True, slots=True)
class KilledSeed:
    """What became of a seed. `seconds` are those of the phases of each recovery."""

    seed: int
    kills: int
    sources: Sequence[str]
    seconds: Sequence[dict[str, float]]
    worst: float
    problems: Sequence[str]


def draw_kills(seed: int) -> list[Kill]:
    """Return the kills of a seed; each phase is that of every seventh seed. Those that are made of two engines are made
    at any moment, which both have."""
    draw = random.Random(seed)
    phase = "anywhere" if seed in COMPARED else list(MOST)[seed % len(MOST)]
    step = steps_of_seed(seed)[0] + draw.randrange(2, APART - 3)
    first, second = draw.sample(range(WHOLE.ranks if seed in COMPARED else FIVE.ranks), 2)
    kills = [Kill(f"{seed}", first, phase, draw.randint(1, MOST[phase]), step=step)]
    if seed % 3 == 0 and seed not in COMPARED:
        # In the recovery: while the ranks meet, while they copy, or in the first step after it.
        kills.append(Kill(f"{seed}-second", second, draw.choice(("meeting", "copy", "forward")), 1, after=f"{seed}"))
    return kills


def steps_of_seed(seed: int) -> range:
    """Return the steps of its run that a seed has."""
    first = seed % TOGETHER * APART + 1
    return range(first, first + APART)


def path_of_ranks() -> str:
    """Return PYTHONPATH with the module that kills first."""
    return os.pathsep.join(filter(None, (str(PHASES), os.environ.get("PYTHONPATH"))))


class KilledRuns:
    """The folder of all runs of a fleet."""

    def __init__(self, folder: Path, fleet: Fleet) -> None:
        self._folder, self._corpus, self._fleet = folder, folder / "corpus", fleet
        draw_corpus(self._corpus)
        sites = folder / "sites"
        sites.mkdir(exist_ok=True)
        site = f"description: ranks here\nscheduler: local\nranks_per_node: {fleet.ranks}\n"
        (sites / f"{fleet.name}.yaml").write_text(site)
        self._outcomes = folder / f"outcomes-{fleet.name}.jsonl"
        self._alone = RunDir(folder / "runs" / "alone")
        if not (self._alone.checkpoints / f"global_step{STEPS}").exists():
            shutil.rmtree(self._alone.path, ignore_errors=True)
            run_undisturbed(self._file("alone", None, SETTINGS), self._alone)

    def _file(self, name: str, survive: dict[str, Any] | None, more: dict[str, Any]) -> Path:
        layout = Layout(1, 1, 1, "fp32", 0.0)
        return write_run_file(self._folder, name, layout, self._corpus, survive, more)

    def outcomes(self, seeds: Sequence[int], until: float) -> list[KilledSeed]:
        """Return the outcomes of seeds; those that are not known are run, as long as it is before `until`."""
        wanted = [seed for seed in seeds if seed not in self._known()]
        for number, together in groupby(wanted, key=lambda seed: seed // TOGETHER):
            if time.monotonic() < until:
                found = self._run(f"{self._fleet.name}-{number}", list(together))
                with self._outcomes.open("a") as output:
                    output.writelines(json.dumps(asdict(each)) + "\n" for each in found)
        known = self._known()
        return [known[seed] for seed in seeds if seed in known]

    def _known(self) -> dict[int, KilledSeed]:
        lines = self._outcomes.read_text().splitlines() if self._outcomes.exists() else []
        return {each["seed"]: KilledSeed(**each) for each in map(json.loads, lines)}

    def _run(self, name: str, seeds: Sequence[int]) -> list[KilledSeed]:
        """Run seeds, one after the other in one run, and judge them."""
        run, killed = RunDir(self._folder / "runs" / name), self._folder / f"{name}-killed"
        shutil.rmtree(run.path, ignore_errors=True)
        shutil.rmtree(killed, ignore_errors=True)
        killed.mkdir()
        kills = [kill for seed in seeds for kill in draw_kills(seed)]
        fleet = self._fleet
        path = self._file(name, {}, {**SETTINGS, "parallelism": fleet.parallelism, "slurm": {"site": fleet.name}})
        texts = json.dumps([asdict(kill) for kill in kills])
        drawn = {"UNEVEN_KILLS": texts, "UNEVEN_KILLED": str(killed), "UNEVEN_LIFE": fleet.life}
        started = time.monotonic()
        with path.with_suffix(".out").open("wb") as output:
            command = [sys.executable, "-c", BSL, "submit", str(path), "--local"]
            environment = {**os.environ, "PYTHONPATH": path_of_ranks(), **drawn}
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        found = self._judge(seeds, run, killed, _end_of(process))
        for each in found:
            print(json.dumps(asdict(each)), flush=True)
        print(f"{name}: {time.monotonic() - started:.0f} s, load {os.getloadavg()[0]:.0f}", flush=True)
        if not any(each.problems for each in found):
            shutil.rmtree(run.path, ignore_errors=True)
        return found

    def _judge(self, seeds: Sequence[int], run: RunDir, killed: Path, code: int) -> list[KilledSeed]:
        attempt = run.latest_attempt()
        assert attempt is not None
        problems = [f"exit code {code}"] if code else []
        saved = [str(each.checkpoints / f"global_step{STEPS}") for each in (run, self._alone)]
        compare = [sys.executable, "-c", BSL, "diff-weights", *saved, "--tolerance", str(WEIGHTS)]
        if subprocess.run(compare, capture_output=True).returncode:
            problems.append("the weights differ")
        records = [json.loads(line) for line in attempt.generations.read_text().splitlines()]
        mine, alone = steps_of(attempt), steps_of(self._alone.attempt("0001"))
        found = []
        for seed in seeds:
            worst, apart = compared(mine, {step: alone[step] for step in steps_of_seed(seed)})
            marks = [killed / kill.name for kill in draw_kills(seed)]
            missing = [f"{mark.name} was not killed" for mark in marks if not mark.exists()]
            died = {int(mark.read_text()): mark.stat().st_mtime for mark in marks if mark.exists()}
            own = [each for each in records if {each["generation"], (each["generation"] or 0) - 1} & died.keys()]
            sources = tuple(source_of(records, generation + 1) for generation in died)
            seconds = tuple(recoveries(own, list(died.values())))
            found.append(KilledSeed(seed, len(died), sources, seconds, worst, (*problems, *apart, *missing)))
        return found


def compared(mine: dict[int, dict[str, Any]], wanted: dict[int, dict[str, Any]]) -> tuple[float, list[str]]:
    """Return the largest relative difference of steps, and what is wrong with them."""
    worst, problems = 0.0, []
    for step, record in wanted.items():
        if step not in mine:
            problems.append(f"no record of step {step}")
            continue
        worst = max(worst, *(abs(mine[step][key] / record[key] - 1) for key in ("loss", "grad_norm")))
        if mine[step]["consumed_samples"] != record["consumed_samples"]:
            problems.append(f"step {step} has other samples")
    return worst, [*problems, f"a loss or a norm differs by {worst:.1e}"] if worst > LOSSES else problems


def source_of(records: Sequence[dict[str, Any]], generation: int) -> str:
    """Return what a generation was restored from; `unfinished` where it ended before."""
    found = [each["source"] for each in records if each.get("phase") == "restored" and each["generation"] == generation]
    return str(found[0]) if found else "unfinished"


def steps_of(attempt: AttemptDir) -> dict[int, dict[str, Any]]:
    files = [attempt.event_file(rank) for rank in range(FIVE.ranks)]
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


def page_of(groups: Mapping[str, Sequence[KilledSeed]]) -> str:
    """Return the tables of groups of seeds."""
    rows: dict[str, Callable[[Sequence[KilledSeed]], object]] = {
        "seeds": len,
        "the numbers of one process, and exit code 0 of their run": lambda some: sum(
            not each.problems for each in some
        ),
        "ranks killed": lambda some: sum(each.kills for each in some),
        "largest relative difference": lambda some: f"{max((each.worst for each in some), default=0):.1e}",
        "from a checkpoint or the start, since all copies were lost": _from_disk,
    }
    lines = [f"| | {' | '.join(groups)} |", "|---|" + "---:|" * len(groups)]
    lines += [
        f"| {name} | {' | '.join(str(value(some)) for some in groups.values())} |" for name, value in rows.items()
    ]
    for name, some in groups.items():
        seconds = [each for outcome in some for each in outcome.seconds]
        lines += ["", *phase_table(seconds, f"{name}: phase of {len(seconds)} recoveries")]
    wrong = [each for some in groups.values() for each in some if each.problems]
    return "\n".join([*lines, "", *(f"- seed {each.seed}: {'; '.join(each.problems)}" for each in wrong)]).rstrip()


def _from_disk(outcomes: Sequence[KilledSeed]) -> int:
    return sum(source in ("checkpoint", "start") for each in outcomes for source in each.sources)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:100", help="FIRST:LAST, or seeds separated by commas")
    parser.add_argument("--held-out", action="store_true", help="also run what nothing was tuned to")
    parser.add_argument("--whole", action="store_true", help="also the same kills of two engines")
    parser.add_argument("--folder", type=Path, help="keep the runs here")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run later")
    parser.add_argument("--page", type=Path, help="write the table into this page, between its marks")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="uneven-"))
    folder.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 60 * options.minutes
    wanted = {"seeds": (FIVE, parse_seeds(options.seeds))}
    wanted |= {"held out": (FIVE, HELD_OUT)} if options.held_out else {}
    wanted |= {"2 + 2 stages": (FOUR, COMPARED), "whole replicas": (WHOLE, COMPARED)} if options.whole else {}
    groups = {name: KilledRuns(folder, fleet).outcomes(seeds, until) for name, (fleet, seeds) in wanted.items()}
    text = page_of(groups)
    print(text)
    if options.page:
        before, rest = options.page.read_text().split(BEGIN)
        options.page.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")
    sys.exit(any(each.problems for some in groups.values() for each in some))


if __name__ == "__main__":
    main()

"""Measures how well `bsl plan` predicts runs of others, a part of whose rows was not looked at before.

    python benchmarks/plan_external.py                  prints the tables
    python benchmarks/plan_external.py --write          and puts them into docs/measurements/planner-runs.md
    python benchmarks/plan_external.py --source nemo    prints one source's rows of the part for building

The rows are in `benchmarks/rows`: half of those in `published`, and a third of `runs-2026.csv` and of the sweeps in
`playbook.csv` are held out. Whatever the model assumes was chosen on the others. A row without the speed of its network
gets that of the vendor's own system with this GPU, as `bsl plan` assumes too.
"""

from __future__ import annotations

import csv
import hashlib
import random
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import page_part

from bigsci_launch.plan.calibrate.calibrate import calibrate
from bigsci_launch.plan.calibrate.place import expected_at
from bigsci_launch.plan.calibrate.rows import MeasuredRow, Measurement, read_rows, setup_of
from bigsci_launch.plan.calibrate.score import rank_figures
from bigsci_launch.plan.price.calibration import UNCALIBRATED_BAND, Calibration, expected_on
from bigsci_launch.plan.price.hardware import GpuModel, model_named
from bigsci_launch.plan.price.price import price_setup
from bigsci_launch.plan.shape.parameters import ModelShape
from bigsci_launch.plan.shape.setup import UNFUSED_2021, Setup
from bigsci_launch.topology import Topology

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks/rows"
ROWS = FOLDER / "published"
PEERS = FOLDER / "published-peers.csv"
PAGE = ROOT / "docs/measurements/planner-runs.md"
GIVEN, DRAWS = 10, 1
"""Rows of a source to calibrate on, and how often they are drawn."""
PLAYBOOK = "playbook"
FASTEST, MANY_NODES = 4, 64
"""The part of a sweep that someone would choose from, and the number of nodes that has a line of its own."""
STALL_S = 0.3
"""Seconds of a micro batch beyond the prediction from which a pipeline of the playbook counts as stalled."""


@dataclass(frozen=True)
class Published:
    """A published row that can be priced: its source, its place among others, what is expected of its GPU, the seconds
    of a step, and whether it is held out."""

    row: MeasuredRow
    source: str
    section: str
    known: Calibration
    setup: Setup
    seconds: float
    is_held_out: bool

    @property
    def gpu(self) -> GpuModel:
        return self.known.gpu

    @property
    def group(self) -> str:
        """Rows that one calibration may hold for."""
        return f"{self.source}, {self.gpu.name}"


def read_published() -> tuple[list[Published], Counter[str]]:
    """Return the rows of `published` that can be priced, and how often each reason kept one from it."""
    paths = sorted(ROWS.glob("*.csv"))
    return _priceable([(row, path.stem, _hash(row.name) % 2 == 1) for path in paths for row in read_rows(path)[1]])


def read_runs() -> tuple[list[Published], Counter[str]]:
    """Return the same of the runs of 2023 to 2026."""
    rows = read_rows(FOLDER / "runs-2026.csv")[1]
    return _priceable([(row, row.text("source"), _hash(row.name) % 3 == 0) for row in rows])


def read_playbook() -> tuple[list[Published], Counter[str]]:
    """Return the same of the sweeps of the Ultra-Scale Playbook; every third, by nodes, is held out."""
    rows = read_rows(FOLDER / "playbook.csv")[1]
    sweeps = sorted({row.section for row in rows}, key=lambda name: (int(name.split()[2]), _hash(name)))
    held_out = set(sweeps[1::3])
    return _priceable([(row, PLAYBOOK, row.section in held_out) for row in rows])


def _hash(name: str) -> int:
    return hashlib.sha256(name.encode()).digest()[0]


def _priceable(rows: Sequence[tuple[MeasuredRow, str, bool]]) -> tuple[list[Published], Counter[str]]:
    found: list[Published] = []
    left: Counter[str] = Counter()
    for row, source, is_held_out in rows:
        setup = setup_of(row)
        known = setup if isinstance(setup, str) else expected_at(row, setup.ranks_per_node)
        if isinstance(setup, str) or isinstance(known, str):
            left[re.sub(r" into \d+ parts.*|; give its.*", "", str(known))] += 1
        elif row.seconds is None:
            left["no time"] += 1
        else:
            found.append(Published(row, source, row.section, known, setup, row.seconds, is_held_out))
    return found, left


def priced(row: Published, calibration: Calibration | None = None) -> tuple[float, float]:
    """Return the predicted seconds and the band of a row."""
    price = price_setup(row.setup, calibration or row.known)
    return price.seconds, price.band


@dataclass(frozen=True)
class Figures:
    """Errors of some rows: relative to what was measured, and the share inside the band."""

    count: int
    mean: float
    median: float
    p90: float
    inside: float


def figures_of(triples: Sequence[tuple[float, float, float]]) -> Figures:
    """Return the figures of `(measured, predicted, band)`."""
    errors = sorted(abs(predicted / measured - 1) for measured, predicted, _ in triples)
    inside = sum(abs(measured / predicted - 1) <= band for measured, predicted, band in triples)
    count = len(errors)
    return Figures(
        count,
        100 * sum(errors) / count,
        100 * errors[count // 2],
        100 * errors[min(count - 1, int(0.9 * count))],
        100 * inside / count,
    )


def uncalibrated(rows: Sequence[Published]) -> Figures:
    return figures_of([(row.seconds, *priced(row)) for row in rows])


def calibrated(rows: Sequence[Published]) -> list[tuple[float, float, float]]:
    """Return `(measured, predicted, band)` of the held-out rows of a group, each time from ten rows of its other half;
    nothing for a group with too few rows."""
    given = [row for row in rows if not row.is_held_out]
    asked = [row for row in rows if row.is_held_out]
    triples: list[tuple[float, float, float]] = []
    if len(given) < GIVEN or len(asked) < 5:
        return triples
    for seed in range(DRAWS):
        drawn = random.Random(seed).sample(given, GIVEN)
        measured = [Measurement(row.row.name, row.section, row.setup, row.seconds, None, False) for row in drawn]
        calibration = calibrate(measured, drawn[0].gpu)
        triples += [(row.seconds, *priced(row, calibration)) for row in asked]
    return triples


@dataclass(frozen=True)
class Sweep:
    """A figure that varies one size on 64 A100 of Selene, and what it shows: which value is best, or that each next
    one is slower."""

    figure: str
    shape: ModelShape
    batches: tuple[int, ...]
    values: tuple[int, ...]
    layout: Callable[[int], tuple[Topology, int]]
    best: int | None = None


def _gpt(hidden: int, heads: int) -> ModelShape:
    return ModelShape(32, hidden, heads, 4 * hidden, 2048, 51200)


SWEEPS = (
    Sweep("13: tp 64 / pp", _gpt(20480, 128), (32, 128), (2, 4, 8, 16, 32), lambda n: (Topology(64 // n, n, 1), 1), 8),
    Sweep("14: dp 64 / pp", _gpt(3840, 32), (32, 512), (2, 4, 8, 16, 32), lambda n: (Topology(1, n, 64 // n), 1)),
    Sweep("15: dp 64 / tp", _gpt(3840, 32), (32, 128, 512), (2, 4, 8, 16, 32), lambda n: (Topology(n, 1, 64 // n), 1)),
    Sweep("16: micro-batch", _gpt(15360, 128), (128, 512), (1, 2, 4, 8), lambda n: (Topology(8, 8, 1), n), 2),
)
"""Narayanan et al. 2021, with the sizes of NVIDIA/Megatron-LM, examples/sc21/run_figure_*.sh."""


def sweep_lines() -> Iterator[str]:
    gpu = model_named("A100-SXM4-80GB")
    assert gpu is not None
    known = expected_on(replace(gpu, network_gb_per_s=200.0))
    yield "| figure of Narayanan et al. 2021 | batch | shown there | seconds of a step predicted | agrees |"
    yield "|---|---|---|---|---|"
    for sweep in SWEEPS:
        for batch in sweep.batches:
            seconds = [_sweep_seconds(sweep, value, batch, known) for value in sweep.values]
            if sweep.best is None:
                shown, agrees = "each next one is slower", seconds == sorted(seconds)
            else:
                shown, agrees = f"{sweep.best} is best", min(seconds) == seconds[sweep.values.index(sweep.best)]
            figures = ", ".join(f"{value}: {each:.1f}" for value, each in zip(sweep.values, seconds, strict=True))
            yield f"| {sweep.figure} | {batch} | {shown} | {figures} | {'yes' if agrees else 'no'} |"


def _sweep_seconds(sweep: Sweep, value: int, batch: int, known: Calibration) -> float:
    topology, size = sweep.layout(value)
    technique = replace(UNFUSED_2021, zero_stage=0)
    setup = Setup(
        sweep.shape, topology, size, batch, 8, "type:transformer", "fp16", False, technique, framework="megatron"
    )
    return price_setup(setup, known).seconds


def table() -> Iterator[str]:
    (older, left), (newer, more_left) = read_published(), read_runs()
    yield from source_lines("the published rows of 2021 to 2025", older, left)
    yield ""
    yield from source_lines("the runs of 2023 to 2026", newer, more_left)
    yield ""
    yield from playbook_lines(read_playbook()[0])
    yield ""
    yield from sweep_lines()
    yield ""
    yield from peers(older)


def source_lines(name: str, rows: Sequence[Published], left: Counter[str]) -> Iterator[str]:
    groups: dict[str, list[Published]] = defaultdict(list)
    for row in rows:
        groups[row.group].append(row)
    yield (
        f"Of {name}, {len(rows)} can be priced. {sum(left.values())} cannot: "
        + "; ".join(f"{reason} ({count})" for reason, count in left.most_common())
        + "."
    )
    yield ""
    yield (
        "| source, GPU | rows, part for building | mean error, % | held-out rows | mean / median / p90, % | in the "
        f"band of ±{100 * UNCALIBRATED_BAND:.0f} %, % | calibrated on {GIVEN} rows: mean / p90, % | in band, % |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    learned = {group: calibrated(groups[group]) for group in sorted(groups)}
    for group, triples in learned.items():
        yield _group_line(group, groups[group], triples)
    yield _group_line("all", rows, [*chain(*learned.values())])


def playbook_lines(rows: Sequence[Published]) -> Iterator[str]:
    """Compare the sweeps of the Ultra-Scale Playbook: times of the fastest quarter, and the order of all layouts."""
    yield (
        f"| {PLAYBOOK}, H100 | sweeps | all layouts: mean / median error, % | fastest quarter: mean / median, % | "
        f"in band, % | on {MANY_NODES} nodes: mean, % | Kendall tau, mean of sweeps | regret of the first choice: "
        "median, % |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for name, is_held_out in (("for building", False), ("held out", True)):
        part = [row for row in rows if row.is_held_out == is_held_out]
        yield _sweeps_line(name, part)
        yield _sweeps_line(f"{name}, without stalls", [row for row in part if not stalls(row)])


def stalls(row: Published) -> bool:
    """Return whether a pipeline took far longer for each micro batch than predicted. This selects by what was measured,
    so figures without such rows show a cause, not how good predictions are."""
    pp = row.setup.topology.pp
    return pp > 1 and row.seconds - priced(row)[0] > STALL_S * (row.setup.num_micro_batches + pp - 1)


def _sweeps_line(name: str, rows: Sequence[Published]) -> str:
    sweeps: dict[str, list[Published]] = defaultdict(list)
    for row in rows:
        sweeps[row.section].append(row)
    return f"| {name} ({len(rows)} layouts) | {len(sweeps)} | {_sweeps_cells([*sweeps.values()])} |"


def _sweeps_cells(sweeps: Sequence[Sequence[Published]]) -> str:
    fastest = [
        row for sweep in sweeps for row in sorted(sweep, key=lambda row: row.seconds)[: max(3, len(sweep) // FASTEST)]
    ]
    many = [row for row in fastest if row.setup.num_nodes == MANY_NODES]
    rankings = [rank_figures([[(row.seconds, priced(row)[0]) for row in sweep]]) for sweep in sweeps]
    every, best = uncalibrated([*chain(*sweeps)]), uncalibrated(fastest)
    cells = (
        f"{every.mean:.1f} / {every.median:.1f}",
        f"{best.mean:.1f} / {best.median:.1f}",
        f"{best.inside:.0f}",
        f"{uncalibrated(many).mean:.1f}" if many else "-",
        f"{statistics.fmean(ranking.tau or 0.0 for ranking in rankings):.2f}",
        f"{statistics.median(ranking.regret or 0.0 for ranking in rankings):.1f}",
    )
    return " | ".join(cells)


def _group_line(name: str, rows: Sequence[Published], learned: Sequence[tuple[float, float, float]]) -> str:
    building = [row for row in rows if not row.is_held_out]
    held_out = [row for row in rows if row.is_held_out]
    first = f"{len(building)} | {uncalibrated(building).mean:.1f}" if building else "0 | -"
    second = "0 | - | -"
    if held_out:
        found = uncalibrated(held_out)
        second = f"{found.count} | {_three(found)} | {found.inside:.0f}"
    return f"| {name} | {first} | {second} | {_learned(learned)} |"


def _learned(triples: Sequence[tuple[float, float, float]]) -> str:
    if not triples:
        return "too few rows | -"
    found = figures_of(triples)
    return f"{found.mean:.1f} / {found.p90:.1f} | {found.inside:.0f}"


def _three(figures: Figures) -> str:
    return f"{figures.mean:.1f} / {figures.median:.1f} / {figures.p90:.1f}"


def peers(rows: Sequence[Published]) -> Iterator[str]:
    """Compare with tools whose predictions `benchmarks/plan_peers.py` wrote down, on the rows that each can say."""
    if not PEERS.exists():
        return
    said: dict[str, dict[str, float]] = defaultdict(dict)
    with PEERS.open(newline="", encoding="utf-8") as stream:
        for line in csv.DictReader(stream):
            if line["seconds"]:
                said[line["tool"]][line["row_id"]] = float(line["seconds"])
    yield "| tool, uncalibrated | rows that it can say | its mean / median error, % | `bsl plan` on these, % |"
    yield "|---|---|---|---|"
    for tool, seconds in sorted(said.items()):
        common = [row for row in rows if row.row.name in seconds]
        theirs = figures_of([(row.seconds, seconds[row.row.name], 0.0) for row in common])
        mine = uncalibrated(common)
        yield (
            f"| {tool} | {theirs.count} | {theirs.mean:.1f} / {theirs.median:.1f} | "
            f"{mine.mean:.1f} / {mine.median:.1f} |"
        )


def rows_of(source: str) -> Iterator[str]:
    """Yield the rows of one source in the part for building, with their errors: never the other part."""
    for row in chain(*(read()[0] for read in (read_published, read_runs, read_playbook))):
        if row.source == source and not row.is_held_out:
            ratio = priced(row)[0] / row.seconds
            yield f"{ratio:5.2f} {row.row.name} {row.section} {row.setup.topology} {row.setup.precision}"


def main() -> None:
    if "--source" in sys.argv:
        print("\n".join(rows_of(sys.argv[sys.argv.index("--source") + 1])))
        return
    page_part.show(PAGE, "external", "\n".join(table()))


if __name__ == "__main__":
    main()

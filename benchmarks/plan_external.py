"""Measures how well `bsl plan` predicts runs of others: published rows, of which one half was never looked at.

    python benchmarks/plan_external.py                  prints the tables
    python benchmarks/plan_external.py --write          and puts them into docs/explanation/planner.md
    python benchmarks/plan_external.py --source nemo    prints one source's rows of the half for building

The rows are in `benchmarks/rows/published`, with source and date. A hash of its name puts a row into one of two halves.
Everything that the model assumes was chosen on the first half; the second one only says how good it is. A row without
the speed of its network gets that of the vendor's own system with this GPU, as `bsl plan` assumes too.
"""

from __future__ import annotations

import csv
import hashlib
import random
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from bigsci_launch.plan.calibrate.calibrate import calibrate
from bigsci_launch.plan.calibrate.rows import MeasuredRow, Measurement, read_rows, setup_of
from bigsci_launch.plan.price.calibration import UNCALIBRATED_BAND, Calibration, expected_on
from bigsci_launch.plan.price.hardware import GpuModel, model_named
from bigsci_launch.plan.price.price import price_setup
from bigsci_launch.plan.shape.parameters import ModelShape
from bigsci_launch.plan.shape.setup import UNFUSED_2021, Setup
from bigsci_launch.topology import Topology

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "benchmarks/rows/published"
PEERS = ROOT / "benchmarks/rows/published-peers.csv"
PAGE = ROOT / "docs/explanation/planner.md"
BEGIN, END = "<!-- external: begin -->", "<!-- external: end -->"
GIVEN, DRAWS = 10, 3
"""Rows of a source to calibrate on, and how often they are drawn."""


@dataclass(frozen=True)
class Published:
    """A published row that can be priced: its source, its place among others, the GPU and the seconds of a step."""

    row: MeasuredRow
    source: str
    section: str
    gpu: GpuModel
    setup: Setup
    seconds: float

    @property
    def is_held_out(self) -> bool:
        return hashlib.sha256(self.row.name.encode()).digest()[0] % 2 == 1

    @property
    def group(self) -> str:
        """Rows that one calibration may hold for."""
        return f"{self.source}, {self.gpu.name}"


def read_published() -> tuple[list[Published], Counter[str]]:
    """Return the rows that can be priced, and how often each reason kept one from it."""
    found: list[Published] = []
    left: Counter[str] = Counter()
    for path in sorted(ROWS.glob("*.csv")):
        for row in read_rows(path)[1]:
            one = _published(row, path.stem)
            if isinstance(one, str):
                left[re.sub(r" into \d+ parts.*", "", one)] += 1
            else:
                found.append(one)
    return found, left


def _published(row: MeasuredRow, source: str) -> Published | str:
    setup = setup_of(row)
    if isinstance(setup, str):
        return setup
    gpu = model_named(row.text("gpu"), setup.ranks_per_node)
    if gpu is None:
        return f"gpu {row.text('gpu')} is in no table"
    if row.seconds is None:
        return "no time"
    network = row.number("network_gb_per_s")
    return Published(
        row, source, row.section, replace(gpu, network_gb_per_s=network) if network else gpu, setup, row.seconds
    )


def priced(row: Published, calibration: Calibration | None = None) -> tuple[float, float]:
    """Return the predicted seconds and the band of a row."""
    known = calibration or expected_on(row.gpu)
    price = price_setup(row.setup, known)
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
    rows, left = read_published()
    groups: dict[str, list[Published]] = defaultdict(list)
    for row in rows:
        groups[row.group].append(row)
    yield (
        f"{len(rows)} rows can be priced. {sum(left.values())} cannot: "
        + "; ".join(f"{reason} ({count})" for reason, count in left.most_common())
        + "."
    )
    yield ""
    yield (
        "| source, GPU | rows, half for building | mean error, % | held-out rows | mean / median / p90, % | in the "
        f"band of ±{100 * UNCALIBRATED_BAND:.0f} %, % | calibrated on {GIVEN} rows: mean / p90, % | in band, % |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    learned = {name: calibrated(groups[name]) for name in sorted(groups)}
    for name, triples in learned.items():
        yield _group_line(name, groups[name], triples)
    halves = [[row for row in rows if row.is_held_out is held] for held in (False, True)]
    building, held_out = (uncalibrated(half) for half in halves)
    yield (
        f"| all | {building.count} | {building.mean:.1f} | {held_out.count} | {_three(held_out)} | "
        f"{held_out.inside:.0f} | {_learned([*chain(*learned.values())])} |"
    )
    yield ""
    yield from sweep_lines()
    yield ""
    yield from peers(rows)


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
    """Yield the rows of one source in the half for building, with their errors: never the other half."""
    for row in read_published()[0]:
        if row.source == source and not row.is_held_out:
            ratio = priced(row)[0] / row.seconds
            yield f"{ratio:5.2f} {row.row.name} {row.section} {row.setup.topology} {row.setup.precision}"


def main() -> None:
    if "--source" in sys.argv:
        print("\n".join(rows_of(sys.argv[sys.argv.index("--source") + 1])))
        return
    text = "\n".join(table())
    print(text)
    if "--write" in sys.argv:
        page = PAGE.read_text(encoding="utf-8")
        before, after = page.split(BEGIN)[0], page.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()

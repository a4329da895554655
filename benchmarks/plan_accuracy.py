"""Measures how well `bsl plan` and its peers predict runs that they were not fitted to, on public rows.

    python benchmarks/plan_accuracy.py                prints the table
    python benchmarks/plan_accuracy.py --write        and puts it into docs/explanation/planner.md

The rows are in `benchmarks/rows`. Every prediction is made without its row: whole sections are left out in turn, or a
random half is predicted from the other half. Nothing is tuned to the table: scales and nuggets of the interpolation are
constants.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import page_part

from bigsci_launch.config.rules.layout import Limits
from bigsci_launch.plan.calibrate.calibrate import calibrate, fit_calibration
from bigsci_launch.plan.calibrate.predict import predict_row
from bigsci_launch.plan.calibrate.rows import Measurement, measurements_of, read_rows
from bigsci_launch.plan.calibrate.score import ErrorFigures, Ranking, error_figures, rank_figures, score_rows
from bigsci_launch.plan.choose.search import search
from bigsci_launch.plan.price.calibration import read_calibration
from bigsci_launch.plan.price.hardware import A100
from bigsci_launch.plan.price.price import price_setup
from bigsci_launch.plan.shape.tflops import full_flops

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/explanation/planner.md"
REPEATS = 10

# Results of other tools on the same rows, as published with them: mean error in percent, Kendall tau.
PEERS = (
    ("llm-analysis at its advised efficiency", 15.0, 0.37),
    ("calculon, unmodified", 33.3, 0.44),
    ("calculon, one scalar fitted", 10.6, 0.33),
)


@dataclass(frozen=True)
class Predicted:
    """A row, and what was predicted for it."""

    row: Measurement
    seconds: float
    memory_gib: float
    is_out_of_memory: bool


@dataclass(frozen=True)
class Figures:
    """Everything that the table shows for one way of leaving rows out."""

    time: ErrorFigures
    ranking: Ranking
    memory: ErrorFigures
    num_oom: int
    num_caught: int
    num_fitting: int
    num_false: int


def predict(given: Sequence[Measurement], asked: Sequence[Measurement]) -> list[Predicted]:
    calibration = fit_calibration(given, A100)
    prices = [(row, price_setup(row.setup, calibration)) for row in asked]
    return [Predicted(row, price.seconds, price.memory_gib, price.is_out_of_memory) for row, price in prices]


def predict_by_flops(given: Sequence[Measurement], asked: Sequence[Measurement]) -> list[Predicted]:
    """Predict by the plain formula: FLOPs of the model over GPUs, with one fitted efficiency."""
    rates = sorted(flops_per_gpu(row) / row.seconds for row in given if row.seconds)
    rate = rates[len(rates) // 2]
    return [Predicted(row, flops_per_gpu(row) / rate, 0.0, False) for row in asked]


def flops_per_gpu(row: Measurement) -> float:
    setup = row.setup
    return full_flops(setup.shape, setup.topology.tp, setup.global_batch_size) / setup.topology.world_size


def figures_of(found: Sequence[Predicted]) -> Figures:
    sections: dict[str, list[tuple[float, float]]] = {}
    for one in found:
        if one.row.seconds:
            sections.setdefault(one.row.section, []).append((one.row.seconds, one.seconds))
    memory = [(one.row.memory_gib, one.memory_gib) for one in found if one.row.memory_gib]
    fitting = [one for one in found if not one.row.ran_out_of_memory]
    oom = [one for one in found if one.row.ran_out_of_memory]
    return Figures(
        error_figures(pair for pairs in sections.values() for pair in pairs),
        rank_figures(sections.values()),
        error_figures(memory),
        len(oom),
        sum(one.is_out_of_memory for one in oom),
        len(fitting),
        sum(one.is_out_of_memory for one in fitting),
    )


def by_section(rows: Sequence[Measurement], method=predict) -> Figures:  # type: ignore[no-untyped-def]
    return figures_of([one for given, asked in section_cuts(rows) for one in method(given, asked)])


def by_halves(rows: Sequence[Measurement]) -> list[Figures]:
    """Return the figures of `REPEATS` random cuts, each predicted both ways."""
    return [figures_of(predict(given, asked)) for given, asked in half_cuts(rows)]


def share_in_band(cuts: Iterable[tuple[list[Measurement], list[Measurement]]]) -> float:
    """Return the percentage of measurements inside the band that their prediction has, over cuts `(given, asked)`."""
    inside: list[bool] = []
    for given, asked in cuts:
        calibration = calibrate(given, A100)
        for row in asked:
            if row.seconds:
                price = price_setup(row.setup, calibration)
                inside.append(abs(row.seconds / price.seconds - 1) <= price.band)
    return 100 * sum(inside) / len(inside)


def section_cuts(rows: Sequence[Measurement]) -> Iterator[tuple[list[Measurement], list[Measurement]]]:
    for section in sorted({row.section for row in rows}):
        yield [row for row in rows if row.section != section], [row for row in rows if row.section == section]


def half_cuts(rows: Sequence[Measurement]) -> Iterator[tuple[list[Measurement], list[Measurement]]]:
    """Yield `REPEATS` random halves, each asked of the other."""
    for seed in range(REPEATS):
        order = random.Random(seed).sample(list(rows), len(rows))
        first, second = order[: len(order) // 2], order[len(order) // 2 :]
        yield first, second
        yield second, first


def average(figures: Sequence[Figures], *path: str) -> float:
    numbers = []
    for one in figures:
        value: object = one
        for name in path:
            value = getattr(value, name)
        if value is not None:
            numbers.append(float(value))  # type: ignore[arg-type]
    return sum(numbers) / len(numbers)


def search_seconds() -> tuple[float, float]:
    """Return the seconds of the search for BLOOM on 48 nodes after start-up, and of the whole command."""
    calibration = read_calibration(ROOT / "slurm/calibrations/jean-zay-a100.json")
    rows, _ = measurements_of(read_rows(ROOT / "benchmarks/rows/chronicle.csv")[1])
    base = next(row.setup for row in rows if row.name == "r747")
    began = time.perf_counter()
    search([base], [48], Limits(48), calibration, per_parameter=False)
    inside = time.perf_counter() - began
    began = time.perf_counter()
    command = [sys.executable, "-m", "bigsci_launch", "plan", "configs/bloom-176b.yaml", "--json"]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=60)
    return inside, time.perf_counter() - began


def tflops_error() -> tuple[float, float]:
    """Return the largest p90 error of TFLOP/s recomputed from the measured seconds, in each convention."""
    _, rows = read_rows(ROOT / "benchmarks/rows/chronicle.csv")
    calibration = read_calibration(ROOT / "slurm/calibrations/jean-zay-a100.json")
    priced = [predict_row(row, calibration).row for row in rows]
    score = score_rows(priced)
    return score.tflops_weights.p90 or 0.0, score.tflops_full.p90 or 0.0


def table() -> Iterator[str]:
    chronicle, _ = measurements_of(read_rows(ROOT / "benchmarks/rows/chronicle.csv")[1])
    vtrain, _ = measurements_of(read_rows(ROOT / "benchmarks/rows/vtrain.csv")[1])
    sections, halves, other = by_section(chronicle), by_halves(chronicle), by_halves([r for r in vtrain if r.seconds])
    weights, full = tflops_error()
    inside, whole = search_seconds()
    flops = by_section([row for row in chronicle if row.seconds], predict_by_flops)
    yield "| on rows not fitted | sections left out | random halves | pass | aim |"
    yield "|---|---|---|---|---|"
    yield (
        f"| s/step error mean / median / p90, % | {three(sections.time)} | "
        f"{average(halves, 'time', 'mean'):.1f} / {average(halves, 'time', 'median'):.1f} / "
        f"{average(halves, 'time', 'p90'):.1f} | 5 / 3 / 10 | 2.5 / 1.7 / 7 |"
    )
    yield (
        f"| Kendall tau inside sections | {sections.ranking.tau:.2f} | {average(halves, 'ranking', 'tau'):.2f} "
        "| 0.70 | 0.85 |"
    )
    found = f"{sections.ranking.num_found} of {sections.ranking.num_sections}; {sections.ranking.regret:.2f} %"
    num_found, num_sections = average(halves, "ranking", "num_found"), average(halves, "ranking", "num_sections")
    yield (
        f"| best found within 1 %; mean regret | {found} | {num_found:.1f} of {num_sections:.1f}; "
        f"{average(halves, 'ranking', 'regret'):.2f} % | 8 of 10; 1 % | 10 of 10; 0.2 % |"
    )
    yield (
        f"| memory error mean / p90, % | {sections.memory.mean:.1f} / {sections.memory.p90:.1f} | "
        f"{average(halves, 'memory', 'mean'):.1f} / {average(halves, 'memory', 'p90'):.1f} | 6 / 10 | 3.3 / 7 |"
    )
    caught, oom = sum(one.num_caught for one in halves), sum(one.num_oom for one in halves)
    false, fitting = sum(one.num_false for one in halves), sum(one.num_fitting for one in halves)
    yield (
        f"| OOM caught; false alarms | {sections.num_caught} of {sections.num_oom}; {sections.num_false} of "
        f"{sections.num_fitting} | {caught} of {oom}; {false} of {fitting} | 5 of 6; 3 of 90 | 6 of 6; 0 |"
    )
    yield f"| TFLOP/s from s/step, before and since 2022-02-21, p90 % | {weights:.2f} / {full:.2f} | | 0.2 | 0.1 |"
    yield (
        f"| vTrain's rows, half from half: mean %, tau | | {average(other, 'time', 'mean'):.1f}, "
        f"{average(other, 'ranking', 'tau'):.2f} | 8, 0.70 | 4.5, 0.80 |"
    )
    yield (
        f"| measurements inside the band, %; vTrain's, half from half | {share_in_band(section_cuts(chronicle)):.0f} | "
        f"{share_in_band(half_cuts([row for row in vtrain if row.seconds])):.0f} | 85 to 95 | 90 |"
    )
    yield f"| search on 48 nodes after start-up; whole command, s | {inside:.2f}; {whole:.2f} | | 5 | 1 |"
    yield ""
    yield "| compared on the same rows | s/step error mean, % | Kendall tau | times the error |"
    yield "|---|---|---|---|"
    mine = sections.time.mean or 1.0
    yield f"| bsl plan, sections left out | {mine:.1f} | {sections.ranking.tau:.2f} | 1 |"
    plain = ("FLOPs over one fitted efficiency (computed here)", flops.time.mean or 0.0, flops.ranking.tau or 0.0)
    for name, error, tau in (plain, *PEERS):
        yield f"| {name} | {error:.1f} | {tau:.2f} | {error / mine:.1f} |"


def three(figures: ErrorFigures) -> str:
    return f"{figures.mean:.1f} / {figures.median:.1f} / {figures.p90:.1f}"


def main() -> None:
    page_part.show(PAGE, "accuracy", "\n".join(table()))


if __name__ == "__main__":
    main()

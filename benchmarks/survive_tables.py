"""Draws the tables of Oobleck's artifact again: throughput by number of nodes, and training under failure traces.

    python benchmarks/survive_tables.py               prints the tables
    python benchmarks/survive_tables.py --write       and puts them into docs/measurements/survive-tables.md

The published rows are in `benchmarks/rows`: `oobleck-throughput.csv`, `oobleck-pauses.csv` and two spot traces. The
page says what is simulated, what others measured, and what was fitted.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import page_part

from bigsci_launch.plan.survive.compose import compose
from bigsci_launch.plan.survive.cut import CutModel, find_cut
from bigsci_launch.plan.survive.expected import expected_run
from bigsci_launch.plan.survive.schedule import StageTime
from bigsci_launch.plan.survive.templates import Template, usable_sizes
from bigsci_launch.plan.survive.trace import FailureTrace, Strategy, parse_trace, regular, replay

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "benchmarks/rows"
PAGE = ROOT / "docs/measurements/survive-tables.md"
SYSTEMS = ("Oobleck", "Varuna", "Bamboo")
NODES = range(30, 14, -1)
FAILURES = 3
NUM_TEMPLATES = 7
HOURS_OF_REMOVALS = (1 / 6, 0.5, 1, 3, 6)
MTBF_H, HORIZON_H = (500, 2000, 10_000), 168


@dataclass(frozen=True)
class Model:
    """A model of the artifact. Its micro batches and n0 are not published there; the page says where they are from."""

    num_layers: int
    hidden: int
    sequence: int
    vocabulary: int
    micro_batches: int
    fewest_nodes: int

    @property
    def head_in_layers(self) -> float:
        """Products of the head in those of a layer: 2 v h to 24 h^2 + 4 s h per token."""
        return 2 * self.vocabulary / (24 * self.hidden + 4 * self.sequence)


MODELS = {
    "BERT-L": Model(24, 1024, 512, 30522, 256, 1),
    "GPT-2": Model(24, 1024, 1024, 50257, 256, 1),
    "GPT-3 medium": Model(24, 1024, 2048, 50257, 512, 1),
    "GPT-3 2.7B": Model(32, 2560, 2048, 50257, 512, 2),
    "GPT-3 6.7B": Model(32, 4096, 2048, 50257, 512, 4),
}


@dataclass(frozen=True)
class Pauses:
    """Published constants of a system for a model: samples of a step, seconds per change, and of a checkpoint."""

    batch: int
    pause_s: float
    checkpoint_s: float
    checkpoint_steps: int


def published_rates() -> dict[tuple[str, str], dict[int, float]]:
    with (ROWS / "oobleck-throughput.csv").open(newline="") as stream:
        return {
            (row["model"], row["system"]): {nodes: float(row[str(nodes)]) for nodes in NODES}
            for row in csv.DictReader(stream)
        }


def published_pauses() -> dict[tuple[str, str], Pauses]:
    with (ROWS / "oobleck-pauses.csv").open(newline="") as stream:
        return {
            (row["model"], row["system"]): Pauses(
                int(row["batch"]),
                float(row["pause_s"]),
                float(row["checkpoint_s"] or 0),
                int(row["checkpoint_steps"] or 0),
            )
            for row in csv.DictReader(stream)
        }


def rates(model: Model) -> Mapping[int, float]:
    """Return steps per second by number of nodes, in units in which a forward pass of a layer takes a second."""
    built = templates(model)
    found = {}
    for nodes in NODES:
        composition = compose(nodes, built, model.micro_batches, FAILURES + 1)
        found[nodes] = 1 / composition.seconds if composition else 0.0
    return found


def whole_replica_rates(model: Model) -> Mapping[int, float]:
    """Return the same with pipelines of n0 nodes only; nodes that do not fill one are idle."""
    size = model.fewest_nodes
    only = {size: templates(model)[size]}
    found = {}
    for nodes in NODES:
        composition = compose(nodes // size * size, only, model.micro_batches, FAILURES + 1)
        found[nodes] = 1 / composition.seconds if composition else 0.0
    return found


def templates(model: Model) -> dict[int, Template]:
    layers = [StageTime(1.0, 2.0)] * model.num_layers
    head = model.head_in_layers
    layers[-1] = StageTime(1 + head, 2 * (1 + head))
    most = -(-model.num_layers // model.fewest_nodes)
    cut_model = CutModel(tuple(layers), lambda stage, num_stages: most)
    sizes = usable_sizes(model.fewest_nodes, FAILURES, NODES[0])[:NUM_TEMPLATES]
    found = {}
    for size in sizes:
        cut = find_cut(cut_model, size, 4 * size)
        if cut is not None:
            found[size] = Template(size, cut.counts, cut_model)
    return found


def scaled(found: Mapping[int, float], anchor: float, published: float) -> dict[int, float]:
    return {nodes: rate * published / anchor for nodes, rate in found.items()}


def strategy(name: str, by_nodes: Mapping[int, float], pauses: Pauses) -> Strategy:
    """Return a strategy from a table of rates. Half a step is lost at a change; with checkpoints, half an interval."""

    def rate(nodes: int) -> float:
        found = by_nodes[min(nodes, NODES[0])] if nodes >= NODES[-1] else 0.0
        if not found or not pauses.checkpoint_steps:
            return found
        samples = pauses.batch * pauses.checkpoint_steps
        return samples / (samples / found + pauses.checkpoint_s)

    def pause(before: int, after: int) -> float:
        lost = pauses.batch * (pauses.checkpoint_steps or 1) / 2
        return pauses.pause_s + (lost / rate(before) if rate(before) else 0.0)

    return Strategy(name, rate, pause)


def traces() -> Iterator[tuple[str, FailureTrace]]:
    for hours in HOURS_OF_REMOVALS:
        yield (f"one in {hours:g} h" if hours >= 1 else f"one in {60 * hours:.0f} min"), regular(30, 15, 3600 * hours)
    for name, title in (("gcp-a2", "GCP"), ("ec2-p3", "EC2")):
        path = ROWS / f"{name}-trace.csv"
        yield title, parse_trace(path.read_text(encoding="utf-8"), str(path))


def tables() -> Iterator[str]:
    published, pauses = published_rates(), published_pauses()
    ours: dict[str, dict[int, float]] = {}
    whole: dict[str, dict[int, float]] = {}
    for name, model in MODELS.items():
        found = rates(model)
        anchor = published[name, "Oobleck"][NODES[0]]
        ours[name] = scaled(found, found[NODES[0]], anchor)
        whole[name] = scaled(whole_replica_rates(model), found[NODES[0]], anchor)
    yield from throughput_table(ours, whole, published)
    yield ""
    yield from trace_table(ours, published, pauses)
    yield ""
    yield from expected_table(ours, whole, published, pauses)


def throughput_table(
    ours: Mapping[str, Mapping[int, float]],
    whole: Mapping[str, Mapping[int, float]],
    published: Mapping[tuple[str, str], Mapping[int, float]],
) -> Iterator[str]:
    yield f"| samples/s on nodes | {' | '.join(map(str, NODES))} |"
    yield "|---|" + "---:|" * len(NODES)
    for name in MODELS:
        yield row(f"{name}: bsl, simulated", [ours[name][nodes] for nodes in NODES])
        if MODELS[name].fewest_nodes > 1:
            yield row("whole replicas only, simulated", [whole[name][nodes] for nodes in NODES])
        for system in SYSTEMS:
            found = published[name, system]
            yield row(f"{system}, published", [found[nodes] for nodes in NODES])
    yield ""
    yield "| bsl against Oobleck's rows of 29 to 15 nodes | mean difference, % | largest, % | at nodes |"
    yield "|---|---:|---:|---:|"
    for name in MODELS:
        errors = {
            nodes: 100 * (ours[name][nodes] / value - 1)
            for nodes, value in published[name, "Oobleck"].items()
            if nodes < NODES[0] and value
        }
        worst = max(errors, key=lambda nodes: abs(errors[nodes]))
        mean = sum(map(abs, errors.values())) / len(errors)
        yield f"| {name} | {mean:.1f} | {errors[worst]:+.1f} | {worst} |"


def trace_table(
    ours: Mapping[str, Mapping[int, float]],
    published: Mapping[tuple[str, str], Mapping[int, float]],
    pauses: Mapping[tuple[str, str], Pauses],
) -> Iterator[str]:
    all_traces = dict(traces())
    yield f"| samples/s, average over the trace | {' | '.join(all_traces)} |"
    yield "|---|" + "---:|" * len(all_traces)
    for name in MODELS:
        systems = {f"{name}: bsl": strategy("bsl", ours[name], pauses[name, "Oobleck"])}
        for system in SYSTEMS:
            systems[system] = strategy(system, published[name, system], pauses[name, system])
        for title, system_strategy in systems.items():
            cells = [average(trace, system_strategy) for trace in all_traces.values()]
            yield f"| {title} | {' | '.join(cells)} |"


def average(trace: FailureTrace, system: Strategy) -> str:
    """Return the samples per second of a trace, pauses and stops included."""
    if system.samples_per_second(trace.most_nodes) <= 0:
        return "-"
    found = replay(trace, system)
    return in_digits(found.samples / found.seconds)


def expected_table(
    ours: Mapping[str, Mapping[int, float]],
    whole: Mapping[str, Mapping[int, float]],
    published: Mapping[tuple[str, str], Mapping[int, float]],
    pauses: Mapping[tuple[str, str], Pauses],
) -> Iterator[str]:
    titles = " | ".join(f"a node fails in {hours} h" for hours in MTBF_H)
    yield f"| samples/s expected over {HORIZON_H} h, 30 nodes at the start, none replaced | {titles} |"
    yield "|---|" + "---:|" * len(MTBF_H)
    name = "GPT-3 6.7B"
    systems = {
        f"{name}: bsl": strategy("bsl", ours[name], pauses[name, "Oobleck"]),
        "whole replicas only": strategy("whole", whole[name], pauses[name, "Oobleck"]),
        "Oobleck": strategy("Oobleck", published[name, "Oobleck"], pauses[name, "Oobleck"]),
        "Varuna": strategy("Varuna", published[name, "Varuna"], pauses[name, "Varuna"]),
    }
    for title, system in systems.items():
        full = system.samples_per_second(NODES[0])
        shares = [expected_run(system, NODES[0], hours, HORIZON_H).effective_share for hours in MTBF_H]
        cells = [in_digits(full * one) for one in shares]
        yield f"| {title} | {' | '.join(cells)} |"


def row(title: str, values: list[float]) -> str:
    return f"| {title} | {' | '.join(in_digits(value) if value else '-' for value in values)} |"


def in_digits(value: float) -> str:
    """Return a rate to about three digits, as the published rows are worth."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def main() -> None:
    page_part.show(PAGE, "tables", "\n".join(tables()))


if __name__ == "__main__":
    main()

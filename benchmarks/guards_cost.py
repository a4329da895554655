"""Measures what guards cost: compares checked and unchecked steps of one run with the run's own measurement.

    python benchmarks/guards_cost.py [--page docs/measurements/guards-cost.md] [--steps 60]

Ranks on this machine train a GPT. In the first run of each size every second step is checked,
so checked and unchecked steps alternate. The cost is the median difference between a checked step and the mean of its
two neighbours, each timed from its beginning to that of the next step. The second run has the default,
`interval: auto`, and logs what it measured itself and how often it will check. In a third run no step is
checked, and what the guards do in every step is timed (`guards_every_step.py`): it grows with the number of tensors,
not with their size. The share is the cost of one check and of what is done in the steps until the next, divided by the
time of these steps; "run says" leaves out what is done in every step. Other programs shared the two cores, so
differences of a few milliseconds are noise.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from defect_matrix import train, write
from guards_every_step import EVERY_SECOND, FILE, UNCHECKED
from ranks import prepare_corpus

from bigsci_launch.runs.events import read_events
from bigsci_launch.runs.layout import AttemptDir, read_json
from bigsci_launch.topology import Topology

WARM_UP = 4
AIM = 0.005


@dataclass(frozen=True, slots=True)
class Size:
    """A model, and the ranks that train it."""

    topology: Topology
    hidden: int
    layers: int
    vocabulary: int
    samples: int
    precision: str
    heads: int = 4
    length: int = 64
    micro_batch: int = 4
    device: str = "auto"

    @property
    def words(self) -> str:
        return f"{self.layers} x {self.hidden}, vocabulary {self.vocabulary}, {self.precision}, {self.topology}"


SIZES = (
    Size(Topology(tp=1, pp=2, dp=1), 64, 4, 512, 16, "bf16"),
    Size(Topology(tp=1, pp=2, dp=1), 256, 4, 4096, 16, "fp32"),
    Size(Topology(tp=2, pp=1, dp=1), 256, 4, 4096, 16, "fp32"),
    Size(Topology(tp=2, pp=2, dp=1), 128, 4, 2048, 16, "fp32"),
    Size(Topology(tp=1, pp=2, dp=1), 512, 6, 4096, 32, "fp32"),
)


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds of an unchecked step, of a check (measured here and by the run) and of what guards do in every step;
    and the steps per check."""

    plain_ms: float
    measured_ms: float
    said_ms: float
    said_share: float
    interval: int
    every_ms: float

    @property
    def share(self) -> float:
        return (self.measured_ms / self.interval + self.every_ms) / self.plain_ms


def sections(size: Size, corpus: Path, num_steps: int, name: str) -> dict[str, Any]:
    """Return the run file of a size."""
    return {
        "run": {"name": name},
        "parallelism": {
            "tensor_parallel_size": size.topology.tp,
            "pipeline_parallel_size": size.topology.pp,
            "data_parallel_size": size.topology.dp,
        },
        "model": {
            "num_layers": size.layers,
            "hidden_size": size.hidden,
            "num_attention_heads": size.heads,
            "sequence_length": size.length,
            "vocab_size": size.vocabulary,
        },
        "training": {
            "steps": num_steps,
            "micro_batch_size": size.micro_batch,
            "global_batch_size": size.samples,
            "precision": size.precision,
            "device": size.device,
        },
        "data": {"prefix": str(corpus)},
        "guards": {"interval": "auto"},
    }


def step_seconds(attempt: AttemptDir) -> dict[int, float]:
    """Return the seconds from the beginning of each step to that of the next, guards included, on rank 0."""
    records = read_events(attempt.event_file(0))
    begins = [record for record in records if record["kind"] == "heartbeat" and record["phase"] == "step"]
    return {one["step"]: other["mono"] - one["mono"] for one, other in pairwise(begins)}


def differences(seconds: Mapping[int, float]) -> list[float]:
    """Return by how much each even step took longer than the mean of its two neighbours."""
    return [
        seconds[step] - (seconds[step - 1] + seconds[step + 1]) / 2
        for step in seconds
        if step % 2 == 0 and {step - 1, step + 1} <= seconds.keys()
    ]


def measure(folder: Path, size: Size, corpus: Path, num_steps: int) -> Cost:
    """Train both runs of a size on the same ranks and return the cost."""
    every_second = write(folder / EVERY_SECOND, sections(size, corpus, num_steps, EVERY_SECOND))
    chosen = write(folder / "auto", sections(size, corpus, 8, "auto"))
    unchecked = write(folder / UNCHECKED, sections(size, corpus, 24, UNCHECKED))
    train([every_second, chosen, unchecked], folder, size.topology.world_size, "guards_every_step")
    seconds = {step: value for step, value in step_seconds(every_second).items() if step > WARM_UP}
    files = sorted(chosen.events.glob("*.jsonl"))
    said = [record for file in files for record in read_events(file) if record["kind"] == "guards"][-1]
    return Cost(
        plain_ms=1e3 * median(value for step, value in seconds.items() if step % 2),
        measured_ms=1e3 * median(differences(seconds)),
        said_ms=1e3 * said["seconds"],
        said_share=said["share"],
        interval=said["interval"],
        every_ms=median(ms for step, ms in read_json(unchecked.path / FILE).items() if WARM_UP < int(step) < 24),
    )


def row(size: Size, cost: Cost) -> str:
    cells = [
        size.words,
        f"{cost.plain_ms:.0f}",
        f"{cost.measured_ms:.1f}",
        f"{cost.said_ms:.1f}",
        f"{cost.interval}",
        f"{cost.every_ms:.2f}",
        f"{cost.share:.2%}",
        f"{cost.said_share:.2%}",
    ]
    return f"| {' | '.join(cells)} |"


def page(rows: list[str]) -> str:
    """Return the table as Markdown."""
    lines = [
        "<!-- Made by `python benchmarks/guards_cost.py --page docs/measurements/guards-cost.md`. -->",
        "",
        "# What guards cost",
        "",
        *(__doc__ or "").split("\n\n")[2].strip().split("\n"),
        "",
        "| model and ranks | step, ms | check, ms | run says, ms | every N steps | every step, ms | share | run says |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="steps of the run that checks every second one")
    parser.add_argument("--only", type=int, nargs="+", help="indices of the sizes to measure, from 0 (default: all)")
    parser.add_argument("--page", type=Path, help="write the page to this file (default: print it)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder, costs = Path(temporary), []
        corpus = folder / "corpus"
        prepare_corpus(corpus, 500)
        sizes = [SIZES[number] for number in options.only] if options.only else SIZES
        for number, size in enumerate(sizes):
            (folder / str(number)).mkdir()
            costs.append(measure(folder / str(number), size, corpus, options.steps))
            print(row(size, costs[-1]), file=sys.stderr, flush=True)
        text = page([row(size, cost) for size, cost in zip(sizes, costs, strict=True)])
    if options.page:
        options.page.write_text(text)
    else:
        print(text)
    if any(cost.share > AIM for cost in costs):
        sys.exit(f"a share is above {AIM:.1%}")


if __name__ == "__main__":
    main()

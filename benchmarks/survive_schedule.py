"""Compares the simulated 1F1B schedule with steps of `bsl train` on gloo ranks, for uneven cuts of the layers.

    python benchmarks/survive_schedule.py [--page docs/measurements/survive-schedule.md] [--steps 6]

Two kinds of stages, because this machine may have fewer cores than stages:

- *waiting* stages, up to four of them: every layer sleeps for a known time in its forward and in its backward pass, as
  a host does that waits for its GPU. The engine, its messages and its schedule are real; nothing is fitted.
- *computing* stages, two of them, one core each: the seconds of a layer, of embedding and head, and of the rest of a
  step are taken from four runs of two ranks without a pipeline (two depths, two numbers of micro batches), and no run
  with a pipeline is fitted. Forward passes are one third of a layer's time.

The error is the simulated step relative to the median of the measured ones, without the first two.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from defect_matrix import LIMIT_S, write
from guards_cost import step_seconds
from ranks import prepare_corpus, require_success, start_ranks

from bigsci_launch.plan.survive.schedule import StageTime, simulate_step
from bigsci_launch.runs.layout import AttemptDir

WAIT = StageTime(forward=0.03, backward=0.06)
WAIT_VARIABLE = "SURVIVE_SCHEDULE_WAITS"
WARM_UP = 2
AIM = 0.1
VOCABULARY = 1024


@dataclass(frozen=True, slots=True)
class Case:
    """Layers of every stage, and the micro batches of a step."""

    counts: tuple[int, ...]
    num_micro_batches: int
    replicas: int = 1

    @property
    def name(self) -> str:
        cut = "-".join(map(str, self.counts))
        return f"{cut}-m{self.num_micro_batches}-dp{self.replicas}"


WAITING = tuple(
    Case(counts, num_micro_batches)
    for num_micro_batches in (3, 8)
    for counts in ((3, 3, 3, 3), (6, 2, 2, 2), (2, 2, 2, 6), (1, 5, 5, 1), (5, 1, 1, 5), (4, 3, 2, 3), (2, 4, 4, 2))
)
WAITING_OF_THREE = tuple(Case(counts, 6) for counts in ((4, 4, 4), (6, 4, 2), (2, 4, 6), (3, 7, 2), (1, 10, 1)))
COMPUTING = tuple(Case((first, 12 - first), 6) for first in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11))
COMPUTING_FEW = tuple(Case(counts, 2) for counts in ((3, 9), (6, 6), (9, 3)))
ALONE = tuple(Case((layers,), num_micro_batches, 2) for layers in (2, 10) for num_micro_batches in (2, 8))


def sections(case: Case, corpus: Path, hidden: int, num_steps: int) -> dict[str, Any]:
    """Return the run file of a case."""
    return {
        "run": {"name": "schedule"},
        "parallelism": {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": len(case.counts),
            "data_parallel_size": case.replicas,
            "partition_method": f"time:{','.join(map(str, case.counts))}",
        },
        "model": {
            "num_layers": sum(case.counts),
            "hidden_size": hidden,
            "num_attention_heads": 4,
            "sequence_length": 64,
            "vocab_size": VOCABULARY,
        },
        "training": {
            "steps": num_steps,
            "micro_batch_size": 4,
            "global_batch_size": 4 * case.num_micro_batches * case.replicas,
            "precision": "fp32",
            "activation_checkpointing": False,
        },
        "data": {"prefix": str(corpus)},
        "guards": {"interval": 1000},
    }


def measure(folder: Path, cases: Sequence[Case], hidden: int, num_steps: int, *, waits: bool) -> dict[Case, float]:
    """Train all cases, which have the same number of ranks, and return the median seconds of a step of each."""
    corpus = folder / "corpus"
    prepare_corpus(corpus, VOCABULARY)
    runs = folder / ("waiting" if waits else "computing")
    attempts = {case: write(runs / case.name, sections(case, corpus, hidden, num_steps)) for case in cases}
    (num_ranks,) = {len(case.counts) * case.replicas for case in cases}
    module = ["survive_schedule", "--ranks", *(str(attempt.path) for attempt in attempts.values())]
    more = {WAIT_VARIABLE: str(int(waits)), "OMP_NUM_THREADS": "1"}
    ranks = start_ranks(num_ranks, module, lambda rank: runs / f"{num_ranks}-rank-{rank}.log", more)
    require_success(ranks, runs / f"{num_ranks}-rank-0.log", LIMIT_S)
    return {case: _median_step(attempt) for case, attempt in attempts.items()}


def _median_step(attempt: AttemptDir) -> float:
    return median(seconds for step, seconds in step_seconds(attempt).items() if step > WARM_UP)


def run_ranks(attempts: Sequence[str]) -> None:
    """Train as one of the ranks, with layers that wait if the environment says so."""
    import several
    import torch
    from torch import Tensor

    from bigsci_launch.train.parallel.model import TransformerLayer

    if os.environ[WAIT_VARIABLE] == "1":
        import time

        class Wait(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                time.sleep(WAIT.forward)
                return x.view_as(x)

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Tensor:
                time.sleep(WAIT.backward)
                return gradient

        compute = TransformerLayer.forward
        TransformerLayer.forward = lambda layer, x: Wait.apply(compute(layer, x))
    sys.argv = ["several", *attempts]
    several.main()


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a layer and of embedding and head per micro batch, and of the rest of a step: per layer, and once."""

    layer: float
    ends: float
    layer_once: float
    once: float

    @classmethod
    def of(cls, measured: dict[Case, float]) -> Costs:
        """Solve for the costs: as many runs as unknowns."""
        rows = [
            (sum(case.counts) * case.num_micro_batches, case.num_micro_batches, sum(case.counts), 1)
            for case in measured
        ]
        return cls(*map(float, np.linalg.solve(np.array(rows, float), np.array(list(measured.values())))))

    def predict(self, case: Case) -> float:
        stages = [StageTime(count * self.layer / 3, count * self.layer * 2 / 3) for count in case.counts]
        stages[-1] = StageTime(stages[-1].forward + self.ends / 3, stages[-1].backward + self.ends * 2 / 3)
        return simulate_step(stages, case.num_micro_batches) + self.once + max(case.counts) * self.layer_once


def predict_waiting(case: Case) -> float:
    stages = [StageTime(count * WAIT.forward, count * WAIT.backward) for count in case.counts]
    return simulate_step(stages, case.num_micro_batches)


def table(measured: dict[Case, float], predicted: dict[Case, float]) -> tuple[list[str], list[float]]:
    """Return the rows of the table, and the errors."""
    lines = [
        "| layers of the stages | micro batches | simulated, s | measured, s | error |",
        "|---|---:|---:|---:|---:|",
    ]
    errors = []
    for case, seconds in measured.items():
        error = predicted[case] / seconds - 1
        errors.append(error)
        cut = ", ".join(map(str, case.counts))
        cells = (cut, f"{case.num_micro_batches}", f"{predicted[case]:.2f}", f"{seconds:.2f}", f"{error:+.1%}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines, errors


def main() -> None:
    if sys.argv[1:2] == ["--ranks"]:
        run_ranks(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        waiting = {
            **measure(folder, WAITING, 64, options.steps, waits=True),
            **measure(folder, WAITING_OF_THREE, 64, options.steps, waits=True),
        }
        costs = Costs.of(measure(folder, ALONE, 256, 2 * options.steps, waits=False))
        computing = measure(folder, (*COMPUTING, *COMPUTING_FEW), 256, 2 * options.steps, waits=False)
    parts = [f"# The simulated schedule against real steps\n\n{(__doc__ or '').strip()}\n"]
    all_errors = []
    for title, measured, predicted in (
        ("Stages that wait", waiting, {case: predict_waiting(case) for case in waiting}),
        ("Stages that compute", computing, {case: costs.predict(case) for case in computing}),
    ):
        lines, errors = table(measured, predicted)
        all_errors += errors
        within = sum(abs(error) <= AIM for error in errors)
        worst = max(errors, key=abs)
        parts.append(f"## {title}\n\n{within} of {len(errors)} within {AIM:.0%}; the worst is {worst:+.1%}.\n")
        parts.append("\n".join(lines) + "\n")
    page = "\n".join(parts)
    print(page)
    if options.page:
        options.page.write_text(page, encoding="utf-8")
    sys.exit(any(abs(error) > AIM for error in all_errors))


if __name__ == "__main__":
    main()

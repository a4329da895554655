"""Resumes one checkpoint at other topologies, and measures how far the losses are from those of an unchanged run.

    python benchmarks/topology_change.py [--page docs/how-to/checkpoints.md]

Eight ranks (tp 2, pp 2, dp 2) train a tiny GPT and save after step 3; the same run continues to step 13. The checkpoint
is converted and trained for five steps at the other topology; then the result is converted back and trained for five
more. Losses and gradient norms are compared step by step, and `bsl diff-weights` compares every converted checkpoint
with its original.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kill_during_save import write_page
from ranks import draw_corpus, require_success, start_attempt

from bigsci_launch.checkpoints.folder import CheckpointsDir
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.runs.events import read_events
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.topology import Topology

BSL = [sys.executable, "-c", "from bigsci_launch.cli.main import main; main()"]
HOME = Topology(tp=2, pp=2, dp=2)
AWAY = ("tp=1,pp=2,dp=2", "tp=2,pp=1,dp=1", "tp=1,pp=1,dp=1", "tp=2,pp=2,dp=1")
SAVED, STEPS = 3, 5
LIMIT_S = 240
BEGIN, END = "<!-- topologies -->", "<!-- /topologies -->"


@dataclass(frozen=True, slots=True)
class Row:
    """The largest relative differences in five steps, and whether the conversion kept every bit."""

    precision: str
    before: Topology
    after: Topology
    loss: float
    norm: float
    is_equal: bool


def make_config(prefix: Path, topology: Topology, precision: str, steps: int) -> RunConfig:
    sizes = {"tensor_parallel_size": topology.tp, "pipeline_parallel_size": topology.pp}
    return RunConfig.model_validate(
        {
            "run": {"name": "topologies"},
            "parallelism": {**sizes, "data_parallel_size": topology.dp},
            "model": {
                "num_layers": 4,
                "hidden_size": 32,
                "num_attention_heads": 4,
                "sequence_length": 32,
                "vocab_size": 300,
            },
            "training": {
                "steps": 100,
                "stop_after_steps": steps,
                "micro_batch_size": 2,
                "global_batch_size": 16,
                "precision": precision,
            },
            "optimizer": {"learning_rate": 1e-3, "warmup_steps": 2, "clip_grad": 0.5},
            "data": {"prefix": str(prefix)},
        }
    )


def train(run: RunDir, prefix: Path, topology: Topology, precision: str, steps: int) -> dict[int, dict[str, Any]]:
    """Train `steps` steps, from the run's newest checkpoint if it has one, and return the records of the steps."""
    config = make_config(prefix, topology, precision, steps)
    attempt, processes = start_attempt(run, config, topology.world_size)
    require_success(processes, attempt.log_file(0), LIMIT_S)
    files = [attempt.event_file(rank) for rank in range(topology.world_size)]
    return {record["step"]: record for file in files for record in read_events(file) if record["kind"] == "step"}


def convert(run: RunDir, out: RunDir, topology: Topology) -> bool:
    """Convert the newest checkpoint of `run`; return whether `bsl diff-weights` finds the same bits."""
    folder = CheckpointsDir(run.checkpoints).folder(CheckpointsDir(run.checkpoints).latest.read_text())
    sizes = ["--tp", str(topology.tp), "--pp", str(topology.pp), "--dp", str(topology.dp)]
    call("checkpoint", "convert", str(folder), *sizes, "-o", str(out.checkpoints))
    arguments = ("diff-weights", str(folder), str(out.checkpoints / folder.name), "--exclude", "rng_*")
    done = subprocess.run([*BSL, *arguments], capture_output=True, text=True, check=False)
    return done.returncode == 0


def call(*arguments: str) -> None:
    done = subprocess.run([*BSL, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"bsl {' '.join(arguments)}: {done.stderr}")


def largest(key: str, found: dict[int, dict[str, Any]], expected: dict[int, dict[str, Any]]) -> float:
    """Return the largest relative difference of `key` in the steps of both runs."""
    return max(abs(record[key] / expected[step][key] - 1) for step, record in found.items())


def measure(folder: Path, precision: str) -> list[Row]:
    prefix = folder / "tokens"
    draw_corpus(prefix)
    home = RunDir(folder / "home")
    train(home, prefix, HOME, precision, SAVED)
    shutil.copytree(home.path, folder / "saved")
    stayed = train(home, prefix, HOME, precision, 2 * STEPS)
    rows = []
    for number, name in enumerate(AWAY):
        away, back, topology = RunDir(folder / name), RunDir(folder / f"{name}-back"), Topology.parse(name)
        is_equal = convert(RunDir(folder / "saved"), away, topology)
        rows.append(_row(precision, HOME, topology, train(away, prefix, topology, precision, STEPS), stayed, is_equal))
        if number == 0:
            is_equal = convert(away, back, HOME)
            rows.append(_row(precision, topology, HOME, train(back, prefix, HOME, precision, STEPS), stayed, is_equal))
        print(rows[-1], flush=True)
    return rows


def _row(
    precision: str,
    before: Topology,
    after: Topology,
    found: dict[int, dict[str, Any]],
    stayed: dict[int, dict[str, Any]],
    is_equal: bool,
) -> Row:
    return Row(precision, before, after, largest("loss", found, stayed), largest("grad_norm", found, stayed), is_equal)


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| precision | from | to | loss of the next 5 steps | gradient norm | converted weights and optimizer |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        kept = "every bit" if row.is_equal else "**differ**"
        lines.append(f"| {row.precision} | {row.before} | {row.after} | {row.loss:.1e} | {row.norm:.1e} | {kept} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, help="write the table into this page, between its marks")
    arguments = parser.parse_args()
    rows = []
    for precision in ("fp32", "bf16"):
        folder = Path(tempfile.mkdtemp(prefix="topologies-"))
        try:
            rows += measure(folder, precision)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    text = (
        f"The largest relative differences from a run that stays at {HOME}, measured by "
        f"`python benchmarks/topology_change.py --page docs/how-to/checkpoints.md`:\n\n{table(rows)}"
    )
    print(text)
    if arguments.page:
        write_page(arguments.page, text, BEGIN, END)
    if not all(row.is_equal for row in rows):
        raise SystemExit("a conversion did not keep every bit")


if __name__ == "__main__":
    main()

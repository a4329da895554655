"""Trains the same model on every topology and compares losses and gradient norms with one process, step by step.

    python benchmarks/parity.py [--ranks 2 4 8] [--page docs/measurements/parity.md] [--keep FOLDER]

Ranks on this machine train a tiny GPT for 50 steps, on each topology and in one process. The model has 4 layers of 64,
4 heads, and vocabulary 500 padded to 512. Gradients are clipped at 0.5, ZeRO-1 is used, and guards check every step. No
guard stops a run: tied copies, tensor-parallel copies and replicas are bitwise equal after each step. Each cell has the
largest relative difference in any step, for the loss and for the gradient norm; 0 means bitwise equal.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from defect_matrix import has_ended, train, write
from ranks import prepare_corpus

from bigsci_launch.runs.events import read_events
from bigsci_launch.runs.layout import AttemptDir, RunDir
from bigsci_launch.topology import Topology

STEPS, TOLERANCE = 50, 1e-5
TOPOLOGIES = tuple(
    Topology(tp=tp, pp=pp, dp=dp)
    for tp, pp, dp in ((2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2))
)
ALONE = Topology(tp=1, pp=1, dp=1)
RAMP = {"start": 4, "increment": 4, "samples": 240}
VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"model": {"tied_embeddings": False}},
    "recomputed": {"training": {"activation_checkpointing": True}},
    "ramp-up": {"training": {"rampup": RAMP}},
    "rotary": {"model": {"positions": "rotary", "embedding_norm": True}},
    "alibi": {"model": {"positions": "alibi"}},
    "dropout": {"model": {"dropout": 0.1}},
    "bf16": {"training": {"precision": "bf16"}},
}
FP32 = [name for name in VARIANTS if name != "bf16"]
Steps = dict[int, dict[str, Any]]


def is_run(variant: str, topology: Topology) -> bool:
    """Return whether a variant runs: dropout draws differ by stage and replica, so they are compared over tp alone."""
    return variant != "dropout" or topology.pp == topology.dp == 1


def sections(variant: str, topology: Topology, corpus: Path) -> dict[str, Any]:
    """Return the run file of a variant on a topology."""
    base: dict[str, dict[str, Any]] = {
        "run": {"name": variant},
        "parallelism": {
            "tensor_parallel_size": topology.tp,
            "pipeline_parallel_size": topology.pp,
            "data_parallel_size": topology.dp,
        },
        "model": {
            "num_layers": 4,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "sequence_length": 64,
            "vocab_size": 500,
        },
        "training": {"steps": STEPS, "micro_batch_size": 2, "global_batch_size": 16, "precision": "fp32"},
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 5, "clip_grad": 0.5},
        "data": {"prefix": str(corpus)},
        "guards": {"interval": 1},
    }
    for section, values in VARIANTS[variant].items():
        base[section] |= values
    return base


def steps_of(attempt: AttemptDir) -> Steps:
    """Return the records of all steps, from whichever rank wrote them."""
    records = (record for file in sorted(attempt.events.glob("*.jsonl")) for record in read_events(file))
    found = {record["step"]: record for record in records if record["kind"] == "step"}
    if sorted(found) != list(range(1, STEPS + 1)):
        sys.exit(f"{attempt.path}: {len(found)} steps of {STEPS}")
    return found


def apart(one: Steps, other: Steps, key: str) -> float:
    """Return the largest relative difference in any step."""
    return max(abs(other[step][key] - one[step][key]) / abs(one[step][key]) for step in one)


def shown(one: Steps, other: Steps) -> str:
    figures = [apart(one, other, key) for key in ("loss", "grad_norm")]
    return " / ".join("0" if figure == 0 else f"{figure:.1e}" for figure in figures)


def run_of(folder: Path, topology: Topology, variant: str) -> Path:
    return folder / f"tp{topology.tp}-pp{topology.pp}-dp{topology.dp}" / variant


def train_all(folder: Path, corpus: Path, topologies: list[Topology]) -> None:
    """Train the runs that do not exist yet, all runs of a topology on the same ranks."""
    for topology in topologies:
        variants = [variant for variant in VARIANTS if is_run(variant, topology)]
        attempts = [write(run_of(folder, topology, name), sections(name, topology, corpus)) for name in variants]
        if todo := [attempt for attempt in attempts if not has_ended(attempt)]:
            train(todo, run_of(folder, topology, variants[0]).parent, topology.world_size)
            print(f"trained {topology}", file=sys.stderr)


def table(folder: Path, topologies: list[Topology], variants: list[str], alone: Mapping[str, Steps]) -> Iterator[str]:
    yield f"| topology | {' | '.join(variants)} |"
    yield f"|---|{'---|' * len(variants)}"
    for topology in topologies:
        cells = [
            shown(alone[name], steps_of(RunDir(run_of(folder, topology, name)).attempt("0001")))
            if is_run(name, topology)
            else "-"
            for name in variants
        ]
        yield f"| {topology} | {' | '.join(cells)} |"


def page(folder: Path, topologies: list[Topology], ranks: list[int]) -> tuple[str, list[str]]:
    """Return the matrix as Markdown, and what is out of bounds in it."""
    alone = {name: steps_of(RunDir(run_of(folder, ALONE, name)).attempt("0001")) for name in VARIANTS}
    own = {key: apart(alone["tied"], alone["bf16"], key) for key in ("loss", "grad_norm")}
    # Each of two runs may be this far from fp32, in opposite directions.
    bounds = {key: 2 * distance for key, distance in own.items()}
    sizes = [size for size, _ in groupby(record["global_batch_size"] for record in alone["ramp-up"].values())]
    options = f"--ranks {' '.join(map(str, ranks))} --page docs/measurements/parity.md"
    lines = [f"<!-- Made by `python benchmarks/parity.py {options}`. -->", "", "# One model on every topology", ""]
    lines += (__doc__ or "").split("\n\n")[2].strip().split("\n")
    lines += [
        "",
        "## fp32",
        "",
        f"The bound is {TOLERANCE:g}. Ramp-up goes through the batch sizes {', '.join(map(str, sizes))}.",
        "`recomputed` uses activation checkpointing; `rotary` has a norm after the embeddings. Dropout masks differ",
        "by stage and replica, so dropout is compared over tp alone. All variants but `untied` have tied embeddings;",
        "all but `rotary` and `alibi` have learned positions.",
        "",
        *table(folder, topologies, FP32, alone),
        "",
        "## bf16",
        "",
        "The bound is the error of bf16 itself. It is measured with one process in bf16 and one in fp32, from the same",
        f"weights on the same data. They differ by up to {own['loss']:.1e} in loss and {own['grad_norm']:.1e} in",
        "gradient norm in the 50 steps.",
        "Two bf16 runs that err this much in opposite directions are twice as far apart:",
        f"{bounds['loss']:.1e} and {bounds['grad_norm']:.1e}.",
        "",
        *table(folder, topologies, ["bf16"], alone),
    ]
    return "\n".join(lines) + "\n", list(beyond(folder, topologies, alone, bounds))


def beyond(
    folder: Path, topologies: list[Topology], alone: Mapping[str, Steps], bounds: Mapping[str, float]
) -> Iterator[str]:
    """Yield what differs by more than its bound."""
    for topology in topologies:
        for name in (name for name in VARIANTS if is_run(name, topology)):
            steps = steps_of(RunDir(run_of(folder, topology, name)).attempt("0001"))
            for key in ("loss", "grad_norm"):
                found, bound = apart(alone[name], steps, key), TOLERANCE if name != "bf16" else bounds[key]
                if found > bound:
                    yield f"{topology} {name}: {key} {found:.1e} apart, more than {bound:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="numbers of ranks")
    parser.add_argument("--page", type=Path, help="write the page to this file (default: print it)")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder, and do not repeat those already there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        corpus = folder / "corpus"
        prepare_corpus(corpus, 500)
        topologies = [topology for topology in TOPOLOGIES if topology.world_size in options.ranks]
        train_all(folder, corpus, [ALONE, *topologies])
        text, wrong = page(folder, topologies, options.ranks)
    if options.page:
        options.page.write_text(text)
    else:
        print(text)
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()

"""Trains with `bsl train`, with the ring and without it in turns, for `ring_cost.py`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from ranks import BSL, prepare_corpus

from bigsci_launch.runs.events import read_events
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.spy.look.ring_copies import read_ring_files

STEPS, WARM_STEPS, TURNS = 40, 8, 3
RUN: dict[str, Any] = {
    "slurm": {"site": "local"},
    "parallelism": {"tensor_parallel_size": 1, "pipeline_parallel_size": 2, "data_parallel_size": 1},
    "model": {
        "num_layers": 4,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "sequence_length": 64,
        "vocab_size": 4096,
    },
    "training": {"steps": STEPS, "micro_batch_size": 4, "global_batch_size": 16, "precision": "fp32"},
}


@dataclass(frozen=True, slots=True)
class Trained:
    """One run: its median step, and the records of rank 0 in a step; 0 if it kept none."""

    step_s: float
    records: float


def train(folder: Path, corpus: Path, ring: str) -> Trained:
    """Train once, and look at the ring of rank 0 while it does."""
    name = folder.name
    sections = {"run": {"name": name}, **RUN, "data": {"prefix": str(corpus)}, "monitor": {"ring": ring}}
    folder.mkdir()
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(sections))
    command = [sys.executable, "-c", BSL, "submit", str(file), "--local"]
    seen: list[tuple[int, int]] = []
    with (folder / "out").open("wb") as out:
        process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=subprocess.STDOUT)
        while process.poll() is None:
            seen += calls_so_far(Path(ring))
            time.sleep(0.5)
    if process.returncode:
        sys.exit((folder / "out").read_text()[-3000:])
    attempt = RunDir(folder / "runs" / name).attempt("0001")
    begins = [each for each in read_events(attempt.event_file(0)) if each["kind"] == "heartbeat"]
    steps = [other["mono"] - one["mono"] for one, other in pairwise(e for e in begins if e["phase"] == "step")]
    steady = [each for each in seen if each[0] > WARM_STEPS]
    records = (steady[-1][1] - steady[0][1]) / (steady[-1][0] - steady[0][0]) if steady else 0.0
    return Trained(median(steps[WARM_STEPS:]), records)


def calls_so_far(folder: Path) -> list[tuple[int, int]]:
    """Return (step, calls so far) of rank 0, if it has a ring by now."""
    rings = read_ring_files(folder.glob("bsl-rings-*/*rank-0000/*.ring"), 1).values() if folder.is_dir() else []
    return [(ring["step"], sum(thread["count"] for thread in ring["threads"])) for ring in rings if "threads" in ring]


def words(record_us: float) -> str:
    """Train in turns, and return what the ring is of a step."""
    found: dict[str, list[Trained]] = {"none": [], "ring": []}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        prepare_corpus(folder / "corpus", 500)
        for turn in range(TURNS):
            for way, runs in found.items():
                print(f"bsl train, turn {turn + 1} of {TURNS}: {way}", file=sys.stderr, flush=True)
                place = folder / f"{way}-{turn}"
                rings = folder / f"rings-{turn}"
                rings.mkdir(exist_ok=True)
                runs.append(train(place, folder / "corpus", str(rings) if way == "ring" else "none"))
    bare, kept = (sorted(1e3 * run.step_s for run in runs) for runs in found.values())
    records = max(run.records for run in found["ring"])
    share = records * record_us / bare[0] / 10
    return (
        f"`bsl train` of 4 layers of 256 on 2 ranks (two pipeline stages) writes {records:.0f} records in a step. "
        f"At {record_us:.2f} us each\nthey are {share:.3f} % of the fastest of these steps. The median step took "
        f"{', '.join(f'{ms:.0f}' for ms in bare)} ms without the ring in {TURNS} runs,\n"
        f"and {', '.join(f'{ms:.0f}' for ms in kept)} ms with it, in turns: other programs shared the two cores."
    )

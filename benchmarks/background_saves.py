"""Measures what a save in the background costs training, next to a save that training waits for, in one run.

    python benchmarks/background_saves.py [--ranks 1 4] [--hidden 512] [--interval 10] [--rounds 3] [--page PAGE]

Ranks on this machine (dp) train a GPT in bf16 and save every INTERVAL steps. Saves that training waits for and
saves in the background take turns. The last save of a run is left out: it is never in the background.

*Training waits* is what the save itself keeps from the steps: the seconds of a save, or those in which the files are
named and the optimizer waits for the copies. *A step takes* compares the steps during which a checkpoint is written in
the background with the others of the same run: the thread uses the cores and the disk of the ranks. *Host memory* is
the peak of the resident memory of all ranks. Seconds of saves are medians, of the slowest rank.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kill_during_save import write_page
from ranks import Process, draw_corpus, require_success, start_attempt

from bigsci_launch.checkpoints.folder import CheckpointsDir, read_record
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.runs.events import read_events
from bigsci_launch.runs.layout import AttemptDir, RunDir

LIMIT_S = 900
KINDS = ("waited for", "in the background")
BEGIN, END = "<!-- background -->", "<!-- /background -->"
_PEAK = re.compile(r"VmHWM:\s+(\d+) kB")


def make_config(prefix: Path, hidden: int, ranks: int, interval: int, kind: str) -> RunConfig:
    save = {"save_interval": interval, "keep_last": 1, "background": kind == KINDS[1]}
    return RunConfig.model_validate(
        {
            "run": {"name": "background"},
            "parallelism": {"data_parallel_size": ranks},
            "model": {
                "num_layers": 8,
                "hidden_size": hidden,
                "num_attention_heads": 8,
                "sequence_length": 64,
                "vocab_size": 8192,
            },
            "training": {
                "steps": 9 * interval // 2,
                "micro_batch_size": 2,
                "global_batch_size": 2 * ranks,
                "precision": "bf16",
            },
            "data": {"prefix": str(prefix)},
            "checkpoint": save,
        }
    )


@dataclass(frozen=True, slots=True)
class Seen:
    """One run: seconds of its saves and of its steps, those during a save in the background apart; its memory."""

    saves: tuple[float, ...]
    waits: tuple[float, ...]
    steps: tuple[float, ...]
    steps_during: tuple[float, ...]
    peak_bytes: int


def train(run: RunDir, config: RunConfig, ranks: int) -> Seen:
    attempt, processes = start_attempt(run, config, ranks)
    peaks = [0] * ranks
    while any(process.poll() is None for process in processes):
        peaks = [max(before, peak(process)) for before, process in zip(peaks, processes, strict=True)]
        time.sleep(0.1)
    require_success(processes, attempt.log_file(0), LIMIT_S)
    records = [list(read_events(attempt.event_file(rank))) for rank in range(ranks)]
    saves = [slowest(records, step, "seconds") for step in saved_steps(attempt)]
    waits = [slowest(records, step, "stalled_s") for step in saved_steps(attempt)]
    return Seen(tuple(saves), tuple(waits), *step_seconds(records), sum(peaks))


def step_seconds(records: Sequence[Sequence[dict[str, Any]]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the seconds of the steps after the first two: those without and those with a save in the background."""
    begun = {each["step"]: each["mono"] for each in records[0] if each.get("phase") == "copy"}
    saved = {each["step"]: each["seconds"] for each in records[0] if each["kind"] == "save" and "stalled_s" in each}
    # A save that begins while the one before is still written waits for it, and is not one in the background.
    saved = {step: seconds for step, seconds in saved.items() if step in begun}
    spans = [(begun[step], begun[step] + seconds) for step, seconds in saved.items()]
    found: tuple[list[float], list[float]] = [], []
    for each in (each for of_rank in records for each in of_rank if each["kind"] == "step" and each["step"] > 2):
        first = each["mono"] - each["seconds"]
        found[any(first < end and each["mono"] > begin for begin, end in spans)].append(each["seconds"])
    return tuple(found[0]), tuple(found[1])


def peak(process: Process) -> int:
    """Return the peak of the resident memory of a process in bytes, 0 once it has ended."""
    try:
        match = _PEAK.search(Path(f"/proc/{process.pid}/status").read_text())
    except OSError:
        return 0
    return int(match[1]) << 10 if match else 0


def saved_steps(attempt: AttemptDir) -> list[int]:
    saves = [each["step"] for each in read_events(attempt.event_file(0)) if each["kind"] == "save"]
    return saves[:-1]


def slowest(records: Sequence[Sequence[dict[str, Any]]], step: int, key: str) -> float:
    """Return a figure of the save after `step`: without `stalled_s`, training has waited for all of it."""
    saves = [each for of_rank in records for each in of_rank if each["kind"] == "save" and each["step"] == step]
    return max(each.get(key, each["seconds"]) for each in saves)


def measure(folder: Path, hidden: int, ranks: int, interval: int, rounds: int) -> str:
    """Return a row of the table."""
    prefix = folder / "tokens"
    if not prefix.with_suffix(".idx").exists():
        draw_corpus(prefix)
    found: dict[str, list[Seen]] = {kind: [] for kind in KINDS}
    for number in range(rounds):
        for kind in KINDS:
            run = RunDir(folder / f"{ranks}-{number}-{kind}")
            found[kind].append(train(run, make_config(prefix, hidden, ranks, interval, kind), ranks))
            print(ranks, kind, found[kind][-1], flush=True)
            checkpoints = CheckpointsDir(run.checkpoints)
            num_bytes = sum(read_record(checkpoints.folder(checkpoints.tags()[-1])).files.values())
            shutil.rmtree(run.path)
    waited, background = (found[kind] for kind in KINDS)
    seconds = statistics.median(each for seen in waited for each in seen.saves)
    waits = statistics.median(each for seen in background for each in seen.waits)
    total = statistics.median(each for seen in background for each in seen.saves)
    slower = [statistics.median(seen.steps_during) / statistics.median(seen.steps) for seen in background]
    cells = (
        ranks,
        f"{num_bytes / 2**20:.0f} MiB",
        f"{seconds:.2f} s",
        f"{waits * 1000:.0f} ms, {100 * waits / seconds:.1f} %",
        f"{100 * max(each for seen in background for each in seen.waits) / seconds:.1f} %",
        f"{total:.2f} s",
        f"{statistics.median(slower):.2f}x as long",
        ", ".join(f"{max(seen.peak_bytes for seen in each) / 2**30:.2f} GiB" for each in (waited, background)),
    )
    return "| " + " | ".join(map(str, cells)) + " |"


HEADER = (
    "| ranks | checkpoint | a save that training waits for | in the background, training waits | at most | "
    "until it is committed | a step takes | host memory: waited for, in the background |"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--hidden", type=int, default=512, help="hidden size; the checkpoint grows with its square")
    parser.add_argument("--interval", type=int, default=10, help="steps between two saves, more where steps are short")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind")
    parser.add_argument("--page", type=Path, help="write the table into this page, between its marks")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="background-", dir=os.environ.get("TMPDIR")))
    try:
        rows = [
            measure(folder, arguments.hidden, ranks, arguments.interval, arguments.rounds) for ranks in arguments.ranks
        ]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    text = "\n".join([HEADER, "|" + "---|" * 8, *rows])
    print(text)
    if arguments.page:
        write_page(arguments.page, text, BEGIN, END)


if __name__ == "__main__":
    main()

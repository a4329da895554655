"""Times saving and loading a checkpoint of about a gigabyte, and the disk itself with the same bytes, in one run.

    python benchmarks/save_load.py [--hidden 768] [--page docs/how-to/checkpoints.md]

Two ranks (dp 2) train a GPT in bf16 for three steps, save each of them, and resume. For the disk's own time, as many
threads as ranks write the same files from memory and sync them, then read them after they were dropped from the cache.
A save includes the digests of every file and tensor, the record, the rename and both pointers. A load includes AdamW's
state, but not the guards' check that follows. Figures are medians of three saves and three loads.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kill_during_save import RANKS, write_page
from ranks import draw_corpus, require_success, start_attempt

from bigsci_launch.checkpoints.folder import CheckpointsDir, read_record
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.runs.events import read_events
from bigsci_launch.runs.layout import AttemptDir, RunDir

TIMES = 3
LIMIT_S = 500
BEGIN, END = "<!-- disk -->", "<!-- /disk -->"


def make_config(prefix: Path, hidden: int, steps: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "disk"},
            "parallelism": {"data_parallel_size": RANKS},
            "model": {
                "num_layers": 8,
                "hidden_size": hidden,
                "num_attention_heads": 8,
                "sequence_length": 16,
                "vocab_size": 8192,
            },
            "training": {"steps": steps, "micro_batch_size": 1, "global_batch_size": RANKS, "precision": "bf16"},
            "data": {"prefix": str(prefix)},
            "checkpoint": {"save_interval": 1, "keep_last": 1},
        }
    )


def train(run: RunDir, config: RunConfig) -> AttemptDir:
    attempt, processes = start_attempt(run, config, RANKS)
    require_success(processes, attempt.log_file(0), LIMIT_S)
    return attempt


def save_seconds(attempt: AttemptDir) -> list[float]:
    return [record["seconds"] for record in read_events(attempt.event_file(0)) if record["kind"] == "save"]


def load_seconds(attempt: AttemptDir) -> float:
    """Return the seconds that loading the engine's state took on the slowest rank."""
    found = []
    for rank in range(RANKS):
        records = list(read_events(attempt.event_file(rank)))
        end = next(number for number, record in enumerate(records) if record["kind"] == "load")
        begin = [record for record in records[:end] if record.get("phase") == "load"][-1]
        found.append(records[end]["time"] - begin["time"])
    return max(found)


def drop_from_cache(paths: Sequence[Path]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def timed(work: Callable[[Path], None], paths: Sequence[Path]) -> float:
    """Return the seconds of `work` on all paths, with as many threads as there were ranks."""
    started = time.monotonic()
    with ThreadPoolExecutor(RANKS) as pool:
        list(pool.map(work, paths))
    return time.monotonic() - started


def write_seconds(files: Sequence[Path], folder: Path) -> float:
    """Write and sync the bytes of `files`, held in memory, into `folder`."""
    folder.mkdir()
    contents = {folder / path.name: path.read_bytes() for path in files}

    def write(path: Path) -> None:
        with path.open("wb") as stream:
            stream.write(contents[path])
            stream.flush()
            os.fsync(stream.fileno())

    seconds = timed(write, sorted(contents, key=lambda path: -len(contents[path])))
    shutil.rmtree(folder)
    return seconds


def read_seconds(files: Sequence[Path]) -> float:
    drop_from_cache(files)
    return timed(lambda path: _read(path), files)


def _read(path: Path) -> None:
    with path.open("rb", buffering=0) as stream:
        while stream.read(8 << 20):
            pass


def measure(folder: Path, hidden: int) -> str:
    prefix, run = folder / "tokens", RunDir(folder / "run")
    draw_corpus(prefix)
    saves, loads, writes, reads = [], [], [], []
    saves += save_seconds(train(run, make_config(prefix, hidden, TIMES)))
    for number in range(TIMES):
        newest = CheckpointsDir(run.checkpoints).folder(CheckpointsDir(run.checkpoints).tags()[-1])
        files = [newest / name for name in read_record(newest).files]
        num_bytes = sum(path.stat().st_size for path in files)
        writes.append(write_seconds(files, folder / "written"))
        reads.append(read_seconds(files))
        drop_from_cache(files)
        attempt = train(run, make_config(prefix, hidden, TIMES + 1 + number))
        loads.append(load_seconds(attempt))
        saves += save_seconds(attempt)
    rows = [
        ("save", statistics.median(saves), "write and sync", statistics.median(writes)),
        ("load", statistics.median(loads), "read", statistics.median(reads)),
    ]
    lines = [
        "## What a save and a load cost",
        "",
        f"Two ranks saved and loaded a checkpoint of {num_bytes / 2**20:.0f} MiB in {len(files)} files on one disk",
        "(`python benchmarks/save_load.py --page docs/how-to/checkpoints.md`). A save reads every file again for its",
        "digest. A load copies what it has read into masters, moments and weights.",
        "",
        "| | seconds | the disk's own | seconds | ratio |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {ours} | {a:.2f} | {disk} | {b:.2f} | {a / b:.2f} |" for ours, a, disk, b in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=768, help="hidden size; the checkpoint grows with its square")
    parser.add_argument("--page", type=Path, help="write the table into this page, between its marks")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="save-load-", dir=os.environ.get("TMPDIR")))
    try:
        text = measure(folder, arguments.hidden)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(text)
    if arguments.page:
        write_page(arguments.page, text, BEGIN, END)


if __name__ == "__main__":
    main()

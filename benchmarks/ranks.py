"""Runs ranks of `bsl train` on this machine for benchmarks: makes their data, starts them, waits for their end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from bigsci_launch.config.load import dump_resolved
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.data.indexed import IndexedWriter
from bigsci_launch.runs.layout import AttemptDir, RunDir

BSL = "from bigsci_launch.cli.main import main; main()"
SOURCE = Path(__file__).resolve().parents[1] / "bigsci_launch"
Process = subprocess.Popen[bytes]


def prepare_corpus(prefix: Path, vocab_size: int) -> None:
    """Make a dataset of this project's source code, unless it exists."""
    if not prefix.with_suffix(".idx").exists():
        arguments = ["data", "prepare", str(SOURCE), "--output", str(prefix), "--glob", "*.py"]
        command = [sys.executable, "-c", BSL, *arguments, "--vocab-size", str(vocab_size)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def draw_corpus(prefix: Path) -> None:
    """Make a dataset of 20,000 random tokens below 300."""
    draw = np.random.default_rng(0)
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        writer.add_document(draw.integers(300, size=20_000))


def start_attempt(run: RunDir, config: RunConfig, num_ranks: int) -> tuple[AttemptDir, list[Process]]:
    """Start the ranks of the next attempt of a run."""
    attempt = run.attempt(run.next_attempt_name())
    attempt.make()
    attempt.config.write_text(dump_resolved(config))
    place = {"BSL_RUN_DIR": str(run.path), "BSL_ATTEMPT": attempt.name}
    return attempt, start_ranks(num_ranks, ["bigsci_launch.train"], attempt.log_file, place)


def free_port() -> int:
    """Return a port at which ranks can meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def start_ranks(
    num_ranks: int,
    module: Sequence[str],
    log_of: Callable[[int], Path],
    more: Mapping[str, str],
    stdin: int | None = None,
    homes: Sequence[Sequence[str]] | None = None,
) -> list[Process]:
    """Start `python -m MODULE ARGUMENTS...` as `num_ranks` ranks, each with a log and `more` in its environment, and
    after the words in `homes`, if there are any."""
    here = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    shared = {
        "PYTHONPATH": here,
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        **more,
    }
    processes = []
    for rank in range(num_ranks):
        environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with log_of(rank).open("wb") as log:
            command = [*(homes[rank] if homes is not None else ()), sys.executable, "-m", *module]
            processes.append(
                subprocess.Popen(command, env=environment, stdin=stdin, stdout=log, stderr=subprocess.STDOUT)
            )
    return processes


def require_success(processes: Sequence[Process], log: Path, timeout_s: float) -> None:
    """Wait for all ranks; if one failed, exit and show the end of `log`."""
    try:
        codes = [process.wait(timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(code not in (0, -signal.SIGABRT) for code in codes):
        sys.exit(f"ranks ended with {codes}:\n{log.read_text()[-3000:]}")

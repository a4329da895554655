"""Runs `tests/gpu`; the test that fills the card runs alone, after the others.

On a CPU, the tests that need no property of a card run there, to find mistakes in the tests themselves.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from on_gpu.card import Card
from on_gpu.record import Record, run_phase

ROOT = Path(__file__).resolve().parents[2]
FILLS_THE_CARD = "out_of_memory"
TINY = "wrong_step or trains_over_nccl"
"""The tests that a tiny session runs: one that trains, and one that must be stopped."""
LIMIT_S = 100
POLL_S = 0.2


def run(record: Record, card: Card) -> None:
    """Run the tests side by side where pytest-xdist is installed."""
    if card.is_tiny:
        _pytest(record, card, TINY, ())
        return
    workers = ("-n", "8") if importlib.util.find_spec("xdist") else ()
    _pytest(record, card, f"not {FILLS_THE_CARD}", workers)
    _pytest(record, card, FILLS_THE_CARD, ())


def _pytest(record: Record, card: Card, chosen: str, more: Sequence[str]) -> None:
    """Run the tests that `-k` chooses, and record each when it has ended."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.jsonl"
        report.touch()
        # Another pytest than ours, with other plugins: their warnings are no failures of these tests.
        options = ["-q", "-p", "no:cacheprovider", "-o", "filterwarnings=default", "-o", f"timeout={LIMIT_S}"]
        command = [sys.executable, "-m", "pytest", "tests/gpu", "-k", chosen, "-p", "on_gpu.test_report"]
        environment = {**os.environ, "TEST_REPORT": str(report), **({} if card.is_gpu else {"BSL_GPU_TESTS_ON": "cpu"})}
        process = subprocess.Popen([*command, *options, *more], cwd=ROOT, env=environment)
        noted: set[str] = set()
        with report.open() as stream:
            while process.poll() is None:
                time.sleep(POLL_S)
                _note(record, noted, stream.readlines())
            _note(record, noted, stream.readlines())
    sound = process.returncode in (0, 1) and bool(noted)
    record.check(f"pytest -k {chosen!r} came to its end", sound, f"{len(noted)} tests, exit code {process.returncode}")


def _note(record: Record, noted: set[str], lines: Sequence[str]) -> None:
    """Record tests that have ended; a skipped one is a row with its reason."""
    for line in lines:
        # On a card each result of pytest-xdist was reported twice.
        if line in noted:
            continue
        noted.add(line)
        row = json.loads(line)
        record.row(**row)
        if row["state"] != "skipped":
            record.check(row["test"], row["state"] == "passed", row["words"])


if __name__ == "__main__":
    run_phase(run)

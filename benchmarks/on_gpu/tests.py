"""Runs `tests/gpu`; the test that fills the card runs alone, after the others.

On a CPU, the tests that need no property of a card run there, to find mistakes in the tests themselves.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from pathlib import Path

from on_gpu.card import Card
from on_gpu.record import Record, run_phase

ROOT = Path(__file__).resolve().parents[2]
FILLS_THE_CARD = "out_of_memory"
TINY = "wrong_step or trains_over_nccl"
"""The tests that a tiny session runs: one that trains, and one that must be stopped."""
LIMIT_S = 60


def run(record: Record, card: Card) -> None:
    """Run the tests side by side where pytest-xdist is installed."""
    if card.is_tiny:
        _pytest(record, card, TINY, ())
        return
    workers = ("-n", "6") if importlib.util.find_spec("xdist") else ()
    _pytest(record, card, f"not {FILLS_THE_CARD}", workers)
    _pytest(record, card, FILLS_THE_CARD, ())


def _pytest(record: Record, card: Card, chosen: str, more: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # Another pytest than ours, with other plugins: their warnings are no failures of these tests.
        options = ["-q", "-p", "no:cacheprovider", "-o", "filterwarnings=default", "-o", f"timeout={LIMIT_S}"]
        command = [sys.executable, "-m", "pytest", "tests/gpu", "-k", chosen, *options, *more, f"--junit-xml={report}"]
        environment = os.environ if card.is_gpu else {**os.environ, "BSL_GPU_TESTS_ON": "cpu"}
        code = subprocess.run(command, cwd=ROOT, env=environment).returncode
        cases = list(_cases(report)) if report.exists() else []
    record.check(f"pytest -k {chosen!r} came to its end", code in (0, 1) and bool(cases), f"exit code {code}")
    for name, state, words, seconds in cases:
        record.row(test=name, state=state, words=words, seconds=seconds)
        if state != "skipped":
            record.check(name, state == "passed", words)


def _cases(report: Path) -> Iterator[tuple[str, str, str, float]]:
    """Yield name, state, words and seconds of each test."""
    for case in ElementTree.parse(report).iter("testcase"):
        bad = next((each for each in case if each.tag in ("failure", "error", "skipped")), None)
        state = "passed" if bad is None else "skipped" if bad.tag == "skipped" else "failed"
        words = "" if bad is None else (bad.get("message") or "").strip()[:600]
        yield case.get("name", ""), state, words, float(case.get("time", 0))


if __name__ == "__main__":
    run_phase(run)

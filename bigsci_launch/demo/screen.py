"""The last screen of the demonstration: its results, and commands to try next."""

from __future__ import annotations

import shutil
import sys
import textwrap
from pathlib import Path
from shlex import quote

from bigsci_launch.content import packaged
from bigsci_launch.demo.folder import STOPPED, UNDISTURBED
from bigsci_launch.demo.story import FAULTY_RANK, FAULTY_STEP, NUM_STEPS, DemoResult


def last_screen(result: DemoResult, folder: Path) -> str:
    """Return the screen as plain text, at most 100 columns wide apart from the output of other commands."""
    runs, big = folder / "runs", quote(_run_file("bloom-176b.yaml"))
    return "\n".join(
        [
            "",
            f"Shown on this machine in {result.seconds:.0f} s:",
            "",
            f"  1  Corpus: {result.corpus_tokens}",
            f"  2  A GPT trained {NUM_STEPS} steps on 8 ranks (tp2 x pp2 x dp2, bf16, ZeRO-1, tied embeddings):",
            f"     loss {result.losses[0]:.4f} -> {result.losses[-1]:.4f}",
            f"  3  Stopped after step {result.stopped_at} and resumed: all {NUM_STEPS} losses are bitwise equal.",
            f"     bsl diff-weights: {result.diff_sentence}",
            f"  4  Rank {FAULTY_RANK} skipped a collective in step {FAULTY_STEP} and the job hung. bsl spy:",
            "",
            textwrap.indent(result.spy_report, "     | "),
            "",
            "Try next:",
            "",
            *_activation(),
            f"  BSL_RUNS={quote(str(runs))} bsl list",
            f"  bsl status {quote(str(runs / STOPPED))}",
            f"  bsl logs {quote(str(runs / UNDISTURBED))} --rank 4",
            f"  bsl plan {big}          plans a 176B model on 48 nodes, without a cluster",
            f"  bsl submit {big} --dry-run",
            "",
            f"Every command and its output: {folder / 'demo.log'}",
        ]
    )


def _run_file(name: str) -> str:
    """Return a shipped run file as a person types it: in a clone, its short path."""
    here = Path("configs", name)
    return str(here if here.is_file() else packaged("configs", name))


def _activation() -> list[str]:
    """Return the command that puts `bsl` on the path, unless it is there already."""
    activate = Path(sys.executable).parent / "activate"
    return [f"  source {quote(str(activate))}"] if shutil.which("bsl") is None and activate.is_file() else []

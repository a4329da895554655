"""Runs `bsl spy` on a reproduction, as a user would: another process, which knows nothing of the laboratory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bigsci_launch.errors import LabError

TIMEOUT_S = 120.0


def spy(run: Path, *options: str) -> dict[str, Any]:
    """The document of `bsl spy RUN --json`.

    Raises:
        LabError: it gives no answer, or none that is a document.
    """
    argv = spy_argv(run, ["--json", *options])
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise LabError(f"bsl spy gave no answer in {TIMEOUT_S:.0f} s") from None
    try:
        document: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        last_words = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise LabError(f"bsl spy ended with {done.returncode}: {last_words[0]}") from error
    return document


def spy_argv(run: Path, options: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "bigsci_launch", "spy", str(run), *options]

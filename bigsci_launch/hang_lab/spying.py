"""Runs `bsl spy` on a reproduction as a user would: in a separate process that knows nothing about the hang lab."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bigsci_launch.content import module_argv
from bigsci_launch.errors import LabError
from bigsci_launch.safe_files import parse_json

TIMEOUT_S = 120.0


def spy(run: Path, *options: str) -> dict[str, Any]:
    """Return the document of `bsl spy RUN --json`.

    Raises:
        LabError: it gives no answer, or its answer is not a JSON document.
    """
    argv = spy_argv(run, ["--json", *options])
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise LabError(f"bsl spy gave no answer in {TIMEOUT_S:.0f} s") from None
    try:
        document: dict[str, Any] = parse_json(done.stdout)
    except ValueError as error:
        last_words = done.stderr.strip().splitlines()[-1:] or ["no error output"]
        raise LabError(f"bsl spy ended with exit status {done.returncode}: {last_words[0]}") from error
    return document


def spy_argv(run: Path, options: Sequence[str]) -> list[str]:
    return [*module_argv(sys.executable, "bigsci_launch"), "spy", str(run), *options]

"""`bsl` in this process, or in one of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from click.testing import CliRunner, Result

from bigsci_launch.cli.main import bsl


def invoke(*words: str) -> Result:
    return CliRunner().invoke(bsl, list(words))


def run_bsl(
    folder: Path,
    *words: str,
    rc: int | None = 0,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 300.0,
) -> subprocess.CompletedProcess[str]:
    """Run `bsl` in `folder`, and check its exit code unless `rc` is None."""
    argv = [sys.executable, "-m", "bigsci_launch", *words]
    done = subprocess.run(
        argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert rc is None or done.returncode == rc, (done.returncode, done.stdout, done.stderr)
    return done

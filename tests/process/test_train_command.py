"""`bsl train` before it knows its rank: every refusal is fast, clear, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.texts import CheckText

PLACE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29000"}


def bsl_train(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bigsci_launch", "train", *options],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_every_missing_variable_is_named(check_text: CheckText) -> None:
    done = bsl_train(RANK="0", WORLD_SIZE="two")
    assert done.returncode == 2
    check_text(done.stderr)


def test_a_misspelt_attempt_is_not_made(tmp_path: Path) -> None:
    done = bsl_train("--run-dir", str(tmp_path / "run"), "--attempt", "0001", **PLACE)
    assert done.returncode == 2
    assert f"error: {tmp_path}/run/attempts/0001: no such attempt" in done.stderr
    assert not list(tmp_path.iterdir())


def test_an_attempt_without_config_says_so_in_its_record(tmp_path: Path) -> None:
    attempt = tmp_path / "run" / "attempts" / "0001"
    attempt.mkdir(parents=True)
    done = bsl_train("--run-dir", str(tmp_path / "run"), "--attempt", "0001", **PLACE)
    assert done.returncode == 2
    assert "config.yaml: cannot be read" in done.stderr
    assert '"type": "ConfigError"' in (attempt / "errors" / "rank-0000.json").read_text()

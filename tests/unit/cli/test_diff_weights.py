"""Options of `bsl diff-weights` that concern where it runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from bigsci_launch.cli.diff_weights import diff_weights
from bigsci_launch.content import module_argv
from bigsci_launch.scheduler import slurm

GIVEN: dict[str, list[str]] = {
    "tolerance": ["--tolerance=0.5"],
    "include": ["--include=^a b", "--include=-c"],
    "exclude": ["--exclude=x"],
    "jobs": ["--jobs=3"],
    "sample": ["--sample=1%"],
    "journal": ["--journal=j"],
    "digests": ["--digests"],
    "html": ["--html=p.html"],
    "as_json": ["--json"],
    "seam": ["--seam", "one", "two"],
}


def started(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[list[str], dict[str, Any]]:
    """Return what is run on the node, and srun's options for it."""
    found: list[tuple[list[str], dict[str, Any]]] = []

    def run_on_node(argv: Sequence[str], **options: Any) -> int:
        found.append((list(argv), options["options"]))
        return 0

    monkeypatch.setattr(slurm, "run_on_node", run_on_node)
    done = CliRunner().invoke(diff_weights, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return found[0]


def test_every_option_reaches_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = {"slurm", "site", "audit"}  # an audit has no A and B
    options = {param.name for param in diff_weights.params if isinstance(param, click.Option)} - elsewhere
    assert options == GIVEN.keys()
    words = [word for given in GIVEN.values() for word in given]
    argv, placed = started(monkeypatch, *words, "--slurm", "--", "-a", "b")
    assert argv[:4] == [*module_argv(sys.executable, "bigsci_launch"), "diff-weights"]
    assert argv[-3:] == ["--", "-a", "b"]
    assert sorted(argv[4:-3]) == sorted(words)
    assert placed == {}


def test_an_audit_can_run_on_a_node_too(monkeypatch: pytest.MonkeyPatch) -> None:
    argv, _ = started(monkeypatch, "--audit", "runs/demo", "--slurm")
    assert argv[4:] == ["--audit=runs/demo", "--"]


def test_a_site_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    _, placed = started(monkeypatch, "a", "b", "--slurm", "--site", "jean-zay-a100")
    assert placed["partition"] == "gpu_p5"
    assert placed["time"]
    command = slurm.node_argv(["x"], name="n", options={"qos": None, "account": "me"})
    assert "--account=me" in command
    assert not any(word.startswith("--qos") for word in command)


def test_without_slurm_there_is_a_clear_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bigsci_launch", "diff-weights", "a", "b", "--slurm"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": str(tmp_path)})
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("error: srun: command not found\nhint: ")

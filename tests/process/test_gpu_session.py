"""The session for a card: it runs on a CPU in tiny sizes, and whatever breaks in a phase is in that phase's JSON."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
PHASES = ("speed", "peer", "tests", "hangs", "memory", "micro_batches", "survive", "cost", "kernels")

PRELUDE = """
import sys, time
from on_gpu.record import run_phase
def run(record, card):
    record.row(before="it broke")
    record.check("it holds", True)
"""


@pytest.mark.long  # a minute and a half: whoever changes a phase runs it, and so does a session on a card
@pytest.mark.torch
def test_every_phase_passes_on_a_cpu(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", str(BENCHMARKS / "gpu_session.sh"), str(tmp_path), "--tiny"],
        env={**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    found = {phase: document(tmp_path, phase) for phase in PHASES}
    assert {phase: (each["state"], each["why"]) for phase, each in found.items()} == dict.fromkeys(
        PHASES, ("passed", "")
    ), done.stdout
    assert done.returncode == 0
    assert all(each["checks"] and each["rows"] and each["card"]["device"] == "cpu" for each in found.values())
    assert all((tmp_path / f"{phase}.log").exists() for phase in PHASES)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("broken", "state", "why"),
    [
        pytest.param("    record.check('it fails', False, 'seen')\n", "failed", "it fails", marks=pytest.mark.long),
        ("    raise ValueError('the cause')\n", "crashed", "the cause"),
        ("    time.sleep(600)\n", "cut short", "after"),
        pytest.param("    sys.exit(0)\n", "crashed", "exit code 0", marks=pytest.mark.long),
    ],
)
def test_a_broken_phase_keeps_what_it_had(broken: str, state: str, why: str, tmp_path: Path) -> None:
    found, code = run_broken(PRELUDE + broken + "run_phase(run)\n", tmp_path, limit_s=10 if why == "after" else 50)
    assert (found["state"], code) == (state, 1) and why in found["why"]
    assert found["rows"] == [{"before": "it broke"}]
    assert [each["name"] for each in found["checks"] if each["passed"]] == ["it holds"]


@pytest.mark.torch
def test_a_phase_that_checks_nothing_has_not_passed(tmp_path: Path) -> None:
    program = PRELUDE.replace('    record.check("it holds", True)\n', "") + "run_phase(run)\n"
    found, code = run_broken(program, tmp_path)
    assert (found["state"], found["why"], code) == ("failed", "nothing was checked", 1)


def run_broken(program: str, folder: Path, limit_s: int = 50) -> tuple[dict[str, Any], int]:
    """Run a session whose phase `speed` is this program."""
    copy = folder / "benchmarks"
    (copy / "on_gpu").mkdir(parents=True)
    for name in ("__init__.py", "card.py", "record.py"):
        shutil.copy(BENCHMARKS / "on_gpu" / name, copy / "on_gpu" / name)
    session = (BENCHMARKS / "gpu_session.py").read_text()
    assert 'Phase("speed", 150)' in session
    (copy / "gpu_session.py").write_text(session.replace('Phase("speed", 150)', f'Phase("speed", {limit_s})'))
    (copy / "on_gpu" / "speed.py").write_text(program)
    command = [sys.executable, str(copy / "gpu_session.py"), str(folder / "out"), "--only", "speed"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": f"{ROOT}:{copy}"}, timeout=300)
    return document(folder / "out", "speed"), done.returncode


def document(folder: Path, phase: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{phase}.json").read_text())
    return found

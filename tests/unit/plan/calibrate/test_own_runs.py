"""Runs of `bsl train` calibrate by themselves, if they ran on the GPUs of the site."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from bigsci_launch.cli.main import bsl
from bigsci_launch.config.load import dump_resolved, load_run
from bigsci_launch.plan.calibrate.own_runs import calibrate_on_runs
from bigsci_launch.plan.price.calibration import UNCALIBRATED_BAND
from bigsci_launch.plan.price.hardware import A100
from bigsci_launch.runs.layout import AttemptDir, RunDir, write_json
from tests.support.texts import has_parts

WriteRun = Callable[..., RunDir]


@pytest.fixture
def site(tmp_path: Path, root: Path) -> Path:
    """A site like Jean Zay's of 2022 that nobody has calibrated."""
    text = (root / "slurm/sites/jean-zay-a100-2022.yaml").read_text()
    path = tmp_path / "uncalibrated.yaml"
    path.write_text(re.sub(r"(?m)^calibration:.*\n", "", text))
    return path


@pytest.fixture
def write_run(tmp_path: Path, root: Path, site: Path) -> WriteRun:
    """Writes the directory of a run as its ranks do: BLOOM, one attempt, so many steps."""

    def write(name: str, steps: int = 12, *, on_gpu: bool = True, seconds: float = 100.0, at: Path = site) -> RunDir:
        run = RunDir(tmp_path / "runs" / name)
        loaded = load_run(root / "configs/bloom-176b-2022.yaml", [f"slurm.site={at}"])
        attempt = AttemptDir(run.attempts_folder / "0001")
        attempt.make()
        attempt.config.write_text(dump_resolved(loaded.config))
        memory = {"memory_allocated": 40 << 30, "memory_reserved": 50 << 30} if on_gpu else {}
        step = {"kind": "step", "seconds": seconds, "global_batch_size": 2048, "micro_batch_size": 2, **memory}
        attempt.event_file(383).write_text(
            "".join(json.dumps({**step, "step": number}) + "\n" for number in range(1, steps + 1))
        )
        write_json(run.record, {"name": name})
        return run

    return write


def test_ten_steps_on_gpus_of_the_site_count(write_run: WriteRun, tmp_path: Path, site: Path) -> None:
    root = tmp_path / "runs"
    write_run("on-cpu", on_gpu=False)
    write_run("short", steps=9)
    other = site.with_name("other.yaml")
    other.write_text(site.read_text())
    write_run("elsewhere", at=other)
    assert calibrate_on_runs(root, "uncalibrated", A100) is None
    write_run("one", seconds=100.0)
    write_run("two", seconds=101.0)
    found = calibrate_on_runs(root, "uncalibrated", A100)
    assert found and found.calibration
    assert len(found.calibration.time_neighbours.points) == 2
    assert found.calibration.origin == f"2 runs under {root}"
    assert (found.calibration.site, found.calibration.framework) == ("uncalibrated", "deepspeed")


@pytest.mark.slow
def test_runs_that_cannot_be_are_not_used(write_run: WriteRun, tmp_path: Path) -> None:
    for number in range(12):
        write_run(f"run{number}", seconds=20.0)
    found = calibrate_on_runs(tmp_path / "runs", "uncalibrated", A100)
    assert found and found.calibration is None
    assert "impossible" in found.problem


def test_plan_says_on_which_runs_it_rests(
    write_run: WriteRun, tmp_path: Path, root: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    runs = tmp_path / "runs"
    asked = [
        "plan",
        "configs/bloom-176b-2022.yaml",
        "--top",
        "1",
        "--set",
        f"slurm.site={site}",
        "--set",
        f"run.root={runs}",
    ]
    assert "uncalibrated: every time" in CliRunner().invoke(bsl, asked).output
    write_run("one", seconds=150.0)
    output = CliRunner().invoke(bsl, asked).output
    assert has_parts(output, f"1 run under {runs}", f"±{100 * UNCALIBRATED_BAND:.0f}%")

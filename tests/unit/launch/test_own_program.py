"""A run of another program than `bsl train`, whose file says nothing of a model, a training or data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.config.load import load_resolved, load_run
from bigsci_launch.config.schema.section import DESCRIBING, NotDescribed
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.runs.step_forms import forms_of
from tests.support.command import invoke
from tests.support.texts import has_parts

RunFile = Callable[..., Path]


@pytest.fixture
def own(run_file: RunFile) -> Path:
    """The run file of the other tests, without the sections that only describe a training."""
    path = run_file()
    sections = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in sections.items() if name not in DESCRIBING}))
    return path


def test_it_needs_a_name_a_command_and_a_place(own: Path) -> None:
    done = invoke("config", "check", str(own))
    assert (done.exit_code, done.stderr) == (0, "")
    config = load_run(own).config
    assert not config.describes("model") and config.parallelism.data_parallel_size == 2
    for section in DESCRIBING:
        with pytest.raises(NotDescribed, match=f"no section `{section}`"):
            getattr(config, section)


def test_a_section_of_which_some_is_written_must_be_whole(own: Path) -> None:
    done = invoke("config", "check", str(own), "--set", "model.num_layers=4")
    assert done.exit_code == 2 and "model.hidden_size: " in done.stderr
    assert "training" not in done.stderr


@pytest.mark.parametrize("section", DESCRIBING)
def test_the_trainer_needs_every_section(run_file: RunFile, section: str) -> None:
    path = run_file(run={"name": "trial"}, **{section: None})
    done = invoke("config", "check", str(path))
    assert done.exit_code == 2 and f"{section}: " in done.stderr


def test_it_is_submitted_and_frozen(fake_slurm: Callable[..., Any], own: Path) -> None:
    fake_slurm("sbatch", "squeue", "scontrol").answer("sbatch", "77\n")
    assert invoke("submit", str(own)).exit_code == 0
    run = RunDir(Path("runs/trial").absolute())
    config = load_resolved(run.attempt("0001").config)
    assert config.run.command == ["true"] and not config.describes("training")
    assert "model" not in json.loads(run.record.read_text())
    dry = invoke("submit", str(own), "--dry-run", "--set", "run.name=other")
    assert dry.exit_code == 0 and "# stage" not in dry.stdout


def test_how_it_prints_a_step_is_frozen_too(fake_slurm: Callable[..., Any], own: Path) -> None:
    fake_slurm("sbatch", "squeue", "scontrol").answer("sbatch", "77\n")
    key = "monitor.step_line="
    refused = invoke("submit", str(own), "--set", f"{key}at (x)")
    assert refused.exit_code == 2 and "monitor.step_line" in refused.stderr and "`step`" in refused.stderr
    assert invoke("submit", str(own), "--set", rf"{key}at (?P<step>\d+)").exit_code == 0
    [form] = forms_of(RunDir(Path("runs/trial").absolute()).attempt("0001"))
    assert form.line.search("at 12") is not None


@pytest.mark.parametrize("words", [("plan", "--set", "run.framework=megatron"), ("rehearse",)])
def test_what_computes_with_a_model_says_that_there_is_none(own: Path, words: tuple[str, ...]) -> None:
    done = invoke(words[0], str(own), *words[1:])
    assert done.exit_code == 2 and has_parts(done.stderr, "section `", "docs/reference/config.md#")


def test_surviving_needs_a_global_batch(own: Path) -> None:
    done = invoke("config", "check", str(own), "--set", "survive=true")
    assert done.exit_code == 2 and has_parts(done.stderr, "survive: ", "global batch size")


@pytest.mark.slow
def test_a_described_program_may_change_its_sizes(fake_slurm: Callable[..., Any], run_file: RunFile) -> None:
    """Its checkpoints are its own: only the layout of a run is fixed."""
    fake = fake_slurm("sbatch", "squeue", "scontrol")
    fake.answer("sbatch", "77\n")
    path = str(run_file())
    assert invoke("submit", path).exit_code == 0
    fake.answer("squeue", "77|COMPLETED|me|debug|2|n[0-1]|None|2026-11-21T01:02:03|N/A|1:00|N/A|trial|(null)\n")
    assert invoke("submit", path, "--set", "model.num_layers=3").exit_code == 0
    assert invoke("submit", path, "--set", "run.command=null").exit_code == 0, "nothing says that it had another model"
    done = invoke("submit", path, "--set", "slurm.nodes=1")
    assert done.exit_code == 2 and "topology.dp: 2 -> 1" in done.stderr

"""Every run file and site file that is shipped is valid, and says what it claims."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pytest

from bigsci_launch.config.load import LoadedRun, load_run
from bigsci_launch.config.reference import json_schema_text
from bigsci_launch.config.site import read_site
from bigsci_launch.topology import Topology

ASSETS = Path(str(files("bigsci_launch"))) / "assets"
RUNS = sorted((ASSETS / "configs").glob("*.yaml"))
SITES = sorted((ASSETS / "slurm" / "sites").glob("*.yaml"))


def shipped(name: str) -> LoadedRun:
    return load_run(ASSETS / "configs" / f"{name}.yaml")


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_every_run_file_loads_without_a_warning(path: Path) -> None:
    run = load_run(path)
    assert run.config.run.name == path.stem
    assert run.warnings == ()


@pytest.mark.parametrize("path", SITES, ids=lambda path: path.name)
def test_every_site_file_loads(path: Path) -> None:
    site = read_site(path)
    assert site.name == path.stem
    assert all(variable.reason for variable in site.config.environment.values())


@pytest.mark.parametrize("path", [*RUNS, *SITES], ids=lambda path: path.name)
def test_the_first_line_leads_the_editor_to_the_schema(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    match = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", first)
    assert match is not None
    schema = (path.resolve().parent / match[1]).resolve()
    expected = "run" if path in RUNS else "site"
    assert schema == (ASSETS / "configs" / "schema" / f"{expected}.schema.json").resolve()


@pytest.mark.parametrize("name", ["run", "site"])
def test_the_published_schema_is_fresh(name: str) -> None:
    text = json_schema_text("run" if name == "run" else "site")
    path = ASSETS / "configs" / "schema" / f"{name}.schema.json"
    assert path.read_text() == text, f"write it again: bsl config schema {name} > configs/schema/{name}.schema.json"


def test_the_demo_uses_every_axis_on_this_machine() -> None:
    run = shipped("demo")
    assert run.site.name == "local"
    assert run.layout.topology == Topology(tp=2, pp=2, dp=2)
    assert run.config.training.precision == "bf16"
    assert run.config.model.tied_embeddings
    assert run.config.training.steps == 20


def test_the_same_model_runs_on_the_mini_cluster() -> None:
    demo, mini = shipped("demo"), shipped("minicluster")
    assert mini.config.model == demo.config.model
    assert mini.layout.nodes == 4
    assert mini.layout.topology == demo.layout.topology


def test_blooms_run_is_the_one_of_its_scripts() -> None:
    run = shipped("bloom-176b")
    assert run.layout.topology == Topology(tp=4, pp=12, dp=8)
    assert run.config.padded_vocab_size == 250880
    assert (run.config.slurm.partition, run.config.slurm.qos) == ("gpu_p5", "qos_gpu-gc")
    assert run.config.slurm.account == "six@a100"
    assert run.config.monitor.peak_tflops_per_rank == 312
    assert "hang" in run.config.env["CUDA_LAUNCH_BLOCKING"].reason


def test_blooms_step_counts_follow_from_its_sample_counts() -> None:
    """Megatron's ramp: the batch grows by one increment each `samples / number of increments` samples."""
    training, optimizer = shipped("bloom-176b").config.training, shipped("bloom-176b").config.optimizer
    ramp, goal = training.rampup, training.global_batch_size
    assert ramp is not None
    per_size = ramp.samples / ((goal - ramp.start) // ramp.increment)

    def step_of(samples: int) -> int:
        consumed = steps = 0
        while consumed < samples:
            grown = ramp.start + int(consumed / per_size) * ramp.increment
            consumed += (
                training.global_batch_size if consumed > ramp.samples else min(grown, training.global_batch_size)
            )
            steps += 1
        return steps

    assert (step_of(183_105), step_of(200_000_000)) == (optimizer.warmup_steps, optimizer.decay_steps)
    # The last, incomplete step is not made.
    assert step_of(220_000_000) - 1 == training.steps

"""Rules about containers, NVLink domains and the signal to stop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.config.load import LoadedRun, load_run
from bigsci_launch.errors import ConfigError
from tests.support.texts import has_parts

Load = Callable[..., LoadedRun]
TP = "parallelism.tensor_parallel_size"


@pytest.fixture
def problems(run_file: Path) -> Callable[..., list[str]]:
    """`problems("site line", "run.key=value")` are the errors of the run on the site with further lines."""

    def find(lines: str, *overrides: str) -> list[str]:
        site = run_file.parent / "sites" / "lake.yaml"
        site.write_text(f"{site.read_text()}{lines}\n")
        try:
            load_run(run_file, overrides)
        except ConfigError as error:
            return [f"{problem.key}: {problem.text}" for problem in error.problems]
        return []

    return find


def test_a_tensor_parallel_group_may_cross_nodes_of_an_nvlink_domain(problems: Callable[..., Any]) -> None:
    sizes = [f"{TP}=4", "parallelism.data_parallel_size=1"]
    (text,) = problems("", *sizes)
    assert has_parts(text, f"{TP}: ", "tensor-parallel group")
    assert problems("nvlink_domain_nodes: 18", *sizes) == []


def test_a_group_larger_than_the_domain(problems: Callable[..., Any]) -> None:
    sizes = [f"{TP}=8", "parallelism.pipeline_parallel_size=1", "model.num_attention_heads=8"]
    (text,) = problems("nvlink_domain_nodes: 3", *sizes)
    assert has_parts(text, f"{TP}: tp 8 ", "2 ranks", "of 3")


@pytest.mark.parametrize(("segment", "is_refused"), [(2, False), (4, False), (3, True), (1, True)])
def test_a_segment_holds_whole_groups(problems: Callable[..., Any], segment: int, is_refused: bool) -> None:
    found = problems(
        "nvlink_domain_nodes: 18",
        f"{TP}=4",
        "parallelism.data_parallel_size=1",
        f'slurm.sbatch_options=["--segment={segment}"]',
    )
    assert [has_parts(text, "slurm.sbatch_options", f"{segment}", "2 nodes") for text in found] == [True] * is_refused


def test_an_image_needs_a_container_and_a_container_an_image(problems: Callable[..., Any]) -> None:
    (text,) = problems("", "slurm.container_image=/x.sif")
    assert has_parts(text, "slurm.container_image: ", "site lake")
    (text,) = problems("container: {kind: apptainer}")
    assert has_parts(text, "slurm.container_image")


def test_an_optional_container_is_for_runs_with_an_image(problems: Callable[..., Any]) -> None:
    assert problems("container: {kind: apptainer, optional: true}") == []
    assert problems("", "slurm.container_image=/x.sif") == []


def test_the_image_of_the_run_replaces_that_of_the_site(run_file: Path, problems: Callable[..., Any]) -> None:
    image = "container: {kind: apptainer, image: /site.sif}"
    assert problems(image) == []
    run = load_run(run_file)
    assert (run.config.slurm.container_image, run.origins["slurm.container_image"]) == ("/site.sif", "site lake")
    assert load_run(run_file, ["slurm.container_image=/own.sif"]).config.slurm.container_image == "/own.sif"


def test_limits_and_staged_files_of_the_site_are_defaults(run_file: Path, problems: Callable[..., Any]) -> None:
    more = "ulimits: {core: 0, nofile: 4096}\nstage_in: [{file: /a, to: /b}]"
    assert problems(more) == []
    slurm = load_run(run_file, ["slurm.ulimits.nofile=null", "slurm.ulimits.memlock=unlimited"]).config.slurm
    assert slurm.ulimits.given == {"core": "0", "memlock": "unlimited"}
    assert [item.to for item in slurm.stage_in] == ["/b"]
    assert load_run(run_file, ["slurm.stage_in=[]"]).config.slurm.stage_in == []


def test_the_trainer_is_not_asked_with_a_signal_that_it_does_not_know(problems: Callable[..., Any]) -> None:
    (text,) = problems("", "run.stop_signal=INT")
    assert has_parts(text, "run.stop_signal: ", "INT")
    for overrides in (["run.stop_signal=TERM"], ["run.stop_signal=INT", "run.command=[a]"]):
        assert problems("", *overrides) == []


def test_spare_nodes_are_for_jobs_that_survive(problems: Callable[..., Any]) -> None:
    (text,) = problems("", "slurm.spare_nodes=1")
    assert has_parts(text, "slurm.spare_nodes: 1 ", "survive: true")
    assert problems("", "slurm.spare_nodes=1", "survive=true") == []
    assert problems("", "slurm.spare_nodes=1", "survive=true", "slurm.requeue=true") == []

"""What a rehearsal changes: sizes that fit two nodes, batches that fit the sizes, nothing of the run's own folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.config.load import load_run
from bigsci_launch.rehearse.arrange import arrange
from bigsci_launch.rehearse.reduce import (
    Original,
    RehearsalSizes,
    choose_sizes,
    find_changes,
    lost_axes,
    saved_elsewhere,
    slower_by,
)

CONFIGS = Path(__file__).parents[3] / "configs"
BLOOM_LAYERS = (5, *[6] * 10, 5)


def original(name: str, *overrides: str, layers: tuple[int, ...] = ()) -> Original:
    loaded = load_run(CONFIGS / name, overrides)
    return Original(loaded.config, loaded.site.config.ranks_per_node, loaded.site.is_local, layers)


def changes_of(run: Original, **more: Any) -> dict[str, Any]:
    return {change.key: change.after for change in find_changes(run, root="/r", **more)}


@pytest.mark.parametrize(
    ("sizes", "ranks_per_node", "expected"),
    [
        (
            {"tp": 4, "pp": 12, "dp": 8, "nodes": 48},
            8,
            RehearsalSizes(2, 2, 2),
        ),  # stages and replicas, not stages alone
        ({"tp": 8, "pp": 4, "dp": 4, "nodes": 16}, 8, RehearsalSizes(2, 2, 1)),  # one of the two fits: stages
        ({"tp": 8, "pp": 1, "dp": 16, "nodes": 16}, 8, RehearsalSizes(2, 1, 2)),
        ({"tp": 1, "pp": 3, "dp": 8, "nodes": 3}, 8, RehearsalSizes(2, 2, 8)),  # 3 stages do not divide 16 ranks
        ({"tp": 2, "pp": 2, "dp": 2, "nodes": 1}, 8, RehearsalSizes(1, 2, 2)),  # already small
        (
            {"tp": 4, "pp": 2, "dp": 8, "cp": 8, "nodes": 64},
            8,
            RehearsalSizes(4, 1, 1),
        ),  # one tp x cp group needs 4 nodes
    ],
)
def test_sizes_keep_every_axis_that_fits(sizes: dict[str, int], ranks_per_node: int, expected: RehearsalSizes) -> None:
    run = original("bloom-176b.yaml")
    parallelism = run.config.parallelism.model_copy(
        update={
            "tensor_parallel_size": sizes["tp"],
            "pipeline_parallel_size": sizes["pp"],
            "data_parallel_size": sizes["dp"],
            "context_parallel_size": sizes.get("cp", 1),
        }
    )
    slurm = run.config.slurm.model_copy(update={"nodes": sizes["nodes"]})
    config = run.config.model_copy(update={"parallelism": parallelism, "slurm": slurm})
    found = choose_sizes(replace(run, config=config, ranks_per_node=ranks_per_node))
    assert found == expected
    assert found.nodes * ranks_per_node == sizes["tp"] * sizes.get("cp", 1) * found.pp * found.dp


def test_a_local_site_keeps_its_stages_and_two_replicas() -> None:
    assert choose_sizes(original("demo.yaml")) == RehearsalSizes(1, 2, 2)
    many = original("demo.yaml", "parallelism.data_parallel_size=4")
    assert choose_sizes(many) == RehearsalSizes(1, 2, 2)
    assert changes_of(many)["training.global_batch_size"] == 8, "2 micro batches of 2 samples on each of 2 replicas"


def test_the_layers_of_the_stages_that_are_left_are_those_of_the_run() -> None:
    run = original("bloom-176b.yaml", layers=BLOOM_LAYERS)
    found = changes_of(run)
    assert (found["model.num_layers"], found["model.declared_parameters"]) == (10, None)
    assert changes_of(run, fewer_layers=2)["model.num_layers"] == 6
    cut = replace(run, config=run.config.model_copy(update={"parallelism": _with_cut(run)}))
    assert changes_of(cut)["parallelism.partition_method"] == "time:5,5"
    assert "model.num_layers" not in changes_of(replace(run, layers=())), "the layers of a program are its own"


def _with_cut(run: Original) -> Any:
    counts = ",".join(str(count) for count in BLOOM_LAYERS)
    return run.config.parallelism.model_copy(update={"partition_method": f"time:{counts}"})


def test_the_ramp_grows_once_and_every_batch_fits() -> None:
    found = changes_of(original("bloom-176b.yaml", layers=BLOOM_LAYERS))
    ramp, goal, unit = found["training.rampup"], found["training.global_batch_size"], 2 * 2
    assert (ramp["start"], ramp["increment"], goal) == (12, 4, 16)
    assert not ramp["start"] % unit and not goal % unit and ramp["samples"] == 2 * ramp["start"]


def test_the_learning_rate_is_that_of_the_whole_run() -> None:
    assert changes_of(original("demo.yaml"))["optimizer.decay_steps"] == 20
    assert "optimizer.decay_steps" not in changes_of(original("bloom-176b.yaml"))


def test_a_run_that_starts_elsewhere_is_rehearsed_from_step_0_in_its_own_folder() -> None:
    found = changes_of(
        original("minicluster.yaml", "checkpoint.load=/big/run", "slurm.requeue=true", "slurm.nodelist=n[0-3]")
    )
    assert found["checkpoint.load"] == "auto"
    assert (found["run.root"], found["run.name"]) == ("/r", "rehearse-minicluster")
    assert (found["slurm.requeue"], found["slurm.nodelist"]) == (False, None)


def test_the_whole_rehearsal_of_each_shipped_run_is_a_legal_run(tmp_path: Path) -> None:
    for path in sorted(CONFIGS.glob("*.yaml")):
        found = arrange(path, [], working_directory=tmp_path, python="python3", local=False, pending_s=1)
        assert found.prepared.loaded.layout.nodes <= 2, path
        root = tmp_path / "runs" / "rehearsals" / found.loaded.config.run.name
        assert found.prepared.request.run.path.parent == root / "0001"
        assert not list(tmp_path.iterdir()), "arranging writes nothing"


def test_stages_hold_fewer_layers_where_fewer_replicas_would_not_fit_into_memory(tmp_path: Path) -> None:
    deep = ["model.num_layers=142"]
    found = arrange(
        CONFIGS / "bloom-176b.yaml", deep, working_directory=tmp_path, python="python3", local=False, pending_s=1
    )
    (layers,) = [change for change in found.changes if change.key == "model.num_layers"]
    assert layers.after < 22 and "optimizer's state" in layers.reason
    assert not [finding for finding in found.prepared.findings if finding.rule == "memory"]


def test_axes_that_are_gone_are_not_checked() -> None:
    before = load_run(CONFIGS / "minicluster.yaml").config
    after = before.model_copy(update={"parallelism": before.parallelism.model_copy(update={"data_parallel_size": 1})})
    assert ["dp 2 -> 1: " in line for line in lost_axes(before, after)] == [True]
    assert lost_axes(before, before) == []


def test_a_step_of_the_run_is_longer_by_its_micro_batches() -> None:
    run = original("bloom-176b.yaml", layers=BLOOM_LAYERS)
    small = load_run(CONFIGS / "bloom-176b.yaml", [change.override for change in find_changes(run, root="/r")])
    assert slower_by(run, small.config) == (128 + 11) / (4 + 1)


def test_a_rehearsal_does_not_start_itself_again() -> None:
    changes = changes_of(original("minicluster.yaml", "slurm.chain={by: requeue}", "slurm.dependency=afterok:7"))
    assert changes["slurm.chain"] is None and changes["slurm.dependency"] is None


@pytest.mark.parametrize(
    ("command", "found"),
    [
        (["python", "train.py", "--save", "/big/run"], ["--save /big/run"]),
        (["bash", "-c", "python train.py --save=/big/run --lr 1"], ["--save /big/run"]),
        (["python", "train.py", "--save", "$BSL_RUN_DIR/checkpoints"], []),
        (["python", "train.py", "--save", "/r/1/x"], []),
        (["python", "train.py", "--save-interval", "5"], []),
    ],
)
def test_a_program_that_saves_into_the_run_is_noticed(command: list[str], found: list[str]) -> None:
    assert saved_elsewhere(command, "/r/1") == found

"""Uneven pipelines lose nodes: what Oobleck's user asked for in insujang/Oobleck's question about f, on a real Slurm.

8 nodes hold pipelines of two nodes and more. Two die, and leave pipelines of one node, for which there is no template.
Training must continue on the other six.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bigsci_launch.data.indexed import IndexedWriter
from bigsci_launch.runs.events import read_events
from bigsci_launch.runs.generations.read import read_layouts, uneven_topology
from bigsci_launch.runs.layout import RunDir
from tests.support.texts import has_parts

from .conftest import MakeCluster, SlurmCluster
from .test_submit import Run
from .test_survive import events, nodes_of

pytestmark = [pytest.mark.slurm, pytest.mark.long]

NODES, STEPS = 8, 40
SITE = {
    "description": "one machine as a Slurm cluster",
    "scheduler": "slurm",
    "partitions": {"debug": {"max_time": "24:00:00"}},
    "default_partition": "debug",
    "environment": {"OMP_NUM_THREADS": {"value": "1", "reason": "all nodes share the cores of one machine"}},
}


@pytest.fixture
def cluster(make_cluster: MakeCluster) -> SlurmCluster:
    return make_cluster(nodes=NODES, gpus_per_node=2)


@pytest.fixture
def folder(short_tmp_path: Path) -> Iterator[Path]:
    (short_tmp_path / "sites").mkdir()
    for ranks in (1, 2):
        site = {**SITE, "ranks_per_node": ranks, "gres": f"gpu:{ranks}"}
        (short_tmp_path / "sites" / f"nodes-of-{ranks}.yaml").write_text(json.dumps(site))
    with IndexedWriter(short_tmp_path / "tokens", np.dtype(np.uint16)) as writer:
        writer.add_document(np.random.default_rng(0).integers(90, size=40_000))
    yield short_tmp_path


def write_training(cluster: SlurmCluster, folder: Path, name: str, nodes: int, tp: int, **more: Any) -> Run:
    config = {
        "run": {"name": name, "root": "runs"},
        "slurm": {"site": f"nodes-of-{tp}", "nodes": nodes, "time_limit": "00:20:00"},
        "model": {
            **{"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 100, "sequence_length": 16},
            "biases": False,
        },
        "training": {
            **{"steps": STEPS, "micro_batch_size": 1, "global_batch_size": 16, "precision": "fp32", "device": "cpu"},
        },
        "guards": {"interval": "off"},
        "monitor": {"step_time_s": 1, "save_time_s": 1, "watch": "off", "eval_interval": None},
        "env": {"RES_OPTIONS": {"value": "attempts:1 timeout:1", "reason": "no name server answers in a node"}},
        "checkpoint": {"save_interval": STEPS},
        "data": {"prefix": str(folder / "tokens")},
        **more,
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(config))
    return Run(cluster, folder, path, (folder / "runs" / name).resolve())


def steps_of(run: Run) -> dict[int, dict[str, Any]]:
    attempt = RunDir(run.directory).attempt("0001")
    files = sorted(attempt.events.glob("rank-*.jsonl"))
    records = [each for path in files for each in read_events(path) if each["kind"] == "step"]
    return {each["step"]: each for each in records}


@pytest.mark.parametrize(("tp", "failures"), [(1, 1), (1, 2), (1, 3), (2, 3)])
def test_six_of_eight_nodes_continue(cluster: SlurmCluster, folder: Path, tp: int, failures: int) -> None:
    """A stage is a node, with `tp` ranks. Both victims are last stages of pipelines of two, and have copies of each
    other's state: with f = 1, it is lost if the second dies before the first is recovered from."""
    alone = write_training(cluster, folder, "alone", 1, 1)
    alone.submit()
    alone.wait_for_state("COMPLETED", timeout_s=600)
    parallelism = {"engine": "uneven", "pipeline_parallel_size": 2, "tensor_parallel_size": tp, "zero_stage": 1}
    survive = {"failures": failures}
    run = write_training(cluster, folder, "eight", NODES, tp, parallelism=parallelism, survive=survive)
    run.submit()
    run.wait_for(lambda: len(steps_of(run)) > 5, timeout_s=900)
    attempt = RunDir(run.directory).attempt("0001")
    before = uneven_topology(read_layouts(attempt)[0])
    assert before is not None and before.world_size == NODES * tp
    victims = {nodes_of(events(run, "began")[0])[each.ranks[-1]] for each in before.pipelines[-2:]}
    assert len(victims) == 2
    for victim in victims:
        assert cluster.bsl("cluster", "kill-node", victim).returncode == 0
    run.wait_for_state("COMPLETED", timeout_s=900)
    print(
        json.dumps({"layouts": read_layouts(attempt), "phases": events(run, "phase"), "failed": events(run, "failed")})
    )
    assert (run.exit()["reason"], run.exit()["exit_code"]) == ("finished", 0)
    last = read_layouts(attempt)[-1]
    after = uneven_topology(last)
    assert after is not None and after.world_size == 6 * tp
    assert victims.isdisjoint(nodes_of(events(run, "began")[-1]))
    lost = [each for each in events(run, "failed") if each["kind"] == "lost_node"]
    assert {each["node"] for each in lost} == victims
    all_restored = [event for event in events(run, "phase") if event["phase"] == "restored"]
    between = range(lost[0]["generation"] + 1, lost[-1]["generation"] + 1)
    restored = all_restored[-1]
    if failures == 1 and not any(event["generation"] in between for event in all_restored):
        assert restored["source"] == "start" and has_parts(restored["why"], "no rank holds")
    else:
        assert restored["source"] in ("memory", "buddies") and restored["step"] > 0
    # Six nodes form three pipelines: f = 2 at most.
    assert (last["failures"], last["wanted_failures"]) == (min(failures, 2), failures)
    found, wanted = steps_of(run), steps_of(alone)
    assert sorted(found) == list(range(1, STEPS + 1))
    for step, record in wanted.items():
        assert found[step]["loss"] == pytest.approx(record["loss"], rel=1e-6), step
        assert found[step]["consumed_samples"] == record["consumed_samples"]

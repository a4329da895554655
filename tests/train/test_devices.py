"""Devices of real ranks: those that cannot train together say so within seconds, and staged sends change nothing."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.config.load import dump_resolved
from bigsci_launch.runs.layout import RunDir, read_json
from bigsci_launch.topology import Topology
from tests.support.ports import find_port
from tests.support.texts import has_parts

from .conftest import make_config
from .rank_processes import StartRank

pytestmark = pytest.mark.torch


def test_a_node_whose_gpus_are_invisible_ends_all_ranks_in_words(
    dataset: Path, start_rank: StartRank, tmp_path: Path
) -> None:
    run = RunDir(tmp_path)
    attempt = run.attempt(run.next_attempt_name())
    attempt.make()
    attempt.config.write_text(
        dump_resolved(make_config(Topology(tp=1, pp=1, dp=2), dataset, {"training": {"device": "auto"}}))
    )
    port, processes = find_port(), []
    for rank in range(2):
        environment = {
            **os.environ,
            **{"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "SLURMD_NODENAME": f"node-{rank}"},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            **{"BSL_RUN_DIR": str(run.path), "BSL_ATTEMPT": attempt.name},
            **({"SLURM_STEP_GPUS": "0"} if rank == 1 else {}),
        }
        processes.append(start_rank(["-m", "bigsci_launch.train"], environment, attempt.log_file(rank)))
    assert [process.wait(180) for process in processes] == [1, 1]
    messages = {read_json(attempt.error_file(rank))["message"] for rank in range(2)}
    assert all(has_parts(message, "rank 1 on node-1", "SLURM_STEP_GPUS=0") for message in messages)
    assert len(messages) == 1


def test_a_gpu_that_is_asked_for_and_not_there_is_refused(start: Any, tmp_path: Path) -> None:
    attempt = start(tmp_path, training={"device": "cuda"})
    assert attempt.wait(180) == [1]
    assert "training.device is cuda" in attempt.error(0)["message"]


def test_stages_that_send_through_the_host_train_as_others(train_several: Any, tmp_path: Path) -> None:
    scenarios = [("plain", {"training": {"steps": 3, "deterministic": True}})]
    plain = train_several(tmp_path / "plain", "pp=2", scenarios)["plain"]
    staged = train_several(tmp_path / "staged", "pp=2", scenarios, "staged")["plain"]
    for rank in range(2):
        log = RunDir(tmp_path / "staged" / "ranks").attempt("0001").log_file(rank).read_text()
        assert re.search(r"sent [1-9]\d+ tensors", log), log
    assert [plain.steps()[step]["loss_hex"] for step in (1, 2, 3)] == [
        staged.steps()[step]["loss_hex"] for step in (1, 2, 3)
    ]

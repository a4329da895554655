"""`bsl spy` on four real gloo ranks that hang, die or stop: it names the right rank, by number and coordinate."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch
Spy = Callable[..., dict[str, Any]]


@pytest.fixture
def spy(launch: Any, tmp_path: Path, free_port: int) -> Spy:
    """`spy("skip", culprit=1, recorder=True)` starts the ranks, looks at them and returns the answer."""

    def look(case: str, culprit: int, *options: str, recorder: bool = False) -> dict[str, Any]:
        folder = tmp_path / "attempts" / "0001" / "recorder"
        folder.mkdir(parents=True)
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port), "OMP_NUM_THREADS": "1"}
        if recorder:
            environment |= {"BSL_RUN_DIR": str(tmp_path), "BSL_ATTEMPT": "0001"}
        arguments = f"{case} {{ready}} {culprit}" + (f" {folder}" if recorder else "")
        launched = launch("gloo_ranks.py", [arguments] * 4, limit_s=90, **environment)
        argv = [sys.executable, "-m", "bigsci_launch", "spy", "--pid", str(launched.pid), "--topology", "tp=2,dp=2"]
        argv += ["--output", str(tmp_path / "evidence"), "--json", *options]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert isinstance(document, dict)
        return document

    return look


def named(document: dict[str, Any]) -> list[tuple[int, dict[str, int]]]:
    return [(suspect["rank"], suspect["coordinate"]) for suspect in document["verdict"]["suspects"]]


# The next test holds the same verdict on these ranks, and the tutorial (tests/docs) on ranks that offer their records.
@pytest.mark.long
def test_a_rank_that_skipped_a_collective(spy: Spy) -> None:
    document = spy("skip", 3, recorder=True)
    assert document["verdict"]["class"] == "H01"
    assert named(document) == [(3, {"pp": 0, "tp": 1, "dp": 1})]
    assert "left out all_reduce number 14 of the tensor-parallel group (ranks 2-3)" in document["verdict"]["claim"]


def test_a_skipped_collective_in_a_job_that_nobody_prepared(spy: Spy) -> None:
    """Stacks only show four ranks in collectives; torch's records, pulled out of them, show who left one out."""
    document = spy("skip", 3, "--flight-recorder=fork")
    assert document["verdict"]["class"] == "H01", document["verdict"]
    assert named(document) == [(3, {"pp": 0, "tp": 1, "dp": 1})]
    assert "left out all_reduce number 14 of the tensor-parallel group (ranks 2-3)" in document["verdict"]["claim"]


def test_a_rank_in_its_data_loader_without_any_preparation(spy: Spy) -> None:
    document = spy("loader", 1)
    assert (document["verdict"]["state"], document["verdict"]["class"]) == ("waiting", "H31"), "it has just begun"
    assert named(document) == []
    assert document["verdict"]["look_first"][0]["rank"] == 1
    assert "load_batch (gloo_ranks.py:" in document["verdict"]["claim"]
    assert "3 ranks wait for it" in document["verdict"]["claim"]


def test_native_frames_show_who_waits_for_an_asynchronous_collective(spy: Spy) -> None:
    """Rank 0 is in `Work.wait()`, which has no Python frame: without its native frames it looks like the culprit."""
    document = spy("async", 2, "--native")
    sides = {tuple(side["ranks"]): side["where"] for side in document["verdict"]["sides"]}
    assert sides[0,].startswith("Work.wait at reduce_behind_the_back"), document["verdict"]
    assert named(document) == []


# tests/slurm/test_spy.py holds the verdict on a stopped rank, and tests/golden/reports what to do about it.
@pytest.mark.long
def test_a_stopped_rank(spy: Spy) -> None:
    document = spy("stop", 0)
    assert document["verdict"]["class"] == "H55"
    assert named(document) == [(0, {"pp": 0, "tp": 0, "dp": 0})]
    assert document["verdict"]["next"][0].startswith("kill -CONT ")


def test_a_dead_rank(spy: Spy) -> None:
    document = spy("dead", 1)
    assert document["verdict"]["state"] == "crashed"
    assert named(document) == [(1, {"pp": 0, "tp": 1, "dp": 0})]
    assert document["coverage"]["ranks_read"] == 3


def test_a_healthy_training_is_no_hang(spy: Spy) -> None:
    document = spy("healthy", 0, recorder=True)
    assert (document["verdict"]["state"], named(document)) == ("progressing", [])

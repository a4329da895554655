"""`bsl spy` on four real gloo ranks that hang, die or stop: it names the right rank, by number and coordinate."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.texts import has_parts

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
        done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert isinstance(document, dict)
        return document

    return look


def named(document: dict[str, Any]) -> list[tuple[int, dict[str, int]]]:
    return [(suspect["rank"], suspect["coordinate"]) for suspect in document["verdict"]["suspects"]]


def assert_left_out(document: dict[str, Any]) -> None:
    """Rank 3 has left out a collective, which is named by its number in its group."""
    assert document["verdict"]["class"] == "H01", document["verdict"]
    assert named(document) == [(3, {"pp": 0, "tp": 1, "dp": 1})]
    assert has_parts(document["verdict"]["claim"], "all_reduce number 14", "tensor", "ranks 2-3")


def test_a_skipped_collective_where_ranks_wait_for_their_device(spy: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over NCCL a collective returns at once: all four ranks are at the place where they read the loss."""
    monkeypatch.setenv("NCCL_LIKE", "1")
    document = spy("skip", 3, recorder=True)
    assert_left_out(document)
    assert all("pass_by" in side["where"] for side in document["verdict"]["sides"])


@pytest.mark.long
def test_a_rank_that_loads_while_others_wait_for_their_device(spy: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_LIKE", "1")
    verdict = spy("loader", 1)["verdict"]
    assert verdict["look_first"][0]["rank"] == 1 and verdict["suspects"] == []


# The next test holds the same verdict on these ranks, and the tutorial (tests/docs) on ranks that offer their records.
@pytest.mark.long
def test_a_rank_that_skipped_a_collective(spy: Spy) -> None:
    assert_left_out(spy("skip", 3, recorder=True))


def test_a_skipped_collective_in_a_job_that_nobody_prepared(spy: Spy) -> None:
    """Stacks only show four ranks in collectives; torch's records, pulled out of them, show who left one out."""
    assert_left_out(spy("skip", 3, "--flight-recorder=fork"))


def test_a_worker_of_a_data_loader_that_gets_no_answer(spy: Spy, tmp_path: Path) -> None:
    """One of four workers: the others have nothing to do, and sleep as well."""
    verdict = spy("worker", 1, "--html", str(tmp_path / "page.html"))["verdict"]
    assert (verdict["state"], verdict["class"]) == ("waiting", "H36"), "it has just begun"
    assert verdict["suspects"] == []
    first = verdict["look_first"][0]
    [worker] = [each for each in first["children"] if each["frames"][0]["function"] == "ask_server"]
    assert first["rank"] == 1 and len(first["children"]) == 4
    for part in (f"worker {worker['pid']}", "ask_server (gloo_ranks.py:", "__getitem__ (gloo_ranks.py:", "3 ranks "):
        assert part in verdict["claim"]
    assert verdict["next"][1].startswith(f"py-spy dump --subprocesses --pid {first['pid']}  # on ")
    shown = f"{worker['pid']} (pt_data_worker): S, sleeping in {worker['wchan']}, in ask_server (gloo_ranks.py:"
    assert shown in (tmp_path / "page.html").read_text()


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


@pytest.mark.long
def test_a_dead_rank(spy: Spy) -> None:
    document = spy("dead", 1)
    assert document["verdict"]["state"] == "crashed"
    assert named(document) == [(1, {"pp": 0, "tp": 1, "dp": 0})]
    assert document["coverage"]["ranks_read"] == 3


def test_a_healthy_training_is_no_hang(spy: Spy) -> None:
    document = spy("healthy", 0, recorder=True)
    assert (document["verdict"]["state"], named(document)) == ("progressing", [])

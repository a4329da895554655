"""Training where communication blocks as NCCL does: without an error, until it is aborted from another thread."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.runs.layout import AttemptDir
from bigsci_launch.train.device.nccl import nccl_settings
from tests.support.texts import has_parts

from .conftest import Attempt, Start
from .generations import Generations
from .test_survive import BF16, STEPS, Lead, data_of, lead, losses, require_same, restored, undisturbed

pytestmark = pytest.mark.torch

__all__ = ["lead", "undisturbed"]

KILLS = 25


@pytest.fixture
def like_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_LIKE", "1")


@pytest.fixture(autouse=True)
def watchdog(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let the watchdog do what `bsl train` wants of it with `survive`."""
    settings = nccl_settings(AttemptDir(tmp_path), {"BSL_SLOT_FD": "3"})
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", settings["TORCH_NCCL_ASYNC_ERROR_HANDLING"])


@pytest.mark.usefixtures("like_nccl")
def test_killed_ranks_are_replaced_and_nothing_else_changes(lead: Lead, undisturbed: Attempt) -> None:
    run = lead("pp=2,dp=2", {3: "optimizer:8:die"}, **BF16)
    run.lead({0: "words:4:leave"})
    assert (run.number, run.stuck) == (2, [])
    require_same(run, undisturbed)


# tests/train/test_survive.py holds the rest of these for gloo.
@pytest.mark.long
@pytest.mark.usefixtures("like_nccl")
def test_a_rank_that_hangs_is_killed_and_its_state_comes_from_its_buddy(lead: Lead, undisturbed: Attempt) -> None:
    run = lead("pp=2,dp=2", {1: "optimizer:9:stop"}, **BF16)
    run.until_step(8)
    time.sleep(1.0)
    assert run.end() == [1]
    run.start(1)
    run.begin()
    run.lead()
    assert {word["source"] for word in restored(run)} <= {"memory", "buddies"}
    require_same(run, undisturbed)


@pytest.mark.long
@pytest.mark.usefixtures("like_nccl")
def test_replicas_leave_and_come_back(lead: Lead) -> None:
    sizes = {"training": {"steps": STEPS, "global_batch_size": 12}, "checkpoint": {"save_interval": 6}}
    run = lead("pp=2,dp=2", **sizes)
    run.until_step(3)
    run.kill(1)
    run.end()
    run.begin("pp=2,dp=1")
    run.until_step(8)
    assert {word["source"] for word in restored(run)} <= {"memory", "buddies"}
    run.end()
    run.start(run.topology.world_size + 2 - len(run.slots))
    run.begin("pp=2,dp=2")
    run.lead()
    assert not run.stuck and sorted(losses(run.attempt)) == list(range(1, STEPS + 1))


@pytest.mark.long
def test_a_network_that_reports_a_lost_peer_before_the_controller_does_ends_no_other_rank(
    lead: Lead, undisturbed: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a node loses its power: the watchdog sees it at once, and the controller after its lease."""
    monkeypatch.setenv("NCCL_LIKE", "network")
    run = lead("pp=2,dp=2", **BF16)
    run.until_step(8)
    run.kill(1)
    time.sleep(4.0)
    assert [slot.process.poll() for slot in run.members] == [None] * 3, run.story()
    run.recover()
    run.lead()
    assert {word["source"] for word in restored(run)} <= {"memory", "buddies"}
    require_same(run, undisturbed)


@pytest.mark.parametrize(
    ("topology", "kind", "parts"),
    [
        ("tp=2", "unreduced_tp_gradients", ("replicated gradients",)),
        pytest.param(
            "tp=2,pp=2", "unreduced_tied_gradients", ("tied gradients", "on ranks 0-3"), marks=pytest.mark.long
        ),
    ],
)
def test_guards_see_what_they_see_over_gloo(
    topology: str, kind: str, parts: tuple[str, ...], train_several: Any, tmp_path: Path
) -> None:
    """A tensor that is read before its collective is done has another value, and no guard may call it a defect."""
    base = {"training": {"steps": 4, "precision": "bf16"}, "guards": {"interval": 1}}
    scenarios = [("healthy", base), ("defect", {**base, "faults": [{"kind": kind, "step": 3}]})]
    over_gloo = train_several(tmp_path / "gloo", topology, scenarios)
    found = train_several(tmp_path / "nccl", topology, scenarios, module="several_like_nccl")
    assert found["healthy"].error(0) is None
    assert losses(found["healthy"]) == losses(over_gloo["healthy"])
    assert found["defect"].stopped() == over_gloo["defect"].stopped()
    assert has_parts(found["defect"].stopped()[1], *parts)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["gloo", "like NCCL"])
def test_many_kills(
    backend: str, lead: Lead, finish: Start, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It prints the seconds from a kill to the end of the next step, for the table in `docs/how-to/gpu.md`."""
    sections = {
        "training": {"steps": 10 * KILLS + 10, "precision": "bf16"},
        "checkpoint": {"save_interval": 100},
        "monitor": {"eval_interval": 1000},
    }
    straight = finish(tmp_path / "straight", "pp=2,dp=2", **sections, data=data_of(dataset))
    if backend != "gloo":
        monkeypatch.setenv("NCCL_LIKE", "1")
    draw = random.Random(0)
    run = lead("pp=2,dp=2", **sections)
    seconds = [_seconds_of_a_kill(run, 10 * number, draw) for number in range(1, KILLS + 1)]
    assert all(code == 0 for code in run.finish(240)), run.story()
    assert (run.number, run.stuck) == (KILLS, [])
    assert losses(run.attempt) == losses(straight)
    print(json.dumps({"backend": backend, "seconds": sorted(round(each, 2) for each in seconds)}))


def _seconds_of_a_kill(run: Generations, step: int, draw: random.Random) -> float:
    """Kill a rank at some moment after a step, recover, and return how long it took to the end of a step."""
    run.until_step(step, limit_s=120)
    time.sleep(draw.uniform(0.0, 0.1))
    started = time.monotonic()
    run.replace(draw.randrange(4))
    run.until(lambda: run.step() > 0)
    return time.monotonic() - started

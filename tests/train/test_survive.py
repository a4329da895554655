"""`survive`: ranks are killed, and the run continues with the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import Attempt, Start
from .generations import Generations
from .rank_processes import StartRank

BF16 = {
    "model": {"dropout": 0.1},
    "training": {"steps": 14, "precision": "bf16", "global_batch_size": 16},
    "checkpoint": {"save_interval": 14},
}
Lead = Callable[..., Generations]


@pytest.fixture
def lead(start_rank: StartRank, dataset: Path, tmp_path: Path) -> Iterator[Lead]:
    """`lead("pp=2,dp=2", training={...})` prepares a run of generations and starts its processes."""
    led: list[Generations] = []

    def begin(topology: str, **sections: Any) -> Generations:
        found = Generations(start_rank, tmp_path / f"led{len(led)}", dataset, topology, **sections)
        led.append(found)
        found.start(found.topology.world_size)
        found.begin()
        return found

    yield begin
    for each in led:
        each.close()


@pytest.fixture(scope="module")
def undisturbed(finish: Start, tmp_path_factory: pytest.TempPathFactory) -> Attempt:
    return finish(tmp_path_factory.mktemp("undisturbed") / "run", "pp=2,dp=2", **BF16)


def losses(attempt: Attempt) -> dict[int, str]:
    return {step: record["loss_hex"] for step, record in attempt.steps().items()}


def test_killed_ranks_are_replaced_and_losses_stay_the_same(lead: Lead, undisturbed: Attempt) -> None:
    run = lead("pp=2,dp=2", **BF16)
    run.until_step(3)
    run.replace(3)
    run.until_step(7)
    run.replace(0)
    codes = run.finish()
    assert codes == [0, 0, 0, 0], run.story()
    assert losses(run.attempt) == losses(undisturbed)

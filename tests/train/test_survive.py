"""`survive`: ranks are lost in all kinds of ways, and the run continues with the same numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bigsci_launch.cli.main import bsl
from bigsci_launch.file_names import checkpoint_tag
from bigsci_launch.runs.checkpoints import digests_path

from .conftest import Attempt, Start
from .generations import Generations
from .rank_processes import StartRank

pytestmark = pytest.mark.torch

STEPS = 12
BF16: dict[str, Any] = {
    "model": {"dropout": 0.1},
    "training": {"steps": STEPS, "precision": "bf16"},
    "checkpoint": {"save_interval": 6},
    "monitor": {"eval_interval": 4},
}
Lead = Callable[..., Generations]


@pytest.fixture
def lead(start_rank: StartRank, dataset: Path, tmp_path: Path) -> Iterator[Lead]:
    """`lead("pp=2,dp=2", {1: "optimizer:3:die"}, training={...})` begins a run; see `programs/seat.py`."""
    led: list[Generations] = []

    def begin(topology: str, suffering: Mapping[int, str] | None = None, **sections: Any) -> Generations:
        sections["data"] = {"prefix": str(dataset), "held_out": 0.1}
        found = Generations(start_rank, tmp_path / f"led{len(led)}", dataset, topology, **sections)
        led.append(found)
        found.start(found.topology.world_size, suffering)
        found.begin()
        return found

    yield begin
    for each in led:
        each.close()


@pytest.fixture(scope="module")
def undisturbed(finish: Start, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Attempt:
    data = {"prefix": str(dataset), "held_out": 0.1}
    return finish(tmp_path_factory.mktemp("undisturbed") / "run", "pp=2,dp=2", **BF16, data=data)


def losses(attempt: Attempt) -> dict[int, str]:
    return {step: record["loss_hex"] for step, record in attempt.steps().items()}


def require_same(run: Generations, undisturbed: Attempt, step: int = STEPS) -> None:
    """Check that losses, samples, evaluations and the whole last checkpoint are those of the undisturbed run."""
    attempt = run.attempt
    assert losses(attempt) == losses(undisturbed), run.story()
    assert consumed(attempt) == consumed(undisturbed)
    assert evaluations(attempt) == evaluations(undisturbed)
    saved, wanted = (each.run.checkpoints / checkpoint_tag(step) for each in (attempt, undisturbed))
    compared = CliRunner().invoke(bsl, ["diff-weights", str(saved), str(wanted)])
    assert compared.exit_code == 0, compared.output
    for rank in range(len(attempt.processes)):
        found, expected = (json.loads(digests_path(folder, rank).read_text()) for folder in (saved, wanted))
        for key in ("tensors", "optimizer", "random"):
            assert found[key] == expected[key], (rank, key)


def consumed(attempt: Attempt) -> dict[int, int]:
    return {step: record["consumed_samples"] for step, record in attempt.steps().items()}


def evaluations(attempt: Attempt) -> dict[int, str]:
    ranks = range(len(attempt.processes))
    found = [record for rank in ranks for record in attempt.events(rank, "evaluation")]
    return {record["step"]: record["loss_hex"] for record in found}


def test_killed_ranks_are_replaced_and_nothing_else_changes(lead: Lead, undisturbed: Attempt) -> None:
    run = lead("pp=2,dp=2", {3: "optimizer:8:die"}, **BF16)
    run.lead({0: "words:4:raise"})
    assert run.number == 2
    require_same(run, undisturbed)


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "fate",
    [
        *("step:1:die", "optimizer:1:die", "words:1:die", "step:5:die", "optimizer:10:die", "optimizer:11:die"),
        *("words:5:die", "copy:3:die", "save:1:die", "save:2:die", "commit:1:die", "evaluation:1:die"),
        *("words:6:raise", "optimizer:9:exit", "joining:1:die", "meeting:1:die"),
    ],
)
def test_any_rank_may_be_lost_at_any_moment(fate: str, rank: int, lead: Lead, undisturbed: Attempt) -> None:
    run = lead("pp=2,dp=2", {rank: fate}, **BF16)
    run.lead()
    assert run.number >= 1, run.story()
    require_same(run, undisturbed)


@pytest.mark.long
@pytest.mark.parametrize("second", ["joining:1:die", "meeting:1:die", "fetching:1:die", "restored:1:die", "step:1:die"])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_second_rank_may_be_lost_during_recovery(second: str, rank: int, lead: Lead, undisturbed: Attempt) -> None:
    run = lead("pp=2,dp=2", {rank: "optimizer:9:die"}, **BF16)
    run.lead({0: second})
    assert run.number == 2, run.story()
    require_same(run, undisturbed)

"""Uneven pipelines lose, replace and gain ranks at every moment of a step, and the losses are those of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bigsci_launch.cli.main import bsl

from .conftest import Attempt, Start
from .generations import Generations
from .rank_processes import StartRank
from .uneven_settings import OFF, UNEVEN

pytestmark = pytest.mark.torch

STEPS = 12
TOLERANCE = 1e-6
SETTINGS: dict[str, Any] = {"training": {"steps": STEPS}, "checkpoint": {"save_interval": STEPS}, **OFF}
SHARDED: dict[str, Any] = {**UNEVEN, "zero_stage": 1}
"""The tied embedding has four owners, so no rank has its whole state."""
Lead = Callable[..., Generations]


@pytest.fixture(scope="module")
def alone(finish: Start, tmp_path_factory: pytest.TempPathFactory) -> Attempt:
    return finish(tmp_path_factory.mktemp("alone"), **SETTINGS)


@pytest.fixture
def lead(start_rank: StartRank, dataset: Path, tmp_path: Path) -> Iterator[Lead]:
    """`lead({3: "backward:9:die"})` begins a run of 2 + 3 stages; see `programs/slot.py`."""
    led: list[Generations] = []

    def begin(suffering: dict[int, str], topology: str = "dp=5") -> Generations:
        run = Generations(start_rank, tmp_path / f"led{len(led)}", dataset, topology, parallelism=SHARDED, **SETTINGS)
        led.append(run)
        run.start(run.topology.world_size, suffering)
        run.begin()
        return run

    yield begin
    for each in led:
        each.close()


def until_lost(run: Generations) -> None:
    """Wait for a death, and end the generation."""
    run.until(lambda: bool(run._gone()), 120)
    run._retire(run._gone())
    run.end()


def finish_as(run: Generations, alone: Attempt) -> None:
    """Wait until the run has ended well, and compare it with the one process."""
    assert set(run.finish()) == {0}, run.story()
    found, wanted = run.attempt.steps(), alone.steps()
    assert sorted(found) == list(range(1, STEPS + 1)), run.story()
    for step, record in wanted.items():
        for key in ("loss", "grad_norm"):
            assert found[step][key] == pytest.approx(record[key], rel=TOLERANCE), (step, key)
        assert found[step]["consumed_samples"] == record["consumed_samples"]
    saved = [each.run.checkpoints / f"global_step{STEPS}" for each in (run.attempt, alone)]
    compared = CliRunner().invoke(bsl, ["diff-weights", *map(str, saved), "--tolerance", "1e-5"])
    assert compared.exit_code == 0, compared.output


def means(run: Generations) -> list[str]:
    """How the pipelines of each generation came about, as rank 0 has recorded it."""
    return [record["means"] for record in run.attempt.events(0, "pipeline")]


def test_a_run_replaces_shrinks_and_grows(lead: Lead, alone: Attempt) -> None:
    """A rank of 2 + 3 stages is replaced; another is lost: 2 + 2, with a borrowed rank; a fifth joins: 2 + 3 again."""
    run = lead({3: "backward:9:die"})
    until_lost(run)
    run.start(1)
    run.begin()
    run.until_step(4)
    run.kill(1)
    run.end()
    run.begin("dp=4")
    run.until_step(6)
    run.end()
    run.start(1)
    run.begin("dp=5")
    finish_as(run, alone)
    assert means(run) == ["composed", "recompose", "borrow", "recompose"]


def test_a_step_that_another_rank_has_taken_is_taken(lead: Lead, alone: Attempt) -> None:
    """Rank 4 sums three times in a step. After the last sum of step 3 it takes a peer for lost; the others take it."""
    run = lead({4: "agreed:9:lose"})
    run.until(lambda: bool(run.rank(4).said("lost")), 120)
    run.end()
    run.begin()
    finish_as(run, alone)
    # 2 on a machine so busy that no other rank had the sum when its generation ended.
    assert run.attempt.events(4, "restored")[1]["restored_step"] in (2, 3)
    assert means(run) == ["composed", "unchanged"]


def test_a_stage_of_two_ranks_loses_one(lead: Lead, alone: Attempt) -> None:
    """With tp 2, the other rank of the stage has no place then. Of 2 + 2 stages, three continue as one pipeline."""
    run = lead({5: "backward:9:die"}, "tp=2,dp=4")
    until_lost(run)
    run.begin("tp=2,dp=3")
    finish_as(run, alone)
    assert means(run) == ["composed", "merge"]


@pytest.mark.long
@pytest.mark.parametrize("moment", ["forward:14", "reduce:9", "apply:3", "words:3"])
def test_a_kill_at_any_moment_changes_nothing(lead: Lead, alone: Attempt, moment: str) -> None:
    run = lead({2: f"{moment}:die"})
    until_lost(run)
    run.begin("dp=4")
    finish_as(run, alone)


@pytest.mark.long
def test_two_lost_ranks_at_once_leave_a_copy_if_f_is_2(
    start_rank: StartRank, dataset: Path, tmp_path: Path, alone: Attempt
) -> None:
    """Three pipelines lose two of their first stages, and continue from memory; that f = 2 is lost is said."""
    sections = {**SETTINGS, "parallelism": UNEVEN, "survive": {"failures": 2}}
    run = Generations(start_rank, tmp_path, dataset, "dp=6", **sections)
    try:
        run.start(6)
        run.begin()
        run.until_step(3)
        run.kill(0, 2)
        run.end()
        run.begin("dp=4")
        finish_as(run, alone)
    finally:
        run.close()
    (first, second) = run.attempt.events(1, "pipeline")
    assert (first["failures"], second["failures"], second["wanted_failures"]) == (2, 1, 2)
    assert run.attempt.events(1, "restored")[-1]["source"] in ("memory", "buddies")
    assert "f = 2 cannot be kept" in run.story()


@pytest.mark.long
def test_shards_of_three_pipelines_outlive_a_rank(
    start_rank: StartRank, dataset: Path, tmp_path: Path, alone: Attempt
) -> None:
    """No rank has the whole state of any layer. One dies after its step, before the new weights are put together."""
    run = Generations(start_rank, tmp_path, dataset, "dp=6", parallelism=SHARDED, **SETTINGS)
    try:
        run.start(6, {3: "apply:3:die"})
        run.begin()
        until_lost(run)
        run.begin("dp=5")
        finish_as(run, alone)
    finally:
        run.close()
    assert run.attempt.events(0, "restored")[-1]["source"] in ("memory", "buddies")


@pytest.mark.long
def test_where_all_copies_are_lost_the_run_begins_again(lead: Lead, alone: Attempt) -> None:
    """Both first stages die: nothing holds the embedding, and there is no checkpoint yet."""
    run = lead({})
    run.until_step(3)
    run.replace(0, 2)
    finish_as(run, alone)
    restored = run.attempt.events(1, "restored")[-1]
    assert (restored["source"], restored["restored_step"]) == ("start", 0)
    assert restored["why"]

"""Every topology trains the same model: compares losses and gradient norms with one process, step by step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiers import with_long

pytestmark = pytest.mark.torch

TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=with_long([20, 50], [50]), ids="{} steps".format)
def num_steps(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def alone(num_steps: int, finish: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return finish(tmp_path_factory.mktemp("alone"), training={"steps": num_steps})


@pytest.fixture(scope="module")
def eight(num_steps: int, finish: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run guarded at every step: copies that differ by one bit would stop it."""
    training = {"steps": num_steps}
    return finish(tmp_path_factory.mktemp("eight"), "tp=2,pp=2,dp=2", training=training, guards={"interval": 1})


def assert_same(one: Any, other: Any, num_steps: int) -> None:
    mine, theirs = one.steps(), other.steps()
    assert sorted(mine) == sorted(theirs) == list(range(1, num_steps + 1))
    for step in mine:
        for key in ("loss", "grad_norm"):
            assert theirs[step][key] == pytest.approx(mine[step][key], rel=TOLERANCE), (step, key)
        assert theirs[step]["consumed_samples"] == mine[step]["consumed_samples"]


def test_eight_ranks_train_as_one(num_steps: int, alone: Any, eight: Any) -> None:
    assert_same(alone, eight, num_steps)


def test_the_model_learns(num_steps: int, alone: Any) -> None:
    steps = alone.steps()
    assert steps[1]["loss"] == pytest.approx(5.704, abs=0.05)  # log 300: padding does not count
    assert steps[num_steps]["loss"] < steps[1]["loss"] - 0.002 * num_steps


def test_clipping_took_part(alone: Any) -> None:
    """Otherwise the comparison would say nothing about the clipping norm."""
    assert max(step["grad_norm"] for step in alone.steps().values()) > 0.5


def test_one_rank_of_the_last_stage_tells(num_steps: int, eight: Any) -> None:
    """Ranks are ordered by tp, then dp, then pp: dp0 pp1 tp0 of 2 x 2 x 2 is rank 4."""
    lines = {rank: re.findall(r"(?m)^ iteration .*$", eight.log(rank)) for rank in range(8)}
    assert [rank for rank in lines if lines[rank]] == [4]
    assert len(lines[4]) == num_steps
    assert [rank for rank in range(8) if eight.events(rank, "step")] == [4]
    # A tp rank has 512/2 rows of the table, 32 positions, and in two layers half the matrices and biases, all norms.
    expected = "stage 0: VocabularyEmbedding, LearnedPositions, 2 x TransformerLayer; 22112 parameters a rank"
    assert expected in eight.log(4)


def test_ranks_say_nothing_else(eight: Any) -> None:
    """Messages of DeepSpeed and torch are kept out of the logs."""
    for rank in range(8):
        if rank != 4:
            assert eight.log(rank) == "", rank


def test_every_rank_leaves_its_phases(num_steps: int, eight: Any) -> None:
    for rank in range(8):
        records = eight.events(rank)
        first, last = records[0], records[-1]
        assert (first["kind"], first["world_size"]) == ("start", 8)
        assert first["coordinate"] == {"pp": rank // 4, "dp": rank // 2 % 2, "tp": rank % 2}
        assert (last["kind"], last["reason"]) == ("end", "finished")
        phases = [record["phase"] for record in records if record["kind"] == "heartbeat"]
        assert phases == ["init", "load", "init", *["step"] * num_steps, "save", "end"]


CASES = {
    "untied, activation checkpointing, own cut": (
        "pp=2",
        {
            "model": {"tied_embeddings": False},
            "training": {"steps": 6, "activation_checkpointing": True},
            "parallelism_method": "memory:3,1",
        },
    ),
    "ramp-up over dp": (
        "dp=2",
        {"training": {"steps": 8, "rampup": {"start": 4, "increment": 4, "samples": 40}}},
    ),
    # Ranks that differ only in tp drop the same elements, so even dropout gives the same losses.
    "tp, odd vocabulary, dropout": (
        "tp=2",
        {"training": {"steps": 6}, "model": {"vocab_size": 301, "vocab_size_multiple": 64, "dropout": 0.1}},
    ),
}


POSITIONS: dict[str, dict[str, Any]] = {
    "rotary": {"model": {"positions": "rotary", "embedding_norm": True}, "training": {"steps": 8}},
    "alibi": {"model": {"positions": "alibi", "tied_embeddings": False}, "training": {"steps": 8}},
}
FURTHER = ("rotary",)
"""test_sequence_parallel.py and test_model_choices.py train with rotary positions on two ranks and one."""


@pytest.fixture(scope="module")
def references(train_several: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Each case trained by one process, the same process for all cases."""
    cases = {name: sections for name, (_, sections) in CASES.items()} | POSITIONS
    plain = [
        (name, {key: sections[key] for key in sections if key != "parallelism_method"})
        for name, sections in cases.items()
    ]
    return train_several(tmp_path_factory.mktemp("one"), "tp=1", plain, further=FURTHER)


@pytest.fixture(scope="module")
def positions(train_several: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    guarded = [(name, {**sections, "guards": {"interval": 1}}) for name, sections in POSITIONS.items()]
    return train_several(tmp_path_factory.mktemp("positions"), "tp=2,pp=2,dp=2", guarded, further=FURTHER)


@pytest.mark.parametrize("name", with_long(POSITIONS, FURTHER))
def test_eight_ranks_know_positions_as_one(name: str, references: Any, positions: Any) -> None:
    assert_same(references[name], positions[name], 8)


@pytest.mark.long  # test_positions.py holds what each kind computes
def test_positions_matter(references: Any) -> None:
    """Each kind gives other losses, so each has an effect."""
    losses = {references[name].steps()[8]["loss_hex"] for name in POSITIONS}
    assert len(losses) == len(POSITIONS)


@pytest.mark.parametrize("case", CASES)
def test_each_axis_trains_as_one(case: str, references: Any, finish: Any, tmp_path: Path) -> None:
    topology, sections = CASES[case]
    sections = dict(sections)
    method = sections.pop("parallelism_method", "type:transformer|embedding")
    one = references[case]
    other = finish(tmp_path / "other", topology, parallelism={"partition_method": method}, **sections)
    assert_same(one, other, sections["training"]["steps"])
    if method == "memory:3,1":
        assert "\nstage 1: TransformerLayer, FinalNorm, OutputEmbedding; " in other.log(1)
    if "rampup" in sections["training"]:
        assert [step["global_batch_size"] for step in one.steps().values()] == [4, 4, 4, 4, 8, 8, 12, 16]

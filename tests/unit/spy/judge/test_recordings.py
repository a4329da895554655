"""The verdict on recorded hangs: the right rank, or nobody; never an innocent one."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from bigsci_launch.spy.evidence.ranks import Evidence
from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.taxonomy import HangClass

Recorded = Callable[..., Evidence]

VERDICTS = {
    "skip-0": ("hang", HangClass.COLLECTIVE_SKIPPED, [0]),
    "skip-1": ("hang", HangClass.COLLECTIVE_SKIPPED, [1]),
    "skip-3": ("hang", HangClass.COLLECTIVE_SKIPPED, [3]),
    "left-3": ("hang", HangClass.LEFT_EARLY, [3]),
    "type-0": ("hang", HangClass.OPERATION_DIFFERS, [0]),
    "type-1": ("hang", HangClass.OPERATION_DIFFERS, [1]),
    "order-1": ("hang", HangClass.GROUP_ORDER_DIFFERS, [1, 2]),
    "split-1": ("hang", HangClass.PHASES_SPLIT, []),
    "receive-1": ("hang", HangClass.MESSAGES_NEVER_MEET, []),
    "loader-2": ("hang", HangClass.BLOCKED_IN_C, [2]),
    "spin-0": ("hang", HangClass.PYTHON_NEVER_ENDS, [0]),
    "gil-1": ("hang", HangClass.BLOCKED_WITH_GIL, [1]),
    "stop-1": ("hang", HangClass.PROCESS_STOPPED, [1]),
    "thread-1": ("hang", HangClass.BLOCKED_IN_C, [1]),
    "dead-1": ("crashed", HangClass.RANK_EXITED, [1]),
    "healthy-1": ("progressing", None, []),
    "slow-1": ("slow", HangClass.STRAGGLER_SLEEPS, [1]),
}


@pytest.mark.parametrize("topology", [None, "tp=2,dp=2"])
@pytest.mark.parametrize("name", VERDICTS)
def test_the_verdict_on_four_gloo_ranks(recorded: Recorded, name: str, topology: str | None) -> None:
    conclusion = judge(recorded(name, topology))
    suspects = [suspect.rank for suspect in conclusion.suspects]
    assert (conclusion.state.value, conclusion.hang_class, suspects) == VERDICTS[name], conclusion.claim


@pytest.mark.parametrize("topology", [None, "tp=2,dp=2"])
@pytest.mark.parametrize("name", VERDICTS)
def test_without_a_recorder_nobody_innocent_is_accused(recorded: Recorded, name: str, topology: str | None) -> None:
    state, _, guilty = VERDICTS[name]
    conclusion = judge(recorded(name, topology, without=("recorder",)))
    # Without numbers of collectives, nothing shows that the slow rank ever comes.
    assert conclusion.state.value == ("waiting" if state == "slow" else state), conclusion.claim
    assert {suspect.rank for suspect in conclusion.suspects} <= set(guilty), conclusion.claim


@pytest.mark.parametrize("name", ["loader-2", "spin-0", "gil-1", "stop-1", "dead-1"])
def test_a_rank_outside_of_any_collective_is_named_from_stacks_alone(recorded: Recorded, name: str) -> None:
    conclusion = judge(recorded(name, without=("recorder",)))
    assert [suspect.rank for suspect in conclusion.suspects] == VERDICTS[name][2]


@pytest.mark.parametrize("name", ["deepspeed-skip-5", "deepspeed-guards-5"])
def test_the_rank_that_skipped_in_a_deepspeed_pipeline(recorded: Recorded, name: str) -> None:
    """Eight ranks hang in six different places; the rank that left is not the one that is alone in its place."""
    evidence = recorded(name, "tp=2,pp=2,dp=2")
    conclusion = judge(evidence)
    assert [suspect.rank for suspect in conclusion.suspects] == [5]
    assert conclusion.hang_class == HangClass.COLLECTIVE_SKIPPED
    assert conclusion.confidence >= 0.9
    assert "rank 5 (n0, dp0 pp1 tp1) left out all_reduce" in conclusion.claim
    assert "tensor-parallel group (ranks 4-5)" in conclusion.claim
    assert "rank 4 (n0, dp0 pp1 tp0) waits for it, and 7 of 8 ranks wait in total" in conclusion.claim


def test_the_same_hang_from_stacks_alone_accuses_nobody_and_shows_the_circle(recorded: Recorded) -> None:
    conclusion = judge(recorded("deepspeed-skip-5", "tp=2,pp=2,dp=2", without=("recorder",)))
    assert conclusion.suspects == ()
    assert {rank for side in conclusion.sides for rank in side.ranks} == {0, 1, 4, 5}
    circle = "a circle: rank 0 waits for rank 4, which waits for rank 5, which waits for rank 1"
    assert any(line.startswith(circle) for line in conclusion.evidence)


def test_a_shuffled_recording_gives_the_same_verdict(recorded: Recorded) -> None:
    evidence = recorded("deepspeed-skip-5", "tp=2,pp=2,dp=2")
    ranks = list(evidence.ranks)
    for seed in range(5):
        random.Random(seed).shuffle(ranks)
        shuffled = Evidence(
            evidence.job, evidence.world_size, evidence.topology, tuple(ranks), evidence.nodes_silent, evidence.problems
        )
        assert judge(shuffled).claim == judge(evidence).claim

"""The verdict on recorded hangs: the right rank, or nobody; never an innocent one."""

from __future__ import annotations

import random
import re

import pytest

from bigsci_launch.spy.evidence.ranks import Evidence
from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.taxonomy import HangClass
from tests.support.texts import has_parts

from ..conftest import accused, outcome, recorded_evidence

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
def test_the_verdict_on_four_gloo_ranks(name: str, topology: str | None) -> None:
    conclusion = judge(recorded_evidence(name, topology))
    suspects = accused(conclusion)
    assert (conclusion.state.value, conclusion.hang_class, suspects) == VERDICTS[name], conclusion.claim


@pytest.mark.parametrize("topology", [None, "tp=2,dp=2"])
@pytest.mark.parametrize("name", VERDICTS)
def test_without_a_recorder_nobody_innocent_is_accused(name: str, topology: str | None) -> None:
    state, _, guilty = VERDICTS[name]
    conclusion = judge(recorded_evidence(name, topology, without=("recorder",)))
    # Without numbers of collectives, nothing shows that the slow rank ever comes.
    assert conclusion.state.value == ("waiting" if state == "slow" else state), conclusion.claim
    assert {suspect.rank for suspect in conclusion.suspects} <= set(guilty), conclusion.claim


@pytest.mark.parametrize("name", ["loader-2", "spin-0", "gil-1", "stop-1", "dead-1"])
def test_a_rank_outside_of_any_collective_is_named_from_stacks_alone(name: str) -> None:
    assert accused(judge(recorded_evidence(name, without=("recorder",)))) == VERDICTS[name][2]


@pytest.mark.parametrize("name", ["deepspeed-skip-5", "deepspeed-guards-5"])
def test_the_rank_that_skipped_in_a_deepspeed_pipeline(name: str) -> None:
    """Eight ranks hang in six different places; the rank that left is not the one that is alone in its place."""
    evidence = recorded_evidence(name, "tp=2,pp=2,dp=2")
    conclusion = judge(evidence)
    assert outcome(conclusion) == ("hang", HangClass.COLLECTIVE_SKIPPED, [5])
    assert conclusion.confidence >= 0.9
    assert has_parts(conclusion.claim, "rank 5 (n0, dp0 pp1 tp1)", "tensor-parallel group (ranks 4-5)")
    assert has_parts(conclusion.claim, "rank 4 (n0, dp0 pp1 tp0)", "7 of 8 ranks")


def test_the_same_hang_from_stacks_alone_accuses_nobody_and_shows_the_circle() -> None:
    conclusion = judge(recorded_evidence("deepspeed-skip-5", "tp=2,pp=2,dp=2", without=("recorder",)))
    assert conclusion.suspects == ()
    assert {rank for side in conclusion.sides for rank in side.ranks} == {0, 1, 4, 5}
    circles = [re.findall(r"rank (\d)", line) for line in conclusion.evidence if "circle" in line]
    assert [circle[:4] for circle in circles] == [["0", "4", "5", "1"]]


def test_a_shuffled_recording_gives_the_same_verdict() -> None:
    evidence = recorded_evidence("deepspeed-skip-5", "tp=2,pp=2,dp=2")
    ranks = list(evidence.ranks)
    for seed in range(5):
        random.Random(seed).shuffle(ranks)
        shuffled = Evidence(
            evidence.job, evidence.world_size, evidence.topology, tuple(ranks), evidence.nodes_silent, evidence.problems
        )
        assert judge(shuffled).claim == judge(evidence).claim

"""Some ranks are in a collective that most have left: both sides are shown, and nobody is accused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bigsci_launch.spy.evidence.ranks import Evidence
from bigsci_launch.spy.judge.rules.left_behind import where_words
from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.taxonomy import HangClass

MakeRank = Callable[..., dict[str, Any]]
MakeEvidence = Callable[..., Evidence]

STEP = "train_step@/src/training.py:4 < train@/src/training.py:20"
IN_LOSS = f"broadcast@c10d:1 < _aggregate_total_loss@engine:540 < {STEP}"
BEYOND = "train@/src/training.py:25"
TP2_DP4 = "tp=2,dp=4"


def test_two_sides_and_nobody_accused(make_evidence: MakeEvidence, make_rank: MakeRank) -> None:
    ranks = [make_rank(rank, IN_LOSS if rank in (1, 3) else BEYOND) for rank in range(8)]
    conclusion = judge(make_evidence(ranks))
    assert (conclusion.state.value, conclusion.hang_class, conclusion.suspects) == ("hang", HangClass.PHASES_SPLIT, ())
    assert [side.ranks for side in conclusion.sides] == [(1, 3), (0, 2, 4, 5, 6, 7)]
    assert "have left train_step and are in train (training.py:25)" in conclusion.claim
    assert conclusion.evidence == ("2 ranks wait for members of their groups that are on the larger side",)


def test_an_earlier_line_is_not_said_to_be_later(make_evidence: MakeEvidence, make_rank: MakeRank) -> None:
    ranks = [make_rank(rank, IN_LOSS if rank < 2 else "train@/src/training.py:15") for rank in range(8)]
    claim = judge(make_evidence(ranks)).claim
    assert "are in train (training.py:15)" in claim
    assert "have left" not in claim


REASONS = {
    "stopped": {"state": "T"},
    "asleep": {"wchan": "hrtimer_nanosleep"},
    "computing, and waited for": {"cpu_ticks": (0, 200)},
}


@pytest.mark.parametrize("reason", REASONS.values(), ids=REASONS)
def test_ranks_with_a_reason_of_their_own_are_not_a_side(
    make_evidence: MakeEvidence, make_rank: MakeRank, reason: dict[str, Any]
) -> None:
    ranks = [make_rank(rank, IN_LOSS) if rank < 2 else make_rank(rank, BEYOND, **reason) for rank in range(8)]
    assert judge(make_evidence(ranks)).hang_class != HangClass.PHASES_SPLIT


def test_ranks_that_spin_are_a_side_where_nobody_waits_for_them(
    make_evidence: MakeEvidence, make_rank: MakeRank
) -> None:
    """tp2 x pp2 x dp2: both stages of tp1, dp0 are in their broadcast; on GPUs both sides spin."""
    spinning = {"state": "R", "wchan": "0", "cpu_ticks": (0, 100)}
    ranks = [make_rank(rank, IN_LOSS if rank in (1, 5) else BEYOND, **spinning) for rank in range(8)]
    conclusion = judge(make_evidence(ranks, "tp=2,pp=2,dp=2"))
    assert (conclusion.hang_class, conclusion.suspects) == (HangClass.PHASES_SPLIT, ())
    assert "2 ranks (dp0 tp1" in conclusion.claim
    assert (
        "all members of the groups that these 2 wait in have arrived: no rank is missing there" in conclusion.evidence
    )


def test_one_rank_elsewhere_is_accused_in_place_of_the_two_sides(
    make_evidence: MakeEvidence, make_rank: MakeRank
) -> None:
    odd = make_rank(7, "load@/src/data.py:3", state="T")
    ranks = [*(make_rank(rank, IN_LOSS if rank < 2 else BEYOND) for rank in range(7)), odd]
    conclusion = judge(make_evidence(ranks))
    assert conclusion.hang_class != HangClass.PHASES_SPLIT


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([1, 3, 5, 7], "4 ranks (tp1; 1 of 2 on each of 4 nodes)"),
        ([0, 1], "2 ranks (dp0)"),
        ([0, 1, 4, 5], "4 ranks (dp0,2; all 2 on each of 2 nodes)"),
        ([0, 3, 4], "3 ranks (1 of 2 on each of 3 nodes)"),
        ([0, 1, 2], "3 ranks"),
        ([6], "1 rank (dp3 pp0 tp0)"),
    ],
)
def test_which_part_of_the_layout_some_ranks_are(
    make_evidence: MakeEvidence, make_rank: MakeRank, ranks: list[int], words: str
) -> None:
    evidence = make_evidence([make_rank(rank, BEYOND) for rank in range(8)], TP2_DP4)
    assert where_words(evidence, ranks) == words

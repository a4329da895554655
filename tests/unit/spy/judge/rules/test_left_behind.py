"""Some ranks are in a collective that most have left: both sides are shown, and nobody is accused."""

from __future__ import annotations

from typing import Any

import pytest

from bigsci_launch.spy.judge.rules.left_behind import where_text
from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.taxonomy import HangClass
from tests.support.texts import has_parts

from ...conftest import make_evidence, outcome, rank_of

STEP = "train_step@/src/training.py:4 < train@/src/training.py:20"
IN_LOSS = f"broadcast@c10d:1 < _aggregate_total_loss@engine:540 < {STEP}"
BEYOND = "train@/src/training.py:25"
TP2_DP4 = "tp=2,dp=4"


def test_two_sides_and_nobody_accused() -> None:
    ranks = [rank_of(rank, IN_LOSS if rank in (1, 3) else BEYOND) for rank in range(8)]
    conclusion = judge(make_evidence(ranks))
    assert outcome(conclusion) == ("hang", HangClass.PHASES_SPLIT, [])
    assert [side.ranks for side in conclusion.sides] == [(1, 3), (0, 2, 4, 5, 6, 7)]
    assert has_parts(conclusion.claim, "train_step", "train (training.py:25)")
    assert [has_parts(line, "2 ranks") for line in conclusion.evidence] == [True]


def test_an_earlier_line_is_not_said_to_be_later() -> None:
    ranks = [rank_of(rank, IN_LOSS if rank < 2 else "train@/src/training.py:15") for rank in range(8)]
    claim = judge(make_evidence(ranks)).claim
    assert "are in train (training.py:15)" in claim
    assert "train_step" not in claim


REASONS = {
    "stopped": {"state": "T"},
    "asleep": {"wchan": "hrtimer_nanosleep"},
    "computing, and waited for": {"cpu_ticks": (0, 200)},
}


@pytest.mark.parametrize("reason", REASONS.values(), ids=REASONS)
def test_ranks_with_a_reason_of_their_own_are_not_a_side(reason: dict[str, Any]) -> None:
    ranks = [rank_of(rank, IN_LOSS) if rank < 2 else rank_of(rank, BEYOND, **reason) for rank in range(8)]
    assert judge(make_evidence(ranks)).hang_class != HangClass.PHASES_SPLIT


def test_ranks_that_spin_are_a_side_where_nobody_waits_for_them() -> None:
    """tp2 x pp2 x dp2: both stages of tp1, dp0 are in their broadcast; on GPUs both sides spin."""
    spinning = {"state": "R", "wchan": "0", "cpu_ticks": (0, 100)}
    ranks = [rank_of(rank, IN_LOSS if rank in (1, 5) else BEYOND, **spinning) for rank in range(8)]
    conclusion = judge(make_evidence(ranks, "tp=2,pp=2,dp=2"))
    assert (conclusion.hang_class, conclusion.suspects) == (HangClass.PHASES_SPLIT, ())
    assert "2 ranks (dp0 tp1" in conclusion.claim
    assert any("these 2" in line for line in conclusion.evidence)


def test_one_rank_elsewhere_is_accused_in_place_of_the_two_sides() -> None:
    odd = rank_of(7, "load@/src/data.py:3", state="T")
    ranks = [*(rank_of(rank, IN_LOSS if rank < 2 else BEYOND) for rank in range(7)), odd]
    assert judge(make_evidence(ranks)).hang_class != HangClass.PHASES_SPLIT


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
def test_which_part_of_the_layout_some_ranks_are(ranks: list[int], words: str) -> None:
    assert where_text(make_evidence([rank_of(rank, BEYOND) for rank in range(8)], TP2_DP4), ranks) == words

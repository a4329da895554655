"""A skipped collective, found from sequence numbers alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from bigsci_launch.spy.evidence.ranks import Evidence
from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.taxonomy import HangClass

MakeRank = Callable[..., dict[str, Any]]
MakeEvidence = Callable[..., Evidence]
MEMBERS = {"t0": [0, 1], "t1": [2, 3], "w": [0, 1, 2, 3]}
WAITING = "all_reduce@c10d:1 < step@/src/loop.py:9"
ROUND = "t t t t t t w "


def hang(make_rank: MakeRank, make_evidence: MakeEvidence, newest: list[str], ring: int, before: str = "") -> Evidence:
    """Four ranks after nine rounds whose recorders keep the newest `ring` collectives; two groups of two."""
    ranks = []
    for rank, calls in enumerate(newest):
        words = re.sub(r"\bt\b", f"t{rank // 2}", before + ROUND * 9 + calls)
        document = make_rank(rank, WAITING, calls=words, members=MEMBERS)
        recorder = document["samples"][-1]["recorder"]
        lost = max(0, len(recorder["stream"]) - ring)
        recorder["stream"] = recorder["stream"][lost:]
        recorder["open"] = [position - lost for position in recorder["open"]]
        recorder["first_record"] = lost
        ranks.append(document)
    return make_evidence(ranks, "tp=2,dp=2")


SKIPPED = ["t t t t t t!", "t t t t t w!", "t t t t t t w!", "t t t t t t w!"]


def accused(evidence: Evidence) -> list[int]:
    return [suspect.rank for suspect in judge(evidence).suspects]


@pytest.mark.parametrize("ring", [8, 12, 100])
def test_the_rank_whose_round_lacks_one_is_named(make_rank: MakeRank, make_evidence: MakeEvidence, ring: int) -> None:
    conclusion = judge(hang(make_rank, make_evidence, SKIPPED, ring))
    assert [suspect.rank for suspect in conclusion.suspects] == [1]
    assert conclusion.hang_class == HangClass.COLLECTIVE_SKIPPED
    assert "rank 1 (n0, dp0 pp0 tp1) left out all_reduce number 60 of the tensor-parallel group" in conclusion.claim


def test_a_ring_that_shows_no_end_of_a_round_tells_nothing(make_rank: MakeRank, make_evidence: MakeEvidence) -> None:
    assert accused(hang(make_rank, make_evidence, SKIPPED, 5)) == []


def test_rounds_that_may_differ_tell_nothing(make_rank: MakeRank, make_evidence: MakeEvidence) -> None:
    """Collectives at the start make the numbers uneven: the number per round is then unknown."""
    assert accused(hang(make_rank, make_evidence, SKIPPED, 8, before="t t ")) == []


def test_a_rank_that_waits_for_one_more_than_a_round_has_accuses_nobody(
    make_rank: MakeRank, make_evidence: MakeEvidence
) -> None:
    extra = ["t t t t t t t!", "t t t t t t w!", "t t t t t t w!", "t t t t t t w!"]
    assert accused(hang(make_rank, make_evidence, extra, 8)) in ([], [0])


def test_another_operation_than_ever_before_accuses_nobody(make_rank: MakeRank, make_evidence: MakeEvidence) -> None:
    other = ["t t t t t t:broadcast!", *SKIPPED[1:]]
    assert accused(hang(make_rank, make_evidence, other, 8)) == []

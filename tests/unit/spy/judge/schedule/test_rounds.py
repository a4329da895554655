"""A skipped collective, found from sequence numbers alone."""

from __future__ import annotations

import re

import pytest

from bigsci_launch.spy.evidence.ranks import Evidence
from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.taxonomy import HangClass
from tests.support.texts import has_parts

from ...conftest import accused, make_evidence, outcome, rank_of

MEMBERS = {"t0": [0, 1], "t1": [2, 3], "w": [0, 1, 2, 3]}
WAITING = "all_reduce@c10d:1 < step@/src/loop.py:9"
ROUND = "t t t t t t w "


def hang(newest: list[str], ring: int, before: str = "") -> Evidence:
    """Four ranks after nine rounds whose recorders keep the newest `ring` collectives; two groups of two."""
    ranks = []
    for rank, calls in enumerate(newest):
        words = re.sub(r"\bt\b", f"t{rank // 2}", before + ROUND * 9 + calls)
        document = rank_of(rank, WAITING, calls=words, members=MEMBERS)
        recorder = document["samples"][-1]["recorder"]
        lost = max(0, len(recorder["stream"]) - ring)
        recorder["stream"] = recorder["stream"][lost:]
        recorder["open"] = [position - lost for position in recorder["open"]]
        recorder["first_record"] = lost
        ranks.append(document)
    return make_evidence(ranks, "tp=2,dp=2")


SKIPPED = ["t t t t t t!", "t t t t t w!", "t t t t t t w!", "t t t t t t w!"]


@pytest.mark.parametrize("ring", [8, 12, 100])
def test_the_rank_whose_round_lacks_one_is_named(ring: int) -> None:
    conclusion = judge(hang(SKIPPED, ring))
    assert outcome(conclusion) == ("hang", HangClass.COLLECTIVE_SKIPPED, [1])
    assert has_parts(conclusion.claim, "rank 1 (n0, dp0 pp0 tp1)", "all_reduce number 60", "tensor-parallel")


def test_a_ring_that_shows_no_end_of_a_round_tells_nothing() -> None:
    assert accused(judge(hang(SKIPPED, 5))) == []


def test_rounds_that_may_differ_tell_nothing() -> None:
    """Collectives at the start make the numbers uneven: the number per round is then unknown."""
    assert accused(judge(hang(SKIPPED, 8, before="t t "))) == []


def test_a_rank_that_waits_for_one_more_than_a_round_has_accuses_nobody() -> None:
    extra = ["t t t t t t t!", "t t t t t t w!", "t t t t t t w!", "t t t t t t w!"]
    assert accused(judge(hang(extra, 8))) in ([], [0])


def test_another_operation_than_ever_before_accuses_nobody() -> None:
    other = ["t t t t t t:broadcast!", *SKIPPED[1:]]
    assert accused(judge(hang(other, 8))) == []

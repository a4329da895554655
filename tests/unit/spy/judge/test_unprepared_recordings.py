"""The verdict on recordings of jobs that `bsl` did not start: stacks and /proc alone, no recorded collectives.

Of real runs, as the recordings in `zoo/`. Stacks seldom show over which ranks a collective goes: what cannot be known
from them must not be claimed, of a rank as little as of a network or of a root.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bigsci_launch.spy.evidence.bundle import Bundle
from bigsci_launch.spy.judge.conclusion import Conclusion, Strength
from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.taxonomy import HangClass
from tests.support.texts import has_parts

from ..conftest import accused, an_hour_later, rank_of
from .small_cases import job

UNPREPARED = Path(__file__).parents[1] / "recordings" / "unprepared"
VERDICTS: dict[str, tuple[str, str | None, list[int]]] = {
    "H01-4-ranks-culprit-0": ("hang", None, []),
    "H06-4-ranks-culprit-1": ("hang", HangClass.ROOT_DIFFERS, []),
    "H07-4-ranks-culprit-3": ("hang", None, []),
    "H10-4-ranks-culprit-0": ("hang", None, []),
    "H17-4-ranks-culprit-3": ("hang", HangClass.BLOCKED_IN_C, [3]),
    "async-4-ranks-culprit-0": ("hang", None, []),
}
"""State, class and suspects."""


def judged(name: str, topology: bool = True) -> Conclusion:
    document = an_hour_later(json.loads((UNPREPARED / f"{name}.json").read_text()))
    if not topology:
        document["collection"]["topology"] = None
    evidence = Bundle(document["collection"], tuple(document["nodes"])).evidence()
    assert not any(seen.recorder for seen in evidence.ranks)
    return judge(evidence)


@pytest.mark.parametrize("topology", [True, False])
@pytest.mark.parametrize("name", VERDICTS)
def test_what_stacks_alone_tell(name: str, topology: bool) -> None:
    conclusion = judged(name, topology)
    suspects = accused(conclusion)
    assert (conclusion.state.value, conclusion.hang_class, suspects) == VERDICTS[name], conclusion.claim


def test_every_recording_is_judged() -> None:
    assert {path.stem for path in UNPREPARED.glob("*.json")} == set(VERDICTS)


def test_a_root_that_stacks_alone_name_is_claimed_with_doubt() -> None:
    assert judged("H06-4-ranks-culprit-1").strength is Strength.GUESS


def test_one_helper_in_two_groups_is_no_fault_of_the_network() -> None:
    """H07: all are in the same helper, which two of them called for a different group than the others."""
    conclusion = judged("H07-4-ranks-culprit-3")
    assert conclusion.hang_class is None
    assert has_parts(conclusion.claim, "reduce_from_tensor_model_parallel_region", "allreduce_gradients")
    assert conclusion.next[0].startswith("bsl spy --flight-recorder=fork")


def test_two_groups_with_a_root_each_do_not_disagree() -> None:
    """H10: two groups of two ranks with a root each; the other member of each group is elsewhere."""
    assert "root" not in judged("H10-4-ranks-culprit-0").claim


def test_successive_scatters_of_a_loop_do_not_disagree() -> None:
    """Each rank scatters in turn. Rank 3 never comes, so each root waits in its own turn for rank 3 to take part."""
    ranks = [rank_of(rank, "scatter@c10d:9 < exchange@/src/views.py:31") for rank in range(3)]
    for rank in ranks:
        for sample in rank["samples"]:
            sample["stack"]["threads"][0]["frames"][0]["arguments"] = {"src": rank["rank"], "group_src": rank["rank"]}
    assert judge(job(ranks)).hang_class is HangClass.ROOT_DIFFERS
    conclusion = judge(job([*ranks, rank_of(3, "all_reduce@c10d:1 < average@/src/views.py:40")]))
    assert conclusion.hang_class is not HangClass.ROOT_DIFFERS
    assert "root" not in conclusion.claim


def test_who_waits_for_an_asynchronous_collective_is_shown_and_not_accused() -> None:
    """Rank 0 skipped the collective; its peer, rank 2, is the only rank in `Work.wait()`."""
    conclusion = judged("async-4-ranks-culprit-0")
    assert has_parts(conclusion.claim, "rank 2 (n0, dp1 pp0 tp0)", "reduce_behind_the_back (gloo_ranks.py:113)")
    assert [side.ranks for side in conclusion.sides] == [(0, 1, 3), (2,)]

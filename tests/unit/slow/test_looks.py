"""Who is named from looks: a rank that surely waits less than its peers, and none before that is sure."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from bigsci_launch.slow.looks import WANTED_SHARE, judge_looks, seconds_needed, student
from bigsci_launch.slow.looks_read import LookedRank
from bigsci_launch.slow.straggler import StepPhase

SEGMENT_S, SEGMENTS, LOOKS = 5.0, 12, 200
SECONDS = SEGMENT_S * SEGMENTS
Work = Mapping[tuple[StepPhase, str | None], float]


def looked(
    rank: int, wait: float, noise: float = 0.03, *, work: Work | None = None, segments: int = SEGMENTS, seed: int = 0
) -> LookedRank:
    """A rank that waits for this share of the time; the rest is a forward pass unless `work` says otherwise."""
    chance = random.Random(f"{rank}-{seed}")
    waits = tuple(min(1.0, max(0.0, chance.gauss(wait, noise))) for _ in range(segments))
    return LookedRank(
        rank, f"n{rank // 8}", waits, work or {(StepPhase.FORWARD, "f"): 1 - wait}, LOOKS * segments, 0.01, 0.3
    )


def job(waits: Sequence[float], noise: float = 0.03, seed: int = 0) -> list[LookedRank]:
    return [looked(rank, wait, noise, seed=seed) for rank, wait in enumerate(waits)]


def test_the_rank_that_waits_least_is_named_with_an_interval() -> None:
    answer = judge_looks(job([0.4, 0.4, 0.2, 0.42]), SECONDS)
    (found,) = answer.stragglers
    assert (found.ranks, found.phase, found.site, found.nodes) == ((2,), StepPhase.FORWARD, "f", ("n0",))
    low, share, high = found.cost.share_low, found.cost.share, found.cost.share_high
    assert low is not None and share is not None and high is not None and low < share < high
    assert low < 0.2 < high and answer.undecided is None


def test_a_whole_node_is_named() -> None:
    answer = judge_looks(job([0.4] * 16 + [0.2] * 8 + [0.4] * 40), SECONDS)
    assert [(each.ranks, each.nodes) for each in answer.stragglers] == [(tuple(range(16, 24)), ("n2",))]


def test_ranks_that_wait_alike_are_named_in_less_than_one_job_of_20() -> None:
    named = [bool(judge_looks(job([0.4] * 8, seed=seed), SECONDS).stragglers) for seed in range(200)]
    assert sum(named) <= 3, "the difference must be above 2 % too"


def test_none_is_slow_only_if_one_would_have_been_found() -> None:
    assert judge_looks(job([0.4] * 4), SECONDS).undecided is None
    noisy = judge_looks(job([0.4] * 4, noise=0.2), SECONDS)
    assert not noisy.stragglers and noisy.undecided is not None and "--for" in noisy.undecided


def test_how_long_to_look_is_enough_four_times_of_five() -> None:
    needed = [seconds_needed(job([0.4] * 4, 0.08, seed), SECONDS) for seed in range(40)]
    segments = round(sorted(needed)[20] / SEGMENT_S)
    found = 0
    for seed in range(60):
        waits = [0.4, 0.4 - WANTED_SHARE, 0.4, 0.4]
        ranks = [looked(rank, wait, 0.08, segments=segments, seed=seed) for rank, wait in enumerate(waits)]
        found += bool(judge_looks(ranks, segments * SEGMENT_S).stragglers)
    assert 35 <= found <= 58, "each of the three others is compared, so that it is a little less"


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(job([0.4]), id="one rank"),
        pytest.param(job([1.0, 1.0, 0.0, 1.0], noise=0.0), id="none moves"),
        pytest.param([looked(rank, wait, segments=5) for rank, wait in enumerate([0.5, 0.1, 0.5])], id="too short"),
        pytest.param(job([0.0] * 4, noise=0.0), id="no wait was seen"),
        pytest.param([replace(each, passes_messages=True) for each in job([0.5, 0.1, 0.5])], id="unknown pipeline"),
    ],
)
def test_who_is_not_named(ranks: list[LookedRank]) -> None:
    answer = judge_looks(ranks, SECONDS)
    assert answer.undecided and not answer.stragglers and not answer.imbalances


def test_ranks_are_compared_in_segments_in_which_both_were_seen() -> None:
    """What changes for all at the same time tells nothing; shifted by a segment, it would hide the difference."""
    usual = [0.2, 0.8] * 6
    waits = {rank: tuple(share - (0.1 if rank == 2 else 0.0) for share in usual) for rank in range(4)}
    ranks = [replace(looked(rank, 0.5), waits=waits[rank]) for rank in range(4)]
    ranks[1] = replace(ranks[1], waits=(None, *waits[1][1:]))
    assert [each.ranks for each in judge_looks(ranks, SECONDS).stragglers] == [(2,)]
    seldom = [*ranks[:3], replace(ranks[3], waits=(*[None] * 7, *waits[3][7:]))]
    assert judge_looks(seldom, SECONDS).undecided


def test_a_stage_with_more_work_is_no_slow_rank_and_a_slow_rank_of_a_stage_is() -> None:
    stages = [replace(each, stage=each.rank // 4, passes_messages=True) for each in job([0.5] * 4 + [0.2] * 4)]
    answer = judge_looks(stages, SECONDS)
    assert not answer.stragglers and [each.ranks for each in answer.imbalances] == [(4, 5, 6, 7)]
    slow = [replace(each, stage=each.rank // 4) for each in job([0.5] * 5 + [0.2] + [0.5] * 2)]
    assert [each.ranks for each in judge_looks(slow, SECONDS).stragglers] == [(5,)]


def test_a_save_that_is_the_work_of_one_rank_blames_none() -> None:
    ranks = job([0.4, 0.4, 0.4])
    ranks.append(looked(3, 0.2, work={(StepPhase.FORWARD, "f"): 0.6, (StepPhase.SAVE, "s"): 0.2}))
    answer = judge_looks(ranks, SECONDS)
    assert not answer.stragglers and [each.ranks for each in answer.imbalances] == [(3,)]
    all_save = [replace(each, work={(StepPhase.FORWARD, "f"): 0.59, (StepPhase.SAVE, "s"): 0.01}) for each in ranks[:3]]
    (found,) = judge_looks([*all_save, ranks[3]], SECONDS).stragglers
    assert (found.phase, found.site) == (StepPhase.SAVE, "s")


def test_work_that_is_longer_everywhere_has_no_phase() -> None:
    work = {(StepPhase.FORWARD, "f"): 0.3, (StepPhase.BACKWARD, "b"): 0.3, (StepPhase.OPTIMIZER, "o"): 0.3}
    usual = {key: 0.2 for key in work}
    ranks = [looked(rank, 0.4, work=usual) for rank in range(3)] + [looked(3, 0.1, work=work)]
    assert judge_looks(ranks, SECONDS).stragglers[0].phase is StepPhase.UNKNOWN
    waits_for_core = replace(ranks[3], late=0.35)
    assert judge_looks([*ranks[:3], waits_for_core], SECONDS).stragglers[0].phase is StepPhase.OUTSIDE_PYTHON
    works_more = replace(waits_for_core, ran=0.6)
    assert judge_looks([*ranks[:3], works_more], SECONDS).stragglers[0].phase is StepPhase.UNKNOWN


@pytest.mark.parametrize(("tail", "freedom", "value"), [(0.05, 5, 2.0150), (0.0125, 11, 2.5931), (0.005, 8, 3.3554)])
def test_quantiles_of_student(tail: float, freedom: int, value: float) -> None:
    assert student(tail, freedom) == pytest.approx(value, rel=0.01)

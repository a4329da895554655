"""When every stage of a pipeline computes: bubbles of the papers, and no work before what it waits for."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from bigsci_launch.config.schema.technique import Schedule
from bigsci_launch.plan.show.step_schedule import Kind, Timed, Work, order_of, time_orders

SECONDS: dict[Schedule, dict[Kind, float]] = {
    "1f1b": {"forward": 1, "backward": 2},
    "interleaved": {"forward": 1, "backward": 2},
    "zero_bubble": {"forward": 1, "backward": 1, "weights": 1},
}


def timed(schedule: Schedule, pp: int, num_micro_batches: int, chunks: int = 1, hop_s: float = 0.0) -> list[Timed]:
    orders = [order_of(schedule, stage, pp, num_micro_batches, chunks) for stage in range(pp)]
    return time_orders(orders, lambda stage, kind: SECONDS[schedule][kind] / chunks, hop_s)


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("schedule", "chunks", "bubble_of_a_stage"),
    # (pp - 1) x this: Narayanan et al. 2021, section 2.2; Qi et al. 2023, table 2: forward + backward - weights.
    [("1f1b", 1, 3), ("interleaved", 2, 3 / 2), ("interleaved", 3, 1), ("zero_bubble", 1, 1)],
)
def test_bubbles_are_those_of_the_papers(schedule: Schedule, chunks: int, bubble_of_a_stage: float, pp: int) -> None:
    if pp == 1 and chunks > 1:
        return
    end = max(one.end for one in timed(schedule, pp, 3 * pp, chunks))
    assert end == pytest.approx(3 * 3 * pp + (pp - 1) * bubble_of_a_stage)


@pytest.mark.parametrize(
    ("schedule", "pp", "num_micro_batches", "chunks"),
    [
        ("1f1b", 4, 10, 1),
        ("1f1b", 4, 2, 1),
        ("interleaved", 4, 8, 3),
        ("interleaved", 3, 7, 2),
        ("zero_bubble", 4, 9, 1),
    ],
)
def test_no_work_begins_before_what_it_waits_for(
    schedule: Schedule, pp: int, num_micro_batches: int, chunks: int
) -> None:
    found = timed(schedule, pp, num_micro_batches, chunks, hop_s=0.25)
    at = {(one.stage, one.work): one for one in found}
    assert len(at) == len(found)
    passes = Counter((one.work.kind, one.work.micro_batch) for one in found)
    assert set(passes.values()) == {pp * chunks}
    assert len(passes) == num_micro_batches * (3 if schedule == "zero_bubble" else 2)
    for (stage, work), one in at.items():
        place = work.chunk * pp + stage
        if work.kind == "forward" and place:
            before = at[(place - 1) % pp, Work("forward", work.micro_batch, (place - 1) // pp)]
            assert before.end + 0.25 <= one.start
        if work.kind == "backward":
            assert at[stage, Work("forward", work.micro_batch, work.chunk)].end <= one.start
            if place < pp * chunks - 1:
                after = at[(place + 1) % pp, Work("backward", work.micro_batch, (place + 1) // pp)]
                assert after.end + 0.25 <= one.start
        if work.kind == "weights":
            assert at[stage, Work("backward", work.micro_batch)].end <= one.start
    for stage in range(pp):
        row = sorted((one for one in found if one.stage == stage), key=lambda one: one.start)
        assert all(one.sent <= after.start for one, after in pairwise(row))


def test_1f1b_keeps_no_more_micro_batches_than_stages_follow() -> None:
    for stage in range(4):
        kept, most = 0, 0
        for work in order_of("1f1b", stage, 4, 12):
            kept += 1 if work.kind == "forward" else -1
            most = max(most, kept)
        assert most == 4 - stage

"""The picture of a step: it is as long as the predicted step, every micro batch is in it, and a cut is said."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from bigsci_launch.plan.choose.search import make_plan
from bigsci_launch.plan.price.calibration import Calibration
from bigsci_launch.plan.shape.setup import Setup, Technique
from bigsci_launch.plan.show.timeline import Timeline, draw_timeline, timeline_of
from bigsci_launch.topology import Topology

FULL = Technique(recomputation="full")
CASES = [
    {},
    {"topology": Topology(tp=4, pp=1, dp=96)},
    {"topology": Topology(tp=4, pp=12, dp=8), "global_batch_size": 64},
    {"topology": Topology(tp=2, pp=35, dp=4), "partition_method": "uniform", "technique": Technique()},
    {"topology": Topology(tp=4, pp=7, dp=8), "technique": replace(FULL, schedule="zero_bubble")},
    {
        "topology": Topology(tp=4, pp=7, dp=8),
        "global_batch_size": 2016,
        "framework": "megatron",
        "partition_method": "type:transformer",
        "technique": replace(FULL, schedule="interleaved", chunks_per_rank=2),
    },
]


@pytest.fixture(params=CASES, ids=["bloom", "no pipeline", "few", "deep", "zero bubble", "interleaved"])
def drawn(request: pytest.FixtureRequest, bloom: Setup, jean_zay: Calibration) -> tuple[Setup, float, Timeline]:
    setup = replace(bloom, **request.param)
    plan = make_plan(setup, (), jean_zay)
    return setup, plan.price.seconds, timeline_of(plan)


def test_the_last_bar_ends_when_the_predicted_step_does(drawn: tuple[Setup, float, Timeline]) -> None:
    setup, seconds, timeline = drawn
    for stage in range(setup.topology.pp):
        assert max(bar.end for bar in timeline.bars if bar.stage == stage) == pytest.approx(seconds)
    after = {bar.start for bar in timeline.bars if bar.kind in ("gradients", "rest")}
    pipeline = max(bar.end for bar in timeline.bars if bar.kind not in ("gradients", "rest"))
    assert pipeline == pytest.approx(min(after))
    assert min(bar.start for bar in timeline.bars) == 0.0
    assert timeline.seconds == seconds


def test_a_stage_does_one_thing_at_a_time(drawn: tuple[Setup, float, Timeline]) -> None:
    _, _, timeline = drawn
    rows = defaultdict(list)
    for bar in timeline.bars:
        assert bar.end >= bar.start
        assert timeline.cut is None or bar.end <= timeline.cut.start + 1e-9 or bar.start >= timeline.cut.end - 1e-9
        rows[bar.stage].append((bar.start, bar.end))
    for row in rows.values():
        row.sort()
        assert all(one[1] <= other[0] + 1e-9 for one, other in pairwise(row))


def test_every_micro_batch_is_drawn_or_counted_as_left_out(drawn: tuple[Setup, float, Timeline]) -> None:
    setup, _, timeline = drawn
    left_out = timeline.cut.num_micro_batches if timeline.cut else 0
    seen: dict[str, set[int]] = defaultdict(set)
    for bar in timeline.bars:
        if bar.kind == "backward":
            where, _, batch = bar.title.rpartition(",")[0].partition(": backward of micro batch ")
            seen[where].add(int(batch))
    assert len(seen) == setup.topology.pp * setup.technique.chunks_per_rank
    for batches in seen.values():
        # Before the cut, a chunk may not have come to its first backward pass.
        assert min(batches) in (0, left_out)
        assert max(batches) == setup.num_micro_batches - 1
        assert len(batches) == setup.num_micro_batches - left_out


def test_a_long_steady_state_is_cut_and_a_short_step_is_not(bloom: Setup, jean_zay: Calibration) -> None:
    long, short = (
        timeline_of(make_plan(setup, (), jean_zay)) for setup in (bloom, replace(bloom, global_batch_size=224))
    )
    assert long.cut is not None and long.cut.num_micro_batches == 112
    assert "… 112 more micro batches" in draw_timeline(long, "a step")
    assert short.cut is None
    assert "more micro batches" not in draw_timeline(short, "a step")


def test_what_is_drawn_is_stretched_by_little(bloom: Setup, jean_zay: Calibration) -> None:
    """The passes of the slowest stage are as long as its price says, within 3 %."""
    plan = make_plan(bloom, (), jean_zay)
    passes = Counter[str]()
    for bar in timeline_of(plan).bars:
        if bar.stage == 5 and bar.title.split(",")[0].endswith("micro batch 0"):
            passes[bar.kind] += bar.end - bar.start
    assert passes["forward"] + passes["backward"] == pytest.approx(plan.price.stage_seconds[5], rel=0.03)
    assert passes["backward"] == pytest.approx(3 * passes["forward"])
    hop = plan.price.micro_batch_seconds - max(plan.price.stage_seconds)
    assert passes["hop"] == pytest.approx(hop, rel=0.03)


def test_the_drawing_is_whole(drawn: tuple[Setup, float, Timeline]) -> None:
    setup, seconds, timeline = drawn
    tree = ElementTree.fromstring(draw_timeline(timeline, "a step"))
    width = float(tree.attrib["viewBox"].split()[2])
    for box in tree.iter("rect"):
        assert float(box.attrib["x"]) >= 0 and float(box.attrib["x"]) + float(box.attrib["width"]) <= width
    words = [text.text for text in tree.iter("text")]
    assert f"{seconds:.4g}" in words and "stage 0" in words
    kinds = {box.attrib["class"] for box in tree.iter("rect")}
    assert kinds >= {"forward", "backward", "gradients", "rest"}
    # A share of a bar that is far less than a pixel is not drawn.
    assert ("nvlink" in kinds) == (timeline.nvlink_share > 0.02)
    assert ("hop" in kinds) == (setup.topology.pp > 1)
    assert ("weights" in kinds) == (setup.technique.schedule == "zero_bubble")

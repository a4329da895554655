"""One step of a plan as a picture: what every stage of the pipeline does, and when.

The order of work is that of the schedule, and its lengths are those of the price: the passes of a stage, a hop to the
next stage, gradients and the rest at the end. A pipeline that is timed piece by piece differs a little from the formula
of the price, so all of it is stretched to the predicted step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Literal

from bigsci_launch.charts import Area, Scale, text
from bigsci_launch.plan.choose.search import Plan
from bigsci_launch.plan.price.price import NEIGHBOUR_TERM, TERM_NAMES, Price
from bigsci_launch.plan.shape.setup import Setup
from bigsci_launch.plan.show.step_schedule import Timed, order_of, time_orders

StepBarKind = Literal["forward", "backward", "weights", "hop", "gradients", "rest"]

STEADY_SHOWN = 4
"""Micro batches of the steady state that are drawn; more of them look the same."""

MOST_TITLES = 2500
"""Bars with titles on a page; beyond that, only rows have one."""

AREA, GAP = Area(900, 60, left=58, right=14, top=20, bottom=40), 30
TALLEST_ROW, ALL_ROWS = 20, 520

STYLE = """
.timeline { overflow-x: auto; } .timeline svg { width: 100%; min-width: 720px; }
.idle { fill: var(--line); opacity: .45; }
.forward { fill: #2d7dd2; } .backward { fill: #1b9e5a; } .weights { fill: #7fc8a0; } .hop { fill: #b07cd8; }
.nvlink { fill: #e69f00; } .gradients { fill: #d1495b; } .rest { fill: #8a94a0; }
.timeline text.on { fill: #fff; font-size: 9px; } .timeline .left-out { fill: var(--paper); }
.timeline .tear { stroke: var(--soft); stroke-dasharray: 2 3; }
"""
KEY = (
    ("#2d7dd2", "forward"),
    ("#1b9e5a", "backward, with what is recomputed"),
    ("#7fc8a0", "gradients of weights"),
    ("#e69f00", "communication over NVLink"),
    ("#b07cd8", "hop to the next stage"),
    ("#d1495b", "gradient reduction"),
    ("#8a94a0", "optimizer and the rest"),
)


@dataclass(frozen=True, slots=True)
class StepBar:
    """What a stage does from `start` to `end`, in seconds from the beginning of the step."""

    stage: int
    kind: StepBarKind
    start: float
    end: float
    label: str
    title: str


@dataclass(frozen=True, slots=True)
class Omission:
    """Steady state that is left out: from when, for how long, and how many micro batches."""

    start: float
    seconds: float
    num_micro_batches: int

    @property
    def end(self) -> float:
        return self.start + self.seconds


@dataclass(frozen=True, slots=True)
class Timeline:
    """The bars of a step. `nvlink_share` of every forward and backward bar is communication over NVLink."""

    num_stages: int
    seconds: float
    bars: tuple[StepBar, ...]
    cut: Omission | None
    nvlink_share: float


def timeline_of(plan: Plan) -> Timeline:
    """Return the step of a plan; the last bar ends when the predicted step does."""
    setup, price = plan.setup, plan.price
    shown, (timed, at) = _shown_micro_batches(setup, price)
    left_out = setup.num_micro_batches - shown
    pipeline_s, reduction_s = _parts(setup, price)
    stretch = pipeline_s / (max(one.sent for one in timed) + left_out * price.micro_batch_seconds)
    cut = Omission(at * stretch, left_out * price.micro_batch_seconds * stretch, left_out) if left_out else None
    bars = [bar for one in timed for bar in _bars(one, stretch, cut, setup)]
    for stage in range(setup.topology.pp):
        bars += _after_pipeline(stage, pipeline_s, reduction_s, price.seconds)
    # What the price has of NVLink is a share of what it has of the pipeline.
    nvlink = sum(term for name, term in zip(TERM_NAMES, price.terms, strict=True) if name == "NVLink")
    return Timeline(setup.topology.pp, price.seconds, tuple(bars), cut, min(1.0, nvlink * _factor(price) / pipeline_s))


def _factor(price: Price) -> float:
    """Return by how much measured neighbours change every other term."""
    return price.seconds / (price.seconds - price.terms[TERM_NAMES.index(NEIGHBOUR_TERM)])


def _parts(setup: Setup, price: Price) -> tuple[float, float]:
    """Return the seconds of the pipeline and of the reduction of gradients after it."""
    once = price.terms[TERM_NAMES.index("once per step")] * _factor(price)
    pipeline = setup.num_micro_batches * price.micro_batch_seconds / (1 - price.bubble)
    reduction = price.seconds - once - pipeline
    return (pipeline, reduction) if reduction > 0 else (price.seconds - once, 0.0)


def _shown_micro_batches(setup: Setup, price: Price) -> tuple[int, tuple[list[Timed], float]]:
    """Return how many micro batches to draw, their work, and when all stages are in the steady state."""
    pp, chunks, every = setup.topology.pp, setup.technique.chunks_per_rank, setup.num_micro_batches
    unit = pp if chunks > 1 else 1
    shown = pp + STEADY_SHOWN
    shown += (every - shown) % unit
    while shown < every - 1:
        timed = _timed(setup, price, shown)
        begin, end = _steady_state(timed, pp)
        if begin < end:
            return shown, (timed, (begin + end) / 2)
        shown += unit
    return every, (_timed(setup, price, every), 0.0)


def _timed(setup: Setup, price: Price, num_micro_batches: int) -> list[Timed]:
    pp, chunks, schedule = setup.topology.pp, setup.technique.chunks_per_rank, setup.technique.schedule
    # Weights' gradients are one of the passes, inputs' and what is recomputed the others.
    forward = 1 / setup.num_passes
    weights = forward if schedule == "zero_bubble" else 0.0
    shares = {"forward": forward, "backward": 1 - forward - weights, "weights": weights}
    orders = [order_of(schedule, stage, pp, num_micro_batches, chunks) for stage in range(pp)]
    hop = max(0.0, price.micro_batch_seconds - max(price.stage_seconds)) / 2 / chunks
    return time_orders(orders, lambda stage, kind: price.stage_seconds[stage] * shares[kind] / chunks, hop)


def _steady_state(timed: Sequence[Timed], pp: int) -> tuple[float, float]:
    """Return from when to when every stage alternates between forward and backward passes."""
    first, last = [float("inf")] * pp, [0.0] * pp
    for one in timed:
        if one.work.kind == "backward":
            first[one.stage] = min(first[one.stage], one.start)
        if one.work.kind == "forward":
            last[one.stage] = max(last[one.stage], one.end)
    return max(first), min(last)


def _bars(one: Timed, stretch: float, cut: Omission | None, setup: Setup) -> list[StepBar]:
    """Return the bar of some work and that of its hop; what crosses the cut is on both sides of it."""
    start, end, sent = (moment * stretch for moment in (one.start, one.end, one.sent))
    is_later = cut is not None and start >= cut.start
    batch = one.work.micro_batch + (cut.num_micro_batches if cut and is_later else 0)
    words = {"forward": "forward", "backward": "backward", "weights": "gradients of weights"}[one.work.kind]
    chunk = f", chunk {one.work.chunk}" if setup.technique.chunks_per_rank > 1 else ""
    title = f"stage {one.stage}{chunk}: {words} of micro batch {batch}"
    bars = _split(one.stage, one.work.kind, start, end, str(batch), title, cut)
    if sent > end:
        bars += _split(one.stage, "hop", end, sent, "", f"stage {one.stage}: hop of micro batch {batch}", cut)
    return bars


def _split(
    stage: int, kind: StepBarKind, start: float, end: float, label: str, words: str, cut: Omission | None
) -> list[StepBar]:
    title = f"{words}, {end - start:.3g} s"
    if cut is None or end <= cut.start:
        return [StepBar(stage, kind, start, end, label, title)]
    if start >= cut.start:
        return [StepBar(stage, kind, start + cut.seconds, end + cut.seconds, label, title)]
    return [
        StepBar(stage, kind, start, cut.start, "", title),
        StepBar(stage, kind, cut.end, end + cut.seconds, "", title),
    ]


def _after_pipeline(stage: int, pipeline_s: float, reduction_s: float, step_s: float) -> list[StepBar]:
    reduced = pipeline_s + reduction_s
    title = f"gradients are reduced and weights gathered, {reduction_s:.3g} s"
    found = [StepBar(stage, "gradients", pipeline_s, reduced, "", title)] if reduction_s else []
    return [*found, StepBar(stage, "rest", reduced, step_s, "", f"optimizer and the rest, {step_s - reduced:.3g} s")]


def draw_timeline(timeline: Timeline, name: str) -> str:
    """Draw a timeline: a row for each stage, seconds from left to right, and a gap for what is left out."""
    row = min(TALLEST_ROW, ALL_ROWS // timeline.num_stages)
    area = replace(AREA, height=AREA.height + row * timeline.num_stages)
    place = _TimeScale(timeline)
    every = max(1, -(-timeline.num_stages * 11 // (row * timeline.num_stages + 1)))
    body = _draw_axis(timeline, place, area)
    for stage in range(timeline.num_stages):
        top = area.top + stage * row
        body += f'<rect class="idle" x="{area.left}" y="{top + 1}" width="{area.end - area.left}" height="{row - 2}"/>'
        if stage % every == 0:
            body += text(area.left - 6, top + row / 2 + 4, f"stage {stage}", "end")
    titled = len(timeline.bars) <= MOST_TITLES
    body += "".join(_draw_bar(bar, timeline, place, row, titled=titled) for bar in timeline.bars)
    body += _draw_cut(timeline.cut, place, area) if timeline.cut else ""
    return area.svg(body, name)


class _TimeScale:
    """Maps seconds to pixels; the time that is left out takes `GAP` pixels."""

    def __init__(self, timeline: Timeline) -> None:
        cut = timeline.cut
        self._cut, self._gap = cut, GAP if cut else 0
        drawn = timeline.seconds - (cut.seconds if cut else 0.0)
        self._scale = Scale(0.0, drawn, AREA.left, AREA.end - self._gap)

    def __call__(self, second: float) -> float:
        cut = self._cut
        if cut is None or second <= cut.start:
            return self._scale(second)
        return self._scale(max(cut.start, second - cut.seconds)) + self._gap

    def ticks(self, seconds: float) -> list[float]:
        """Return round moments that are drawn."""
        scale = Scale(0.0, seconds, 0.0, 1.0) if self._cut is None else self._scale
        step = scale.ticks()[1] - scale.ticks()[0]
        moments = [step * index for index in range(int(seconds / step) + 1)]
        cut = self._cut
        if cut is None:
            return moments
        return [moment for moment in moments if not cut.start - step / 4 < moment < cut.end + step / 4]


def _draw_bar(bar: StepBar, timeline: Timeline, place: _TimeScale, row: int, *, titled: bool) -> str:
    left, right, top = place(bar.start), place(bar.end), AREA.top + bar.stage * row + 1
    width = right - left
    title = f"<title>{escape(bar.title)}</title>" if titled else ""
    drawn = _rectangle(bar.kind, left, top, width, row - 2, title)
    nvlink = width * timeline.nvlink_share if bar.kind in ("forward", "backward") else 0.0
    if nvlink >= 0.2:
        drawn += _rectangle("nvlink", right - nvlink, top, nvlink, row - 2, title)
    if width - nvlink > 6 * len(bar.label) + 2 and row >= 14 and bar.label:
        middle = left + (width - nvlink) / 2
        drawn += (
            f'<text class="on" x="{middle:.1f}" y="{top + row / 2 + 2:.1f}" text-anchor="middle">{bar.label}</text>'
        )
    return drawn


def _rectangle(css_class: str, left: float, top: float, width: float, height: float, title: str) -> str:
    # A sliver of the background between bars separates them, if they are wide enough.
    return (
        f'<rect class="{css_class}" x="{left:.1f}" y="{top:.0f}" width="{width - 0.4 if width > 3 else width:.1f}" '
        f'height="{height}">{title}</rect>'
    )


def _draw_cut(cut: Omission, place: _TimeScale, area: Area) -> str:
    left = place(cut.start)
    tears = "".join(area.down(x, "tear", above=4, below=4) for x in (left, left + GAP))
    box = f'<rect class="left-out" x="{left:.1f}" y="{area.top}" width="{GAP}" height="{area.floor - area.top}"/>'
    return box + tears + text(left + GAP / 2, area.top - 7, f"… {cut.num_micro_batches} more micro batches", "middle")


def _draw_axis(timeline: Timeline, place: _TimeScale, area: Area) -> str:
    end = timeline.seconds
    body = area.under(place(end), f"{end:.4g}", "end")
    for tick in place.ticks(end):
        body += area.down(place(tick))
        if place(tick) < place(end) - 46:
            body += area.under(place(tick), f"{tick:.4g}")
    return body + text((area.left + area.end) / 2, area.height - 8, "seconds of a step", "middle")

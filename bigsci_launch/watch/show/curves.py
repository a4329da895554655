"""Curves over the steps of a run as SVG text, thinned to what a screen shows: no spike is lost on the way. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from bigsci_launch.charts import Area, Scale, text

AREA = Area(1100, 280, left=64, right=16, top=26, bottom=30)
COLUMNS = 520
"""Each column of the drawing keeps its first, lowest, highest and last value."""
MOST_MARKS = 60
LABEL_WIDTH = 46

StepValue = tuple[int, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """The values of one attempt by step, in ascending order. `old` ones were repeated by a later attempt."""

    name: str
    places: tuple[StepValue, ...]
    old: tuple[StepValue, ...] = ()


@dataclass(frozen=True, slots=True)
class Flag:
    """A vertical line at a step: where an attempt began, or, with a diamond instead of a label, where something was
    found. `title` is its explanation."""

    step: int
    label: str
    title: str
    css_class: str


def draw(curves: Sequence[Curve], flags: Sequence[Flag], label: str) -> str:
    """Return the chart; empty if there is nothing to draw."""
    finite = [place for curve in curves for place in (*curve.old, *curve.places) if math.isfinite(place[1])]
    if not finite:
        return ""
    frame = _frame(curves, finite, flags)
    body = _grid(frame) + "".join(_flag(frame, flag, shown) for flag, shown in _with_labels(frame, flags))
    drawn, held = "", []
    for curve in curves:
        drawn += _path(frame, curve.old, "old") + _path(frame, curve.places, "curve")
        held.append([curve.name, [[step, float(f"{value:.6g}")] for step, value in thin(curve.places, frame)]])
    body += _inside(drawn) + "".join(_mark(frame, *place) for place in _outside(frame, curves)[:MOST_MARKS])
    data = escape(json.dumps([[AREA.left, AREA.end, frame.first, frame.last], held], separators=(",", ":")))
    body += f'<line class="cursor" y1="{AREA.top}" y2="{AREA.floor}"/>'
    drawn = AREA.svg(body, f"{label} by step", f' data-places="{data}"')
    return f'<figure><figcaption>{escape(label)}<output class="soft"></output></figcaption>{drawn}</figure>'


@dataclass(frozen=True, slots=True)
class _Frame:
    """What is shown: steps from `first` to `last`, values from `low` to `high`."""

    first: int
    last: int
    low: float
    high: float

    @property
    def x(self) -> Scale:
        return Scale(self.first, max(self.last, self.first + 1), AREA.left, AREA.end)

    @property
    def y(self) -> Scale:
        return Scale(self.low, self.high, AREA.floor, AREA.top)

    def column(self, step: int) -> int:
        return (step - self.first) * COLUMNS // max(1, self.last - self.first + 1)


def _frame(curves: Sequence[Curve], finite: Sequence[StepValue], flags: Sequence[Flag]) -> _Frame:
    """Return a frame in which most of the run fills the height: the first fall of a loss and spikes may leave it."""
    steps = [step for step, _ in finite] + [flag.step for flag in flags]
    values = sorted(value for _, value in finite)
    usual_low, usual_high = values[len(values) // 50], values[-1 - len(values) // 50]
    room = max(usual_high - usual_low, abs(usual_high) * 0.02, 1e-9)
    low, high = max(values[0], usual_low - room), min(values[-1], usual_high + room)
    return _Frame(min(steps), max(steps), low - 0.04 * room, high + 0.04 * room)


def thin(places: Sequence[StepValue], frame: _Frame) -> list[StepValue]:
    """Return the first, lowest, highest and last finite value of every column."""
    kept: list[StepValue] = []
    column: list[StepValue] = []
    for place in places:
        if not math.isfinite(place[1]):
            continue
        if column and frame.column(column[0][0]) != frame.column(place[0]):
            kept += _extremes(column)
            column = []
        column.append(place)
    return kept + _extremes(column)


def _extremes(column: Sequence[StepValue]) -> list[StepValue]:
    if len(column) <= 4:
        return list(column)
    by_value = sorted(column, key=lambda place: place[1])
    return sorted({column[0], by_value[0], by_value[-1], column[-1]})


def _path(frame: _Frame, places: Sequence[StepValue], css_class: str) -> str:
    found = [f"{frame.x(step):.1f},{frame.y(value):.1f}" for step, value in thin(places, frame)]
    if len(found) == 1:
        x, _, y = found[0].partition(",")
        return f'<circle class="{css_class} dot" cx="{x}" cy="{y}" r="2.5"/>'
    return f'<path class="{css_class}" d="M{"L".join(found)}"/>' if found else ""


def _inside(drawn: str) -> str:
    """Return what is drawn, cut at the edges of the frame: an inner image hides what is outside of it."""
    x, y, width, height = AREA.left, AREA.top, AREA.end - AREA.left, AREA.floor - AREA.top
    place = f'x="{x}" y="{y}" width="{width}" height="{height}"'
    return f'<svg class="inside" {place} viewBox="{x} {y} {width} {height}">{drawn}</svg>'


def _outside(frame: _Frame, curves: Iterable[Curve]) -> list[tuple[int, float]]:
    """Return the values above the frame after the run's first fiftieth, and those that are not finite."""
    early = frame.first + (frame.last - frame.first) / 50
    places = [place for curve in curves for place in (*curve.old, *curve.places)]
    odd = [place for place in places if not math.isfinite(place[1]) or (place[1] > frame.high and place[0] > early)]
    by_column = {frame.column(step): (step, value) for step, value in sorted(odd, key=_oddness)}
    return sorted(by_column.values())


def _oddness(place: StepValue) -> tuple[bool, float]:
    return (not math.isfinite(place[1]), place[1] if math.isfinite(place[1]) else 0.0)


def _mark(frame: _Frame, step: int, value: float) -> str:
    x = frame.x(step)
    said = f"{value:.6g}" if math.isfinite(value) else "not a number"
    triangle = f"M{x - 4:.1f},{AREA.top + 7}h8l-4,-7z"
    return f'<path class="outside" d="{triangle}"><title>step {step}: {said}</title></path>'


def _with_labels(frame: _Frame, flags: Sequence[Flag]) -> list[tuple[Flag, bool]]:
    """Return the flags in order, and whether there is room for the label of each."""
    found, taken = [], -math.inf
    for flag in sorted(flags, key=lambda flag: flag.step):
        at = min(frame.x(flag.step), AREA.end - LABEL_WIDTH)
        has_room = bool(flag.label) and at - taken >= LABEL_WIDTH
        taken = at if has_room else taken
        found.append((flag, has_room))
    return found


def _flag(frame: _Frame, flag: Flag, has_label: bool) -> str:
    x = frame.x(flag.step)
    anchor = "end" if x > AREA.end - LABEL_WIDTH else "start"
    label = text(x, AREA.top - 9, flag.label, anchor) if has_label else ""
    title = f"<title>{escape(flag.title)}</title>"
    diamond = "" if flag.label else f'<path d="M{x:.1f},{AREA.floor - 5}l5,5l-5,5l-5,-5z"/>'
    line, touch = AREA.down(x, "", above=4), AREA.down(x, "touch", above=4)
    return f'<g class="{flag.css_class}">{title}{line}{diamond}{touch}{label}</g>'


def _grid(frame: _Frame) -> str:
    steps = [step for step in frame.x.ticks() if step == int(step) and step <= frame.last]
    return AREA.heights(frame.y) + "".join(AREA.under(frame.x(step), f"{int(step)}") for step in steps)

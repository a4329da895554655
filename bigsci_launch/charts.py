"""Small SVG charts as text, without scripts, fonts or other files. Every marker has a title in words. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from typing import Literal

MarkerShape = Literal["dot", "cross", "ring"]
Bound = tuple[float, str]

RING_RADIUS = {"best": 12.5, "mine": 7.5}
"""Rings around the same point must not touch."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values to pixels along one axis."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return about six round values."""
        span = self.high - self.low
        step = 10 ** math.floor(math.log10(span / 5))
        step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 7)
        first = math.ceil(self.low / step)
        return [float(f"{step * index:.12g}") for index in range(first, math.floor(self.high / step) + 1)]


@dataclass(frozen=True, slots=True)
class Area:
    """The size of a chart, and the room around what is drawn, in pixels: it ends at `end`, and stands on `floor`."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int

    @property
    def end(self) -> int:
        return self.width - self.right

    @property
    def floor(self) -> int:
        return self.height - self.bottom

    def across(self, y: float, css_class: str = "grid") -> str:
        """Return a line from left to right."""
        return f'<line class="{css_class}" x1="{self.left}" x2="{self.end}" y1="{y:.1f}" y2="{y:.1f}"/>'

    def down(self, x: float, css_class: str = "grid", above: int = 0, below: int = 0) -> str:
        """Return a line from the top to the floor, and so many pixels beyond them."""
        style = f'class="{css_class}" ' if css_class else ""
        return f'<line {style}x1="{x:.1f}" x2="{x:.1f}" y1="{self.top - above}" y2="{self.floor + below}"/>'

    def heights(self, y: Scale) -> str:
        """Return a line at each round value of y, with that value."""
        return "".join(
            self.across(y(tick)) + text(self.left - 6, y(tick) + 4, f"{tick:g}", "end") for tick in y.ticks()
        )

    def under(self, x: float, words: str, anchor: str = "middle") -> str:
        return text(x, self.floor + 16, words, anchor)

    def svg(self, body: str, name: str, attributes: str = "") -> str:
        """Return the chart with `name` for readers who do not see it. `attributes` replace its width."""
        size = "" if attributes else f'width="{self.width}" '
        start = (
            f'<svg viewBox="0 0 {self.width} {self.height}" {size}role="img" aria-label="{escape(name)}"{attributes}>'
        )
        return f"{start}{body}</svg>"


AREA = Area(860, 380, 64, 20, 16, 46)
BARS = replace(AREA, width=420, height=220)
STAIRS = replace(AREA, height=260)


@dataclass(frozen=True, slots=True)
class Marker:
    """A point: `css_class` styles it, and `title` appears when a reader points at it."""

    x: float
    y: float
    css_class: str
    shape: MarkerShape
    title: str


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a row of bars."""

    label: str
    value: float
    title: str


def scatter(markers: Sequence[Marker], x_label: str, y_label: str, *, limit: Bound | None = None) -> str:
    """Draw points over two axes; `limit` adds a vertical line with its name."""
    x = _scale(_with(limit, [marker.x for marker in markers]), AREA.left, AREA.end)
    y = _scale([marker.y for marker in markers], AREA.floor, AREA.top)
    body = _axes(AREA, x, y, x_label, y_label)
    if limit:
        body += AREA.down(x(limit[0]), "limit") + text(x(limit[0]) + 4, AREA.top + 12, limit[1], "start")
    body += "".join(_marker(x(marker.x), y(marker.y), marker) for marker in markers)
    return AREA.svg(body, f"{y_label} against {x_label}")


def bars(rows: Sequence[Bar], y_label: str, css_class: str, *, limit: Bound | None = None) -> str:
    """Draw one bar for each row, side by side, from zero."""
    y = _scale(_with(limit, [row.value for row in rows]), BARS.floor, BARS.top, from_zero=True)
    slot = (BARS.end - BARS.left) / len(rows)
    body = _y_axis(BARS, y, y_label)
    every = max(1, len(rows) // 12)
    for index, row in enumerate(rows):
        left, top = BARS.left + index * slot + slot * 0.1, y(row.value)
        body += (
            f'<rect class="{css_class}" x="{left:.1f}" y="{top:.1f}" width="{slot * 0.8:.1f}" '
            f'height="{BARS.floor - top:.1f}"><title>{escape(row.title)}</title></rect>'
        )
        if index % every == 0:
            body += BARS.under(left + slot * 0.4, row.label)
    return BARS.svg(body + _limit(BARS, y, limit), y_label)


def stairs(
    points: Sequence[tuple[float, float]],
    x_label: str,
    y_label: str,
    css_class: str,
    *,
    limit: Bound | None = None,
) -> str:
    """Draw a line that keeps each value until the next point; `limit` adds a horizontal line with its name."""
    x = _scale([at for at, _ in points], STAIRS.left, STAIRS.end, from_zero=True)
    y = _scale(_with(limit, [value for _, value in points]), STAIRS.floor, STAIRS.top, from_zero=True)
    path = f"M{x(points[0][0]):.1f},{y(points[0][1]):.1f}"
    for (_, held), (at, value) in pairwise(points):
        path += f"L{x(at):.1f},{y(held):.1f}L{x(at):.1f},{y(value):.1f}"
    body = _axes(STAIRS, x, y, x_label, y_label) + f'<path class="{css_class}" d="{path}"/>'
    return STAIRS.svg(body + _limit(STAIRS, y, limit), f"{y_label} against {x_label}")


def _scale(values: Sequence[float], start: float, end: float, *, from_zero: bool = False) -> Scale:
    """Return a scale that contains all values with a little room."""
    low, high = (0.0 if from_zero else min(values)), max(values)
    room = (high - low or abs(high) or 1.0) * 0.05
    return Scale(low if from_zero else low - room, high + room, start, end)


def _with(limit: Bound | None, values: list[float]) -> list[float]:
    return [*values, limit[0]] if limit else values


def _limit(area: Area, y: Scale, limit: Bound | None) -> str:
    return area.across(y(limit[0]), "limit") + text(area.end, y(limit[0]) - 4, limit[1], "end") if limit else ""


def _marker(x: float, y: float, marker: Marker) -> str:
    title = f"<title>{escape(marker.title)}</title>"
    if marker.shape == "cross":
        path = f"M{x - 4:.1f},{y - 4:.1f}l8,8m0,-8l-8,8"
        return f'<path class="{marker.css_class}" d="{path}">{title}</path>'
    radius = RING_RADIUS.get(marker.css_class, 8) if marker.shape == "ring" else 4.5
    return f'<circle class="{marker.css_class}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">{title}</circle>'


def _axes(area: Area, x: Scale, y: Scale, x_label: str, y_label: str) -> str:
    body = _y_axis(area, y, y_label) + "".join(area.down(x(at)) + area.under(x(at), f"{at:g}") for at in x.ticks())
    return body + text((area.left + area.end) / 2, area.height - 8, x_label, "middle")


def _y_axis(area: Area, y: Scale, label: str) -> str:
    middle = f"translate(14,{(area.top + area.floor) / 2:.0f}) rotate(-90)"
    return area.heights(y) + f'<text class="label" transform="{middle}">{escape(label)}</text>'


def text(x: float, y: float, words: str, anchor: str) -> str:
    """Return a text at a place; `anchor` is the part of it that is there."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'

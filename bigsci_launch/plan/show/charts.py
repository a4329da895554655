"""Small SVG charts as text, without scripts, fonts or other files. Every marker has a title in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Literal

WIDTH, HEIGHT = 860, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 16, 46

MarkerShape = Literal["dot", "cross", "ring"]

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
        return [step * index for index in range(first, math.floor(self.high / step) + 1)]


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


def axis_scales(
    xs: Sequence[float], ys: Sequence[float], *, width: int = WIDTH, height: int = HEIGHT, from_zero: bool = False
) -> tuple[Scale, Scale]:
    """Return scales that contain all points with a little room."""
    return (
        _scale(xs, LEFT, width - RIGHT, from_zero=from_zero),
        _scale(ys, height - BOTTOM, TOP, from_zero=from_zero),
    )


def _scale(values: Sequence[float], start: float, end: float, *, from_zero: bool) -> Scale:
    low, high = (0.0 if from_zero else min(values)), max(values)
    room = (high - low or abs(high) or 1.0) * 0.05
    return Scale(low if from_zero else low - room, high + room, start, end)


def scatter(markers: Sequence[Marker], x_label: str, y_label: str, *, limit: tuple[float, str] | None = None) -> str:
    """Draw points over two axes; `limit` adds a vertical line with its name."""
    xs = [marker.x for marker in markers] + ([limit[0]] if limit else [])
    x, y = axis_scales(xs, [marker.y for marker in markers])
    body = _axes(x, y, x_label, y_label)
    if limit:
        body += _vertical(x(limit[0]), limit[1])
    body += "".join(_marker(x(marker.x), y(marker.y), marker) for marker in markers)
    return svg(body, f"{y_label} against {x_label}")


def bars(rows: Sequence[Bar], y_label: str, css_class: str, *, limit: tuple[float, str] | None = None) -> str:
    """Draw one bar for each row, side by side, from zero."""
    height, width = 220, WIDTH // 2 - 10
    tallest = [row.value for row in rows] + ([limit[0]] if limit else [])
    y = _scale(tallest, height - BOTTOM, TOP, from_zero=True)
    slot = (width - LEFT - RIGHT) / len(rows)
    body = _y_axis(y, y_label, width, height)
    every = max(1, len(rows) // 12)
    for index, row in enumerate(rows):
        left, top = LEFT + index * slot + slot * 0.1, y(row.value)
        body += (
            f'<rect class="{css_class}" x="{left:.1f}" y="{top:.1f}" width="{slot * 0.8:.1f}" '
            f'height="{height - BOTTOM - top:.1f}"><title>{escape(row.title)}</title></rect>'
        )
        if index % every == 0:
            body += text(left + slot * 0.4, height - BOTTOM + 16, row.label, "middle")
    if limit:
        body += f'<line class="limit" x1="{LEFT}" x2="{width - RIGHT}" y1="{y(limit[0]):.1f}" y2="{y(limit[0]):.1f}"/>'
        body += text(width - RIGHT, y(limit[0]) - 4, limit[1], "end")
    return svg(body, y_label, width, height)


def stairs(
    points: Sequence[tuple[float, float]],
    x_label: str,
    y_label: str,
    css_class: str,
    *,
    limit: tuple[float, str] | None,
) -> str:
    """Draw a line that keeps each value until the next point; `limit` adds a horizontal line with its name."""
    height = 260
    ys = [value for _, value in points] + ([limit[0]] if limit else [])
    x, y = axis_scales([value for value, _ in points], ys, height=height, from_zero=True)
    path = f"M{x(points[0][0]):.1f},{y(points[0][1]):.1f}"
    for (_, held), (at, value) in pairwise(points):
        path += f"L{x(at):.1f},{y(held):.1f}L{x(at):.1f},{y(value):.1f}"
    body = _axes(x, y, x_label, y_label, height=height) + f'<path class="{css_class}" d="{path}"/>'
    if limit:
        body += f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(limit[0]):.1f}" y2="{y(limit[0]):.1f}"/>'
        body += text(WIDTH - RIGHT, y(limit[0]) - 4, limit[1], "end")
    return svg(body, f"{y_label} against {x_label}", WIDTH, height)


def _marker(x: float, y: float, marker: Marker) -> str:
    title = f"<title>{escape(marker.title)}</title>"
    if marker.shape == "cross":
        path = f"M{x - 4:.1f},{y - 4:.1f}l8,8m0,-8l-8,8"
        return f'<path class="{marker.css_class}" d="{path}">{title}</path>'
    radius = RING_RADIUS.get(marker.css_class, 8) if marker.shape == "ring" else 4.5
    return f'<circle class="{marker.css_class}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">{title}</circle>'


def _axes(x: Scale, y: Scale, x_label: str, y_label: str, *, height: int = HEIGHT) -> str:
    body = _y_axis(y, y_label, WIDTH, height)
    for tick in x.ticks():
        body += f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>'
        body += text(x(tick), height - BOTTOM + 16, f"{tick:g}", "middle")
    return body + text((LEFT + WIDTH - RIGHT) / 2, height - 8, x_label, "middle")


def _y_axis(y: Scale, label: str, width: int, height: int) -> str:
    body = ""
    for tick in y.ticks():
        body += f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
        body += text(LEFT - 6, y(tick) + 4, f"{tick:g}", "end")
    middle = (TOP + height - BOTTOM) / 2
    return body + f'<text class="label" transform="translate(14,{middle:.0f}) rotate(-90)">{escape(label)}</text>'


def _vertical(x: float, name: str) -> str:
    line = f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
    return line + text(x + 4, TOP + 12, name, "start")


def text(x: float, y: float, words: str, anchor: str) -> str:
    """Return a text at a place; `anchor` is the part of it that is there."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def svg(body: str, name: str, width: int = WIDTH, height: int = HEIGHT) -> str:
    """Return an SVG of that size with `name` for readers who do not see it."""
    return f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" aria-label="{escape(name)}">{body}</svg>'

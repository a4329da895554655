"""Renders the answer as one self-contained HTML page: summary, heat map over (pp, tp), table."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files as package_files
from pathlib import Path

from bigsci_launch import pages
from bigsci_launch.weights.compare.comparison import Comparison, names_text
from bigsci_launch.weights.show.report import summary_lines, table_rows

MAX_NAMES = 12


@dataclass(frozen=True, slots=True)
class HeatMapCell:
    """The tensors at one (pp, tp) over all dp ranks: how many names were compared, how many differ, and which."""

    held: int
    differing: int
    names: str

    @property
    def percent(self) -> int:
        """The percentage that differs, at least 1 if any does."""
        return max(1, round(100 * self.differing / self.held)) if self.differing else 0


def heat_map(comparison: Comparison) -> tuple[list[int], list[tuple[int, list[HeatMapCell | None]]]]:
    """Return the map's columns (tp) and rows (pp), empty if no place is known. A missing index counts as 0."""
    held: dict[tuple[int, int], set[str]] = {}
    differing: dict[tuple[int, int], set[str]] = {}
    is_known = False
    for name, places in comparison.places.items():
        for place in places:
            is_known = is_known or place.pp is not None or place.tp is not None
            held.setdefault((place.pp or 0, place.tp or 0), set()).add(name)
    for difference in comparison.differences:
        differing.setdefault((difference.place.pp or 0, difference.place.tp or 0), set()).add(difference.name)
    if not is_known:
        return [], []
    tps = sorted({tp for _, tp in held})
    pps = sorted({pp for pp, _ in held})
    return tps, [(pp, [_cell(held.get((pp, tp)), differing.get((pp, tp), set())) for tp in tps]) for pp in pps]


def _cell(held: set[str] | None, differing: set[str]) -> HeatMapCell | None:
    if not held:
        return None
    return HeatMapCell(len(held | differing), len(differing), names_text(tuple(sorted(differing)), MAX_NAMES))


def render_page(comparison: Comparison) -> str:
    from jinja2 import Environment, StrictUndefined

    here = package_files("bigsci_launch.weights.show")
    source = (here / "heatmap.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    tps, cells = heat_map(comparison)
    body = environment.from_string(source).render(
        lines=summary_lines(comparison),
        is_comparison=not comparison.is_empty,
        a=str(comparison.a),
        b=str(comparison.b),
        tps=tps,
        cells=cells,
        rows=table_rows(comparison),
        made=pages.made_now(),
    )
    return pages.render_page("bsl diff-weights", (here / "heatmap.css").read_text(encoding="utf-8"), body)


def write_page(comparison: Comparison, path: Path) -> None:
    """Write the page to `path`.

    Raises:
        BslError: the file cannot be written.
    """
    pages.write_page(path, render_page(comparison))

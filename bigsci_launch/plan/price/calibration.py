"""A calibration: the constants of one cluster with their intervals, measured neighbours, and prediction errors.

It is stored as one readable JSON file, which people keep next to their site file.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from bigsci_launch.errors import DataError
from bigsci_launch.plan.price.constants import CONSTANTS, PRIOR, Constants
from bigsci_launch.plan.price.hardware import A100, GpuModel
from bigsci_launch.plan.price.neighbours import MEMORY_SCALES, TIME_SCALES, Neighbours, Point

SCHEMA_VERSION = 1
DOCUMENT_KIND = "bsl plan calibration"

UNCALIBRATED_BAND = 0.40
"""Half-width of the band if nothing was measured, because constants do not transfer between clusters."""

WINDOW = 15
"""Number of left-out rows that give the band of a plan: those about as close to their neighbours as the plan."""

WINDOW_SHARE = 0.96
"""Quantile of their errors. With it, 9 of 10 measurements are inside the band when whole sections are left out."""

ENOUGH_ROWS = 8
"""With fewer measured runs than this, the band shrinks from the uncalibrated one only in proportion to their number."""


@dataclass(frozen=True, slots=True)
class ErrorSummary:
    """Relative errors of left-out rows, as pairs (closeness to the nearest neighbour, error), and their summary."""

    pairs: tuple[tuple[float, float], ...] = ()

    @property
    def mean(self) -> float:
        return sum(error for _, error in self.pairs) / len(self.pairs) if self.pairs else math.nan

    def quantile(self, share: float) -> float:
        """Return the error that `share` of the rows do not exceed."""
        return quantile([error for _, error in self.pairs], share)

    def band(self, closeness: float) -> float:
        """Return the half-width that contains 9 of 10 rows about as close to their neighbours."""
        if not self.pairs:
            return UNCALIBRATED_BAND
        nearest = sorted(self.pairs, key=lambda pair: abs(pair[0] - closeness))[:WINDOW]
        band = quantile([error for _, error in nearest], WINDOW_SHARE)
        if closeness < min(pair[0] for pair in self.pairs):
            band *= 2
        missing = max(0.0, 1 - len(self.pairs) / ENOUGH_ROWS)
        return min(UNCALIBRATED_BAND, max(band, missing * UNCALIBRATED_BAND))


def quantile(numbers: list[float], share: float) -> float:
    """Return the `share` quantile by linear interpolation; nan for an empty list."""
    ordered = sorted(numbers)
    if not ordered:
        return math.nan
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Everything that pricing needs. `spreads` are standard deviations of the constants' logarithms. `drift_from` is
    the first day of the cluster's new state, if it changed. `has_blocking_launches` says whether most runs waited for
    every kernel; rows that do not say are assumed to have done the same."""

    gpu: GpuModel = A100
    constants: Constants = PRIOR
    spreads: tuple[float, ...] = tuple(constant.spread for constant in CONSTANTS)
    drift_from: date | None = None
    has_blocking_launches: bool = False
    time_neighbours: Neighbours = field(default_factory=Neighbours)
    memory_neighbours: Neighbours = field(default_factory=Neighbours)
    time_errors: ErrorSummary = field(default_factory=ErrorSummary)
    memory_errors: ErrorSummary = field(default_factory=ErrorSummary)
    learning_curve: tuple[tuple[int, float], ...] = ()
    sources: tuple[str, ...] = ()
    command: str = ""

    @property
    def is_measured(self) -> bool:
        """Whether any run was measured. If not, every figure is a guess with the widest band."""
        return bool(self.time_errors.pairs or self.memory_errors.pairs)

    def interval(self, name: str) -> tuple[float, float]:
        """Return the 95 % interval of a constant."""
        names = [constant.name for constant in CONSTANTS]
        spread, value = self.spreads[names.index(name)], getattr(self.constants, name)
        return value * math.exp(-1.96 * spread), value * math.exp(1.96 * spread)


def dump_calibration(calibration: Calibration) -> str:
    """Return the JSON text that `read_calibration` reads."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "kind": DOCUMENT_KIND,
        "command": calibration.command,
        "sources": calibration.sources,
        "gpu": asdict(calibration.gpu),
        "constants": {constant.name: _constant_entry(calibration, constant.name) for constant in CONSTANTS},
        "drift_from": calibration.drift_from.isoformat() if calibration.drift_from else None,
        "blocking_launches": calibration.has_blocking_launches,
        "left_out_errors": {
            "time": [[_short(value) for value in pair] for pair in calibration.time_errors.pairs],
            "memory": [[_short(value) for value in pair] for pair in calibration.memory_errors.pairs],
        },
        "learning_curve": [[rows, _short(error)] for rows, error in calibration.learning_curve],
        "neighbours": {
            "time": _neighbour_rows(calibration.time_neighbours),
            "memory": _neighbour_rows(calibration.memory_neighbours),
        },
    }
    return _compact_rows(json.dumps(document, indent=1))


def _constant_entry(calibration: Calibration, name: str) -> dict[str, Any]:
    constant = next(constant for constant in CONSTANTS if constant.name == name)
    low, high = calibration.interval(name)
    index = CONSTANTS.index(constant)
    return {
        "value": _short(getattr(calibration.constants, name)),
        "low": _short(low),
        "high": _short(high),
        "spread": _short(calibration.spreads[index]),
        "unit": constant.unit,
        "meaning": constant.meaning,
    }


def _short(number: float) -> float:
    return float(f"{number:.6g}")


def _neighbour_rows(neighbours: Neighbours) -> list[list[float | None]]:
    """Return one row per point with its weight; a missing day is null."""
    return [
        [*(round(value, 6) if math.isfinite(value) else None for value in point), _short(weight)]
        for point, weight in zip(neighbours.points, neighbours.weights, strict=True)
    ]


def _compact_rows(text: str) -> str:
    """Put each innermost list on one line, so that a diff shows rows."""
    lines: list[str] = []
    inside = ""
    for line in text.splitlines():
        stripped = line.strip()
        if inside:
            inside += stripped if stripped.startswith("]") else f" {stripped}"
            if stripped.startswith("]"):
                lines.append(inside.replace("[ ", "["))
                inside = ""
        elif stripped == "[":
            inside = line
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


def read_calibration(path: Path) -> Calibration:
    """Return the calibration in the file at `path`.

    Raises:
        DataError: the file cannot be read or is not a calibration.
    """
    hint = "`bsl plan calibrate ROWS.csv -o FILE` makes one"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["kind"] != DOCUMENT_KIND or document["schema_version"] != SCHEMA_VERSION:
            raise DataError(f"{path}: not a calibration of version {SCHEMA_VERSION}", hint=hint)
        return _parse(document)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}", hint=hint) from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise DataError(f"{path}: not a calibration ({type(error).__name__}: {error})", hint=hint) from error


def _parse(document: dict[str, Any]) -> Calibration:
    constants, errors = document["constants"], document["left_out_errors"]
    day = document["drift_from"]
    return Calibration(
        gpu=GpuModel(**document["gpu"]),
        constants=Constants.of_values({name: entry["value"] for name, entry in constants.items()}),
        spreads=tuple(float(constants[constant.name]["spread"]) for constant in CONSTANTS),
        drift_from=date.fromisoformat(day) if day else None,
        has_blocking_launches=bool(document["blocking_launches"]),
        time_neighbours=_parse_neighbours(document["neighbours"]["time"], TIME_SCALES),
        memory_neighbours=_parse_neighbours(document["neighbours"]["memory"], MEMORY_SCALES),
        time_errors=ErrorSummary(tuple((float(near), float(error)) for near, error in errors["time"])),
        memory_errors=ErrorSummary(tuple((float(near), float(error)) for near, error in errors["memory"])),
        learning_curve=tuple((int(rows), float(error)) for rows, error in document["learning_curve"]),
        sources=tuple(document["sources"]),
        command=str(document["command"]),
    )


def _parse_neighbours(rows: list[list[float | None]], scales: Point) -> Neighbours:
    points = tuple(tuple(math.inf if value is None else float(value) for value in row[:-1]) for row in rows)
    return Neighbours(points, tuple(float(row[-1] or 0.0) for row in rows), scales)

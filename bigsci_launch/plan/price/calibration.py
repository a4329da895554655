"""A calibration: the constants of one cluster with their intervals, measured neighbours, and prediction errors.

It is for one GPU, and it knows on which site, with which framework and with which attention its rows were measured. It
is stored as one readable JSON file, which is kept next to the site file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from bigsci_launch.config.schema.technique import Attention, Framework
from bigsci_launch.config.site import Site
from bigsci_launch.errors import DataError
from bigsci_launch.plan.price.constants import CONSTANTS, PRIOR, Constants, priors_for
from bigsci_launch.plan.price.hardware import A100, NETWORK, GpuModel, gpu_of_site, is_same_gpu
from bigsci_launch.plan.price.neighbours import MEMORY_SCALES, TIME_SCALES, Neighbours, Point
from bigsci_launch.plan.price.own_memory import is_own
from bigsci_launch.plan.shape.setup import Setup
from bigsci_launch.safe_files import parse_json
from bigsci_launch.typed_path import open_typed

SCHEMA_VERSION = 2
DOCUMENT_KIND = "bsl plan calibration"

UNCALIBRATED_BAND = 0.30
"""Half-width of the band if nothing was measured: 92 % of the published rows of the half for building are inside."""

WINDOW = 15
"""Number of left-out rows that give the band of a plan: those about as close to their neighbours as the plan."""

WINDOW_SHARE = 0.96
"""Quantile of their errors. With it, 85 to 95 % of rows that were not fitted are inside the band: of the chronicle's
sections 89 %, of random halves of vTrain's rows 92 %, of published rows that ten of their source predict 91 %."""

GUESSED_WITH_ATTENTION = {"attention": 0.7, "memory traffic": 0.5}
"""Errors that 9 of 10 do not exceed, of terms that were measured with another kind of attention, or not at all."""

FAR = 0.5
"""With less support than this, a setup counts as far from everything measured."""

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
        """Return the half-width that contains 9 of 10 rows about as close to their neighbours.

        It is that of the left-out rows as far as they support it, and the uncalibrated one for the rest. So it tends
        to the uncalibrated band as closeness goes to 0.
        """
        if not self.pairs:
            return UNCALIBRATED_BAND
        support = self.support(closeness)
        measured = min(UNCALIBRATED_BAND, quantile([error for _, error in self._window(closeness)], WINDOW_SHARE))
        missing = max(0.0, 1 - len(self.pairs) / ENOUGH_ROWS)
        return max(support * measured + (1 - support) * UNCALIBRATED_BAND, missing * UNCALIBRATED_BAND)

    def support(self, closeness: float) -> float:
        """Return how far the left-out rows speak for a setup: 1 if it is as close to its neighbours as the median of
        those that are compared with it, in proportion if it is not, 0 if it is like nothing."""
        if not self.pairs:
            return 0.0
        typical = median(near for near, _ in self._window(closeness))
        return min(1.0, closeness / typical) if typical else 0.0

    def _window(self, closeness: float) -> list[tuple[float, float]]:
        return sorted(self.pairs, key=lambda pair: abs(pair[0] - closeness))[:WINDOW]


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
    every kernel; rows that do not say are assumed to have done the same.

    `site`, `framework` and `attention` are those of the rows. Without a site, it is unknown where they were measured;
    without one of the others, the rows have several, and their errors show the difference. `asked_site` is where the
    calibration is used; None if not given. `origin` is what it was made from, if it is in no file.
    """

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
    site: str | None = None
    framework: Framework | None = None
    attention: Attention | None = None
    asked_site: str | None = None
    origin: str = ""

    @property
    def is_measured(self) -> bool:
        """Whether any run was measured. If not, every figure is a guess with the widest band."""
        return bool(self.time_neighbours.points or self.memory_neighbours.points)

    def knows_need_of(self, setup: Setup) -> bool:
        """Whether the memory that `setup` needs was counted, or measured for something like it."""
        return is_own(setup) or bool(self.memory_neighbours.points)

    def interval(self, name: str) -> tuple[float, float]:
        """Return the 95 % interval of a constant."""
        names = [constant.name for constant in CONSTANTS]
        spread, value = self.spreads[names.index(name)], getattr(self.constants, name)
        return value * math.exp(-1.96 * spread), value * math.exp(1.96 * spread)

    def closeness_of(self, setup: Setup, closeness: float) -> float:
        """Return the closeness that counts for `setup`, whose nearest measured neighbour is so close: 0 if the
        calibration is for something else."""
        return 0.0 if self.is_measured and any(self.differences(setup)) else closeness

    def differences(self, setup: Setup) -> Iterator[str]:
        """Yield in what the measured rows differ from `setup` and from the site that was asked for."""
        if self.asked_site is not None and self.site is None:
            yield f"the calibration names no site; this run is on {self.asked_site}"
        elif self.asked_site is not None and self.site != self.asked_site:
            yield f"measured on {self.site}, not on {self.asked_site}"
        framework = counted_framework(setup.framework)
        if self.framework not in (None, framework):
            yield f"measured with {self.framework}, not with {framework}"

    def guessed_terms(self, setup: Setup) -> Mapping[str, float]:
        """Return the terms of a step of `setup` that the rows do not show, though they are of its site and program,
        with the relative error of each: with another kind of attention, those that depend on it."""
        return GUESSED_WITH_ATTENTION if self.attention not in (None, setup.technique.attention) else {}

    def at_site(self, site: str, gpu: GpuModel) -> Calibration:
        """Return this calibration as it is used at `site`, whose GPU is `gpu`.

        The constants were fitted for the calibration's peak and rates, so only memory and network are the site's. What
        the network reaches is a fact about a site, so on another one it is what is expected there.

        Raises:
            DataError: the site has another GPU.
        """
        if not is_same_gpu(self.gpu.name, gpu.name):
            raise DataError(
                f"the calibration is for {self.gpu.name}, but site {site} has {gpu.name}",
                hint=f"`bsl plan calibrate ROWS.csv --site {site} -o FILE` makes one; without any, figures are guesses",
            )
        is_own, is_said = self.site == site, NETWORK not in gpu.assumed
        network = self.gpu.network_gb_per_s if is_own and not is_said else gpu.network_gb_per_s
        fitted = [name for name in self.gpu.assumed if name not in ("memory_gib", NETWORK)]
        unsaid = [name for name in gpu.assumed if name == "memory_gib" or (name == NETWORK and not is_own)]
        adapted = replace(self.gpu, memory_gib=gpu.memory_gib, network_gb_per_s=network, assumed=(*fitted, *unsaid))
        if is_own and self.gpu.network_gb_per_s in (None, network):
            return replace(self, gpu=adapted, asked_site=site)
        there = priors_for(adapted)
        expected = replace(self.constants, network_gb_per_s=there.network_gb_per_s, message_us=there.message_us)
        return replace(self, gpu=adapted, constants=expected, asked_site=site)


def expected_on(gpu: GpuModel) -> Calibration:
    """Return what is expected of `gpu` before anything was measured with it."""
    return Calibration(gpu=gpu, constants=priors_for(gpu))


def counted_framework(framework: Framework) -> Framework:
    """Return the framework that a calibration compares: `bsl train` runs on DeepSpeed."""
    return "deepspeed" if framework == "bsl" else framework


def dump_calibration(calibration: Calibration) -> str:
    """Return the JSON text that `read_calibration` reads."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "kind": DOCUMENT_KIND,
        "command": calibration.command,
        "sources": calibration.sources,
        "site": calibration.site,
        "framework": calibration.framework,
        "attention": calibration.attention,
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
    hint = "`bsl plan calibrate ROWS.csv --site NAME -o FILE` makes one"
    try:
        with open_typed(path) as stream:
            document = parse_json(stream.read())
        if document["kind"] == DOCUMENT_KIND and document["schema_version"] == 1:
            sources = " ".join(map(str, document["sources"]))
            raise DataError(
                f"{path}: a calibration of version 1, which does not record what it is for",
                hint=f"`bsl plan calibrate {sources} --site NAME -o {path}` makes a new one",
            )
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
        gpu=GpuModel(**{**document["gpu"], "assumed": tuple(document["gpu"]["assumed"])}),
        constants=Constants.of_values({name: entry["value"] for name, entry in constants.items()}),
        spreads=tuple(float(constants.get(constant.name, {}).get("spread", constant.spread)) for constant in CONSTANTS),
        drift_from=date.fromisoformat(day) if day else None,
        has_blocking_launches=bool(document["blocking_launches"]),
        time_neighbours=_parse_neighbours(document["neighbours"]["time"], TIME_SCALES),
        memory_neighbours=_parse_neighbours(document["neighbours"]["memory"], MEMORY_SCALES),
        time_errors=ErrorSummary(tuple((float(near), float(error)) for near, error in errors["time"])),
        memory_errors=ErrorSummary(tuple((float(near), float(error)) for near, error in errors["memory"])),
        learning_curve=tuple((int(rows), float(error)) for rows, error in document["learning_curve"]),
        sources=tuple(document["sources"]),
        command=str(document["command"]),
        site=document["site"],
        framework=document["framework"],
        attention=document["attention"],
    )


def _parse_neighbours(rows: list[list[float | None]], scales: Point) -> Neighbours:
    points = tuple(tuple(math.inf if value is None else float(value) for value in row[:-1]) for row in rows)
    return Neighbours(points, tuple(float(row[-1] or 0.0) for row in rows), scales)


def calibration_of(site: Site, path: Path | None = None) -> Calibration | None:
    """Return the calibration for `site`: the file at `path`, else the site's own, else priors; None without a GPU.

    Raises:
        DataError: the file is not a calibration, or it is for another GPU.
    """
    gpu = gpu_of_site(site.config)
    own = site.path.parent / site.config.calibration if site.config.calibration else None
    chosen = path or own
    if chosen is None:
        return expected_on(gpu) if gpu else None
    calibration = read_calibration(chosen)
    return calibration.at_site(site.name, gpu) if gpu else calibration

"""What `bsl plan calibrate` prints: constants with intervals, errors, drift, and which runs would help."""

from __future__ import annotations

from bigsci_launch.plan.calibrate.physics import find_excesses
from bigsci_launch.plan.price.calibration import ENOUGH_ROWS, Calibration, ErrorSummary
from bigsci_launch.plan.price.constants import CONSTANTS

CONSTANT_COLUMNS = ("constant", ">value", ">from", ">to (95 %)", "unit", "meaning")

MARK = "!"

UNLEARNED = 0.6
"""Share of a prior's spread above which a constant counts as not measured."""

_ADVICE = {
    "gemm_efficiency": "time any run",
    "attention_efficiency": "time fused attention with a long and a short sequence, if you mean to use it",
    "layer_overhead_ms": "time one setup with micro batches 1, 2 and 4",
    "hbm_tb_per_s": "time one setup with few and with many heads",
    "nvlink_gb_per_s": "time one setup with two tensor-parallel sizes",
    "network_gb_per_s": "time one setup with two data-parallel sizes, or run a 5-minute all-reduce benchmark",
    "message_us": "time one setup on few and on many nodes",
    "misaligned_heads": "time a head size that is not a multiple of 8, if you mean to use one",
    "drift": "time an old setup again",
    "base_gib": "record nvidia-smi's figure for the first and the last node",
    "optimizer_bytes": "record nvidia-smi's figure for two data-parallel sizes",
    "activation_factor": "record nvidia-smi's figure for two micro batch sizes",
}


def constant_cells(calibration: Calibration) -> list[tuple[str, ...]]:
    """Return one line per constant, in the order of `CONSTANT_COLUMNS`. A value above the nominal one has a mark."""
    marked = {excess.name for excess in find_excesses(calibration.constants, calibration.gpu)}
    rows: list[tuple[str, ...]] = []
    for constant in CONSTANTS:
        low, high = calibration.interval(constant.name)
        value = getattr(calibration.constants, constant.name)
        if constant.name == "drift" and calibration.drift_from is None:
            continue
        shown = f"{value:.3g}{MARK if constant.name in marked else ''}"
        rows.append((constant.name, shown, f"{low:.3g}", f"{high:.3g}", constant.unit, constant.meaning))
    return rows


def fit_lines(calibration: Calibration) -> list[str]:
    """Return lines on errors, drift, and what more runs would improve."""
    lines = [
        _error_line("time", calibration.time_errors),
        _error_line("memory", calibration.memory_errors),
        _drift_line(calibration),
        *(f"{MARK} {excess.text}" for excess in find_excesses(calibration.constants, calibration.gpu)),
        *_learning_lines(calibration),
        *_advice_lines(calibration),
    ]
    return [line for line in lines if line]


def _error_line(what: str, errors: ErrorSummary) -> str:
    if not errors.pairs:
        return f"{what}: no run was measured, so its figures remain guesses"
    return (
        f"{what}: {len(errors.pairs)} runs; each predicted from all others: mean {100 * errors.mean:.1f}, "
        f"median {100 * errors.quantile(0.5):.1f}, p90 {100 * errors.quantile(0.9):.1f} %"
    )


def _drift_line(calibration: Calibration) -> str:
    if calibration.drift_from is None:
        return "drift: none found"
    change = 100 * (calibration.constants.drift - 1)
    return f"drift: from {calibration.drift_from} on, the time for the same work changes by {change:+.1f} %"


def _learning_lines(calibration: Calibration) -> list[str]:
    """Return how the error falls with the number of runs, and what twice as many would improve."""
    count = len(calibration.time_errors.pairs)
    if not calibration.learning_curve:
        missing = max(0, ENOUGH_ROWS - count)
        return [f"more runs: {missing} more would give most of the accuracy"] if missing else []
    points = [*calibration.learning_curve, (count, calibration.time_errors.mean)]
    curve = ", ".join(f"{100 * error:.1f} % with {rows}" for rows, error in points)
    gain = max(0.0, points[-2][1] - points[-1][1])
    return [f"more runs: mean error {curve}; {count} more would lower it by about {100 * gain:.1f} points"]


def _advice_lines(calibration: Calibration) -> list[str]:
    """Return a line for each constant that these runs hardly determine, with the run that would."""
    lines = []
    for constant, spread in zip(CONSTANTS, calibration.spreads, strict=True):
        if constant.name != "drift" and spread > UNLEARNED * constant.spread:
            lines.append(f"{constant.name} is hardly measured: {_ADVICE[constant.name]}")
    return lines

"""Prices every row of a table that can be priced, and gives the reason for the others."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bigsci_launch.plan.calibrate.place import calibration_at, expected_at
from bigsci_launch.plan.calibrate.rows import MeasuredRow, setup_of
from bigsci_launch.plan.price.calibration import FAR, UNCALIBRATED_BAND, Calibration
from bigsci_launch.plan.price.price import price_setup
from bigsci_launch.plan.shape.tflops import tflops_of

PREDICTED = ("pred_sec_per_it", "pred_mem_gb", "pred_oom", "pred_tflops", "pred_band", "pred_closeness")


@dataclass(frozen=True, slots=True)
class PredictedRow:
    """A row with its predictions, or with the reason for having none. `is_far` if it is like nothing measured, or if
    the calibration is for another place."""

    row: MeasuredRow
    cells: dict[str, str]
    reason: str
    is_far: bool = False


def predict_row(row: MeasuredRow, calibration: Calibration | None) -> PredictedRow:
    """Return the predictions for one row; `pred_tflops` is in the convention of the row's date, `pred_band` a fraction.

    If the row does not say whether launches blocked, the calibration decides. Without one, what is expected of the GPU
    that the row names counts.
    """
    if calibration:
        row = replace(row, assumed={"launch_blocking": str(int(calibration.has_blocking_launches))})
    setup = setup_of(row)
    if isinstance(setup, str):
        return _unpriced(row, setup)
    known = calibration_at(calibration, row) if calibration else expected_at(row, setup.ranks_per_node)
    if isinstance(known, str):
        return _unpriced(row, known)
    price = price_setup(setup, known)
    figures = (
        f"{price.seconds:.4f}",
        f"{price.memory_gib:.2f}",
        str(int(price.is_out_of_memory)),
        f"{tflops_of(setup, price.seconds).of_day(setup.day):.3f}",
        f"{price.band:.4f}",
        f"{price.closeness:.4f}",
    )
    is_far = known.is_measured and known.time_errors.support(price.closeness) < FAR
    return PredictedRow(row, dict(zip(PREDICTED, figures, strict=True)), "", is_far)


def _unpriced(row: MeasuredRow, reason: str) -> PredictedRow:
    return PredictedRow(row, dict.fromkeys(PREDICTED, ""), reason)


def far_line(predicted: Sequence[PredictedRow]) -> str | None:
    """Return a line with how many rows are far from everything measured, or None if none is."""
    priced = [one for one in predicted if not one.reason]
    far = sum(one.is_far for one in priced)
    if not far:
        return None
    return (
        f"{far} of {len(priced)} rows are far from everything measured, or from another place: their bands are nearly "
        f"those without a calibration (±{100 * UNCALIBRATED_BAND:.0f} %)"
    )


def predicted_csv(columns: Sequence[str], predicted: Sequence[PredictedRow]) -> str:
    """Return the table as CSV, with its own columns first and the predictions after them."""
    names = [*(column for column in columns if column not in PREDICTED), *PREDICTED]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for one in predicted:
        writer.writerow({**one.row.cells, **one.cells})
    return text.getvalue()

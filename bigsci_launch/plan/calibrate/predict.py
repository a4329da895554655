"""Prices every row of a table that can be priced, and gives the reason for the others."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bigsci_launch.plan.calibrate.rows import MeasuredRow, setup_of
from bigsci_launch.plan.price.calibration import Calibration
from bigsci_launch.plan.price.price import price_setup
from bigsci_launch.plan.shape.tflops import tflops_of

PREDICTED = ("pred_sec_per_it", "pred_mem_gb", "pred_oom", "pred_tflops")


@dataclass(frozen=True, slots=True)
class PredictedRow:
    """A row with its predictions, or with the reason for having none."""

    row: MeasuredRow
    cells: dict[str, str]
    reason: str


def predict_row(row: MeasuredRow, calibration: Calibration) -> PredictedRow:
    """Return the predictions for one row; `pred_tflops` is in the convention of the row's date. If the row does not say
    whether launches blocked, the calibration decides."""
    setup = setup_of(replace(row, assumed={"launch_blocking": str(int(calibration.has_blocking_launches))}))
    if isinstance(setup, str):
        return PredictedRow(row, dict.fromkeys(PREDICTED, ""), setup)
    price = price_setup(setup, calibration)
    figures = (
        f"{price.seconds:.4f}",
        f"{price.memory_gib:.2f}",
        str(int(price.is_out_of_memory)),
        f"{tflops_of(setup, price.seconds).of_day(setup.day):.3f}",
    )
    return PredictedRow(row, dict(zip(PREDICTED, figures, strict=True)), "")


def predicted_csv(columns: Sequence[str], predicted: Sequence[PredictedRow]) -> str:
    """Return the table as CSV, with its own columns first and the predictions after them."""
    names = [*(column for column in columns if column not in PREDICTED), *PREDICTED]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for one in predicted:
        writer.writerow({**one.row.cells, **one.cells})
    return text.getvalue()

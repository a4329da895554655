"""What a row is predicted to take, with a calibration and without."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from bigsci_launch.plan.calibrate.calibrate import calibrate
from bigsci_launch.plan.calibrate.predict import predict_row
from bigsci_launch.plan.calibrate.rows import MeasuredRow, Measurement, setup_of
from bigsci_launch.plan.price.calibration import UNCALIBRATED_BAND, expected_on, read_calibration
from bigsci_launch.plan.price.count import count_work
from bigsci_launch.plan.price.hardware import A100, model_named
from bigsci_launch.plan.price.price import price_setup
from bigsci_launch.plan.price.terms import TERMS
from bigsci_launch.plan.shape.setup import Setup

SIZES = {"nlayers": "32", "nhidden": "4096", "nheads": "32", "seq": "4096", "vocab": "32000", "tp": "1", "pp": "1"}
FIGURES = {
    "peak_tflops": "1000",
    "gpu_memory_gib": "90",
    "hbm_tb_per_s": "3",
    "multiprocessors": "128",
    "nvlink_gb_per_s": "400",
}


def row(**cells: str) -> MeasuredRow:
    given = {"dp": "8", "mbs": "1", "gbs": "64", "framework": "megatron", "gpu": "H100-SXM5-80GB", **SIZES, **cells}
    return MeasuredRow(given, "rows.csv:2")


def setup(**cells: str) -> Setup:
    found = setup_of(row(**cells))
    assert isinstance(found, Setup)
    return found


def test_without_a_calibration_the_gpu_of_the_row_counts() -> None:
    known = model_named("H100-SXM5-80GB")
    assert known is not None
    predicted = predict_row(row(), None)
    assert (predicted.reason, predicted.is_far) == ("", False)
    assert float(predicted.cells["pred_sec_per_it"]) == pytest.approx(
        price_setup(setup(), expected_on(known)).seconds, abs=1e-4
    )
    assert float(predicted.cells["pred_band"]) == UNCALIBRATED_BAND


def test_figures_in_a_row_describe_a_gpu_that_is_in_no_table() -> None:
    assert "peak_tflops" in predict_row(row(gpu="X9000"), None).reason
    fast, slow = (
        float(predict_row(row(gpu="X9000", **{**FIGURES, "peak_tflops": peak}), None).cells["pred_sec_per_it"])
        for peak in ("2000", "500")
    )
    assert fast < slow
    assert "gpu" in predict_row(row(gpu=""), None).reason


def test_few_rows_make_no_prediction_worse_than_none() -> None:
    """Noise around what is expected: nothing is to be learned from it."""
    given = []
    for index, micro_batch in enumerate(("1", "2", "4", "8", "1", "2", "4", "8")):
        one = setup(mbs=micro_batch, gbs=str(64 * (index + 1)))
        seconds = price_setup(one, expected_on(A100)).seconds * math.exp((-0.2, 0.2)[index % 2])
        given.append(Measurement(str(index), "noise", one, seconds, None, False))
    errors = calibrate(given, A100).time_errors
    assert errors.mean <= (math.expm1(0.2) - math.expm1(-0.2)) / 2 + 1e-9


def test_another_attention_widens_the_band_but_leaves_the_calibration(root: Path) -> None:
    known = read_calibration(root / "slurm/calibrations/jean-zay-a100.json")
    bloom = setup(
        framework="deepspeed",
        nlayers="70",
        nhidden="14336",
        nheads="112",
        seq="2048",
        tp="4",
        pp="12",
        mbs="2",
        gbs="2048",
        recompute="full",
        attention="fused",
    )
    unfused = replace(bloom, technique=replace(bloom.technique, attention="unfused"))
    assert price_setup(unfused, known).band < price_setup(bloom, known).band < 0.8 * UNCALIBRATED_BAND


def test_messages_wait_for_each_other_on_many_nodes() -> None:
    messages = TERMS.index("messages")
    few, many = (count_work(setup(framework="other", dp=dp, gbs="1024"), A100).step for dp in ("16", "512"))
    assert 10 < many[messages] / few[messages] < 80
    assert count_work(setup(dp="512", gbs="1024"), A100).hidden_step[messages] < many[messages]

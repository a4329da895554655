"""The table of plans fits the screen, and its figures of throughput are what reports call them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigsci_launch.config.rules.layout import Limits
from bigsci_launch.plan.choose.answer import Answer, PlanRequest
from bigsci_launch.plan.choose.search import make_plan
from bigsci_launch.plan.price.calibration import Calibration
from bigsci_launch.plan.price.hardware import GpuModel
from bigsci_launch.plan.shape.setup import Setup, Technique
from bigsci_launch.plan.show.report import out_of_memory_hint, sizes_lines
from bigsci_launch.plan.show.table import COLUMNS, plan_table
from bigsci_launch.plan.show.throughput import throughput_line, throughput_of
from bigsci_launch.topology import Topology

H100 = GpuModel("H100", 79.6, 989.0, 1979.0)


def answer_for(setup: Setup, calibration: Calibration) -> Answer:
    request = PlanRequest("run", setup, "site", range(48, 49), Limits(), (), calibration, None, 100, 204800, None)
    return Answer(request, None, None)


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_the_table_fits_by_leaving_out_columns(bloom: Setup, jean_zay: Calibration, width: int) -> None:
    plans = [make_plan(replace(bloom, topology=Topology(tp=4, pp=12, dp=dp)), (), jean_zay) for dp in (8, 16, 4)]
    columns, rows = plan_table(answer_for(bloom, jean_zay), plans, width)
    assert ">nodes" in columns
    # As rich draws it: a space before the table, three between columns, one after it.
    widths = [max(len(text) for text in column) for column in zip([c.lstrip(">") for c in columns], *rows, strict=True)]
    assert sum(widths) + 3 * (len(widths) - 1) + 2 <= width
    assert {">#", ">tp", ">pp", ">dp", ">mbs", ">s/step", ">MFU", ">GiB", ">3 of 4"} <= set(columns)
    assert width < 200 or len(columns) == len(COLUMNS) + 1
    assert width < 100 or ">tok/s/GPU" in columns


def test_axes_that_stay_as_configured_have_columns(bloom: Setup, jean_zay: Calibration) -> None:
    wide = replace(bloom, framework="megatron", topology=Topology(tp=4, cp=2, pp=12, dp=4))
    columns, (row,) = plan_table(answer_for(wide, jean_zay), [make_plan(wide, (), jean_zay)])
    assert row[columns.index(">cp")] == "2"


def test_mfu_counts_the_model_and_not_what_is_recomputed(bloom: Setup) -> None:
    once = replace(bloom, technique=Technique())
    again, plain = (throughput_of(setup, 100.0, H100) for setup in (bloom, once))
    assert again.model_tflops == plain.model_tflops == plain.hardware_tflops
    # Layers take a third more with recomputation, the head does not.
    assert 1.30 < again.hardware_tflops / again.model_tflops < 4 / 3
    assert again.tokens_per_second == pytest.approx(2048 * 2048 / 100 / 384)
    assert again.mfu == pytest.approx(again.model_tflops / 989)


def test_the_peak_is_that_of_the_precision(bloom: Setup) -> None:
    fp8 = replace(bloom, precision="fp8")
    assert throughput_of(fp8, 100.0, H100).peak_tflops == 1979
    assert throughput_of(replace(bloom, precision="fp32"), 100.0, H100).peak_tflops == 989 / 2
    unknown = replace(H100, fp8_tflops=None)
    assert throughput_of(fp8, 100.0, unknown).mfu is None
    assert "unknown peak of fp8" in throughput_line(fp8, unknown)


def test_an_unknown_peak_is_shown_as_unknown(bloom: Setup, jean_zay: Calibration) -> None:
    fp8 = replace(bloom, precision="fp8")
    old = replace(jean_zay, gpu=replace(jean_zay.gpu, fp8_tflops=None))
    columns, (row,) = plan_table(answer_for(fp8, old), [make_plan(fp8, (), old)])
    assert row[columns.index(">MFU")] == "?"


@pytest.mark.parametrize(
    ("change", "helps", "not_named"),
    [
        (
            {"technique": Technique()},
            ["more nodes", "training.activation_checkpointing=true"],
            ["zero_stage", "context"],
        ),
        ({}, ["more nodes"], ["activation_checkpointing", "zero_stage"]),
        ({"framework": "torchtitan"}, ["parallelism.zero_stage=3", "parallelism.context_parallel_size=2"], ["recomp"]),
        (
            {"framework": "megatron", "technique": Technique(zero_stage=0)},
            ["parallelism.zero_stage=1"],
            ["zero_stage=3"],
        ),
    ],
)
def test_the_hint_names_what_would_save_memory(
    bloom: Setup, change: dict[str, object], helps: list[str], not_named: list[str]
) -> None:
    hint = out_of_memory_hint(replace(bloom, **change))  # type: ignore[arg-type]
    assert all(key in hint for key in helps)
    assert not any(key in hint for key in not_named)


@pytest.mark.parametrize(("in_fp32", "gradients"), [(True, "14.9"), (False, "7.5")])
def test_the_state_of_a_rank_has_gradients_in_the_format_of_the_run(
    bloom: Setup, in_fp32: bool, gradients: str
) -> None:
    text = "\n".join(sizes_lines(replace(bloom, has_fp32_gradients=in_fp32)))
    assert f"a rank of stage 0: 4.0B parameters; weights 7.5 GiB, gradients {gradients} GiB" in text

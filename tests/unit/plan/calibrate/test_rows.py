"""Tables of measured rows: what is read, what is refused and why, appended predictions, and their score."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bigsci_launch.errors import DataError
from bigsci_launch.plan.calibrate.predict import PREDICTED, predict_row, predicted_csv
from bigsci_launch.plan.calibrate.rows import MeasuredRow, Measurement, measurements_of, read_rows, setup_of
from bigsci_launch.plan.calibrate.score import error_figures, rank_figures, score_rows
from bigsci_launch.plan.price.calibration import Calibration
from bigsci_launch.plan.shape.parameters import Experts, ModelShape
from bigsci_launch.plan.shape.partition import PartitionRule
from bigsci_launch.plan.shape.setup import UNFUSED_2021, Setup, Technique
from bigsci_launch.topology import Topology
from tests.support.texts import has_parts

GOOD = {
    "row_id": "x1",
    "nlayers": "72",
    "nhidden": "14336",
    "nheads": "64",
    "seq": "2048",
    "vocab": "250880",
    "dp": "8",
    "tp": "8",
    "pp": "6",
    "mbs": "4",
    "gbs": "2048",
    "gpus": "384",
    "nodes": "48",
    "precision": "fp16",
}


def row(**cells: str) -> MeasuredRow:
    return MeasuredRow({**GOOD, **cells}, "rows.csv:2")


UNPRICED = (
    "dp=; mbs=two; pp=0; nheads=64.5; gpus=320; tp=16, dp=4; gbs=2047; nheads=60; precision=int8; zero=2; "
    "partition_method=type:mamba; framework=mamba; framework=megatron, precision=nvfp4; "
    "framework=megatron, activation=geglu; framework=megatron, activation=swiglu; "
    "framework=megatron, recompute=mlp; framework=megatron, overlap=dp ep; framework=deepspeed, zero=2; "
    "framework=torchtitan, kv_heads=4; framework=megatron, kv_heads=48; framework=megatron, cp=2; "
    "framework=megatron, ep=8; framework=megatron, experts=8; framework=megatron, schedule=interleaved; "
    "framework=megatron, schedule=zero_bubble, virtual_stages=2; framework=megatron, nlayers=73; "
    "framework=fsdp, shard_group=3; framework=other, hop_wait=long; date=2022-02-20, pp=48, tp=1, partition_method="
)


def test_rows_that_cannot_be_priced_say_why(check_golden: Callable[[Path, str], None]) -> None:
    said = ""
    for cells in UNPRICED.split("; "):
        reason = setup_of(row(**dict(cell.split("=") for cell in cells.split(", "))))
        assert isinstance(reason, str), cells
        said += f"{cells}: {reason}\n"
    check_golden(Path(__file__).parents[3] / "golden" / "reports" / "unpriced-rows.txt", said)


def test_what_a_row_leaves_out_is_filled_in() -> None:
    setup = setup_of(row(gpus="", nodes="", precision="", partition_method=""))
    assert not isinstance(setup, str)
    assert setup.ranks_per_node == 8
    assert setup.precision == "fp16"
    assert setup.partition_method == "type:transformer"
    assert setup.day is None


def setup(**cells: str) -> Setup:
    found = setup_of(row(**cells))
    assert isinstance(found, Setup), found
    return found


def test_tables_without_a_framework_are_of_2022(chronicle: list[Measurement], vtrain: list[Measurement]) -> None:
    setups = [measured.setup for measured in chronicle + vtrain]
    assert {replace(setup.technique, zero_stage=1) for setup in setups} == {UNFUSED_2021}
    assert {(setup.framework, setup.expert_shards) for setup in setups} == {("deepspeed", 1)}
    for shape in {setup.shape for setup in setups}:
        plain = ModelShape(
            shape.num_layers, shape.hidden_size, shape.num_attention_heads, 4 * shape.hidden_size, 2048, 1
        )
        assert replace(shape, vocab_size=1) == plain


def test_a_framework_brings_its_own_defaults() -> None:
    megatron, titan = (
        setup(framework="megatron", precision=""),
        setup(framework="torchtitan", pp="1", gpus="64", nodes="8"),
    )
    assert megatron.technique == Technique(sequence_parallel=True, overlap=frozenset(("data",)), kernels="compiled")
    assert (megatron.precision, megatron.has_fp32_gradients) == ("bf16", True)
    assert titan.technique == Technique(
        zero_stage=3, sequence_parallel=True, overlap=frozenset(("data",)), kernels="compiled"
    )
    assert titan.shape.vocab_size_multiple == 1
    assert setup(framework="deepspeed").technique == Technique(zero_stage=1)
    # What is assumed of rows that do not say it, is not assumed of another program.
    assumed = replace(row(framework="megatron"), assumed={"launch_blocking": "1"})
    found = setup_of(assumed)
    assert isinstance(found, Setup)
    assert not found.has_blocking_launches


def test_every_column_of_a_model_of_today_is_read() -> None:
    mixtral = {
        **{"framework": "megatron", "nlayers": "32", "nhidden": "4096", "nheads": "32", "kv_heads": "8"},
        **{"head_dim": "160", "ffn": "14336", "activation": "swiglu", "norm": "rmsnorm", "positions": "rotary"},
        **{"biases": "0", "tied": "0", "seq": "4096", "vocab": "32000", "experts": "8", "experts_per_token": "2"},
        **{"expert_ffn": "14336", "shared_expert_ffn": "2048", "dense_layers": "1", "ep": "4", "cp": "2"},
        **{
            "dp": "8",
            "tp": "2",
            "pp": "4",
            "gpus": "128",
            "nodes": "16",
            "mbs": "1",
            "gbs": "256",
            "precision": "mxfp8",
        },
        **{"attention": "unfused", "recompute": "2", "sequence_parallel": "1", "zero": "2", "shard_group": "4"},
        **{"schedule": "interleaved", "virtual_stages": "2", "overlap": "dp tp", "hop_wait": "0.25"},
    }
    found = setup(**mixtral)
    assert found.shape == ModelShape(
        *(32, 4096, 32, 14336, 4096, 32000),
        tied_embeddings=False,
        positions="rotary",
        num_key_value_heads=8,
        activation="swiglu",
        norm="rmsnorm",
        biases=False,
        head_size=160,
        experts=Experts(8, 2, 14336, 2048, 1),
    )
    assert found.topology == Topology(tp=2, pp=4, dp=8, cp=2)
    assert (found.precision, found.expert_shards, found.framework) == ("fp8", 4, "megatron")
    assert found.technique == Technique(
        "unfused",
        "full",
        2,
        True,
        2,
        4,
        "interleaved",
        2,
        overlap=frozenset(("data", "tensor")),
        kernels="compiled",
        hop_wait=0.25,
    )


def test_layers_are_cut_as_the_framework_cuts_them() -> None:
    layout = {"tp": "8", "dp": "1", "pp": "4", "gpus": "32", "nodes": "4", "gbs": "64"}
    cut = {
        (framework, layers): setup(framework=framework, nlayers=layers, **layout).layers_per_stage
        for framework, layers in (("megatron", "32"), ("megatron", "30"), ("megatron", "31"), ("torchtitan", "32"))
    }
    assert cut == {
        ("megatron", "32"): (8, 8, 8, 8),
        ("megatron", "30"): (7, 8, 8, 7),
        ("megatron", "31"): (8, 8, 8, 7),
        ("torchtitan", "32"): (8, 9, 8, 7),
    }
    interleaved = setup(framework="megatron", nlayers="62", virtual_stages="2", **layout)
    assert interleaved.layers_per_stage == (15, 16, 16, 15)
    assert setup(framework="megatron", nlayers="33", partition_method="time:9,8,8,8", **layout).layers_per_stage[0] == 9


def test_other_programs_run_layouts_that_deepspeed_refuses() -> None:
    across = setup(framework="megatron", tp="16", dp="4", kv_heads="8")
    assert (across.topology.tp, across.ranks_per_node) == (16, 8)
    assert setup(framework="megatron", zero="3").technique.zero_stage == 3
    unsaid = setup_of(row(framework="megatron", tp="16", dp="4", nodes=""))
    assert isinstance(unsaid, str) and has_parts(unsaid, "tp 16", "8 GPUs")


def test_seconds_follow_from_tokens_per_second_and_where_they_were_measured_is_kept() -> None:
    place = {"gpu": "H100-SXM5-80GB", "site": "here", "network_gb_per_s": "400"}
    (found,), _ = measurements_of([row(framework="megatron", tokens_per_s_per_gpu="100", **place)])
    assert found.seconds == pytest.approx(2048 * 2048 / (100 * 384))
    assert (found.gpu, found.site, found.network_gb_per_s) == ("H100-SXM5-80GB", "here", 400)
    assert row(tokens_per_s_per_gpu="100", sec_per_it="7").seconds == 7


def test_the_partitioner_is_that_of_the_day() -> None:
    rules = []
    for day in ("2022-02-20", "2024-02-20", ""):
        setup = setup_of(row(date=day))
        assert not isinstance(setup, str)
        rules.append(setup.partition_rule)
    assert rules == [PartitionRule.FILL, PartitionRule.BALANCE, PartitionRule.BALANCE]


def test_bf16_accumulates_in_fp32_since_there_is_an_optimizer_for_it() -> None:
    found = []
    for cells in ({"date": "2022-02-17"}, {"date": "2022-02-28"}, {}, {"notes": "BF16 optimizer"}):
        setup = setup_of(row(precision="bf16", zero="0", **cells))
        assert not isinstance(setup, str)
        found.append((setup.has_fp32_gradients, setup.technique.zero_stage > 0))
    assert found == [(False, False), (True, True), (True, True), (True, True)]


def test_rows_that_must_not_count_do_not() -> None:
    found, left = measurements_of(
        [
            row(sec_per_it="100", mem_gb="50", score_time="0", score_mem="1"),
            row(sec_per_it="100", score_time="0", score_mem="0"),
            row(sec_per_it="-1"),
            row(oom="1", score_time="0"),
            row(sec_per_it="100"),
        ]
    )
    assert [(one.seconds, one.memory_gib, one.ran_out_of_memory) for one in found] == [
        (None, 50.0, False),
        (None, None, True),
        (100.0, None, False),
    ]
    assert len(left) == 2


def test_a_table_without_the_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="no column nlayers"):
        read_rows(path)
    with pytest.raises(DataError, match=r"missing\.csv"):
        read_rows(tmp_path / "missing.csv")
    path.write_bytes(b"nlayers\n\xff\xfe\x00")
    with pytest.raises(DataError, match=r"rows\.csv"):
        read_rows(path)


def test_predictions_stand_beside_every_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    columns = [*GOOD, "mine"]
    path.write_text(
        "\ufeff" + ",".join(columns) + "\n" + ",".join([*GOOD.values(), '"kept, as it is"']) + "\n" + "x2,72\n"
    )
    names, rows = read_rows(path)
    predicted = [predict_row(one, Calibration()) for one in rows]
    assert [bool(one.reason) for one in predicted] == [False, True]
    path.write_text(predicted_csv(names, predicted))
    again_names, again = read_rows(path)
    assert again_names == [*columns, *PREDICTED]
    assert again[0].text("mine") == "kept, as it is"
    assert again[0].number("pred_sec_per_it")
    assert again[0].text("pred_oom") == "0"
    assert [again[1].text(name) for name in PREDICTED] == [""] * len(PREDICTED)
    # Predicting again replaces the columns rather than adding them twice.
    assert predicted_csv(again_names, [predict_row(one, Calibration()) for one in again]) == path.read_text()


def test_errors_are_relative_to_what_was_measured() -> None:
    figures = error_figures([(100, 110), (100, 100), (50, 49)])
    assert (figures.mean, figures.median) == (pytest.approx(4), pytest.approx(2))
    assert figures.p90 == pytest.approx(8.4)


def test_ranking_ignores_near_pairs_and_counts_predicted_ties_as_nothing() -> None:
    right = [(10.0, 1.0), (20.0, 2.0), (30.0, 3.0)]
    assert rank_figures([right]).tau == 1
    assert rank_figures([[(10.0, 3.0), (20.0, 2.0), (30.0, 1.0)]]).tau == -1
    assert rank_figures([[(10.0, 1.0), (20.0, 1.0), (30.0, 3.0)]]).tau == pytest.approx(2 / 3)
    assert rank_figures([[(10.0, 9.0), (10.05, 1.0)]]).num_pairs == 0


def test_regret_is_what_the_wrong_choice_costs() -> None:
    figures = rank_figures([[(100.0, 9.0), (103.0, 8.0)], [(100.0, 1.0), (150.0, 2.0)], [(5.0, 5.0)]])
    assert (figures.num_sections, figures.num_found) == (2, 1)
    assert figures.regret == pytest.approx(1.5)


def test_out_of_memory_is_judged_on_the_rows_that_say_so() -> None:
    rows = [
        row(oom="1", pred_oom="1", score_oom="1"),
        row(oom="1", pred_oom="0", score_oom="1"),
        row(oom="0", pred_oom="1", score_oom="1"),
        row(oom="0", pred_oom="1", score_oom="0"),
        row(oom="0", pred_oom="", score_oom="1"),
    ]
    oom = score_rows(rows).oom
    assert (oom.num_oom, oom.num_caught, oom.num_fitting, oom.num_false) == (2, 1, 1, 1)


def test_launches_that_nobody_noted_blocked_as_they_did_elsewhere(tmp_path: Path, jean_zay: Calibration) -> None:
    path = tmp_path / "rows.csv"
    lines = [",".join([*GOOD.values(), blocking]) for blocking in ("1", "1", "0", "")]
    path.write_text("\n".join([",".join([*GOOD, "launch_blocking"]), *lines]) + "\n")
    _, rows = read_rows(path)
    setups = [setup_of(one) for one in rows]
    assert [setup.has_blocking_launches for setup in setups if not isinstance(setup, str)] == [True, True, False, True]
    assert jean_zay.has_blocking_launches
    seconds = [predict_row(one, jean_zay).cells["pred_sec_per_it"] for one in (row(), row(launch_blocking="1"))]
    assert seconds[0] == seconds[1] != predict_row(row(launch_blocking="0"), jean_zay).cells["pred_sec_per_it"]

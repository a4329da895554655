"""Tables of measured rows: what is read, what is refused and why, appended predictions, and their score."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigsci_launch.errors import DataError
from bigsci_launch.plan.calibrate.predict import PREDICTED, predict_row, predicted_csv
from bigsci_launch.plan.calibrate.rows import MeasuredRow, measurements_of, read_rows, setup_of
from bigsci_launch.plan.calibrate.score import error_figures, rank_figures, score_rows
from bigsci_launch.plan.price.calibration import Calibration
from bigsci_launch.plan.shape.partition import PartitionRule

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


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"dp": ""}, "dp is empty"),
        ({"mbs": "two"}, "mbs is not a number: 'two'"),
        ({"pp": "0"}, "pp is 0, not a positive whole number"),
        ({"nheads": "64.5"}, "not a positive whole number"),
        ({"gpus": "320"}, "dp 8 x tp 8 x pp 6 = 384, but gpus is 320"),
        ({"tp": "16", "dp": "4"}, "tp 16 is more than the 8 GPUs of a node"),
        ({"gbs": "2047"}, "gbs 2047 is not a multiple of mbs 4 x dp 8 = 32"),
        ({"nheads": "60"}, "60 heads are not a multiple of tp 8"),
        ({"precision": "int8"}, "precision 'int8'"),
        ({"zero": "2"}, "ZeRO stage 2 cannot be used with a pipeline"),
        ({"partition_method": "type:mamba"}, "matches no layer"),
        ({"date": "2022-02-20", "pp": "48", "tp": "1", "partition_method": ""}, "12 of 48 stages"),
    ],
)
def test_rows_that_cannot_be_priced_say_why(cells: dict[str, str], reason: str) -> None:
    setup = setup_of(row(**cells))
    assert isinstance(setup, str)
    assert reason in setup


def test_what_a_row_leaves_out_is_filled_in() -> None:
    setup = setup_of(row(gpus="", nodes="", precision="", partition_method=""))
    assert not isinstance(setup, str)
    assert setup.ranks_per_node == 8
    assert setup.precision == "fp16"
    assert setup.partition_method == "type:transformer"
    assert setup.day is None


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
    assert [again[1].text(name) for name in PREDICTED] == ["", "", "", ""]
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

"""TFLOP/s in both conventions, and the document's arithmetic of days, hours, tokens and throughput in real units."""

from __future__ import annotations

import pytest

from bigsci_launch.plan.calibrate.rows import Row, setup_of
from bigsci_launch.plan.shape.tflops import CONVENTION_DAY, gpu_hours, tflops_of, training_days


def test_days_and_hours_of_the_document() -> None:
    # 300e9 tokens x 200e9 parameters at 150e12 FLOP/s. The document divides 300 * 200_000_000 by 150: what it leaves
    # out of the product, 1e3 * 1e9, is what tera takes from the rate.
    assert round(training_days(300e9, 200e9, 350, 150), 2) == 105.82
    assert round(gpu_hours(300e9, 200e9, 150), 2) == 888888.89


def test_tokens_and_samples_of_the_document() -> None:
    assert 2048 * 2048 == 4194304
    assert 2 * 4194304 == 8388608
    assert 195312500 // 2048 == 95367
    assert 864 * 16 == 13824


@pytest.mark.parametrize(
    ("seconds", "printed"),
    [(769.99, 2.660), (844.81, 2.424), (430.21, 4.761)],  # the log rounds 4.7605 up
)
def test_samples_per_second_of_the_logs(seconds: float, printed: float) -> None:
    assert 2048 / seconds == pytest.approx(printed, abs=6e-4)


def test_every_printed_figure_is_reproduced(chronicle_rows: list[Row]) -> None:
    """Both conventions, every row that counts, within 0.1 %."""
    numbers = {False: 0, True: 0}
    for row in chronicle_rows:
        setup, printed, seconds, day = setup_of(row), row.number("tflops_reported"), row.seconds, row.day
        if isinstance(setup, str) or not printed or not seconds or not day or not row.is_scored("time"):
            continue
        assert tflops_of(setup, seconds).of_day(day) == pytest.approx(printed, rel=1e-3), row.name
        numbers[day >= CONVENTION_DAY] += 1
    assert numbers[False] > 10
    assert numbers[True] > 30


def test_the_other_convention_would_not_fit(chronicle_rows: list[Row]) -> None:
    row = next(row for row in chronicle_rows if row.name == "r614")
    setup = setup_of(row)
    assert not isinstance(setup, str)
    figures = tflops_of(setup, row.seconds or 0)
    assert 1.035 < figures.full / figures.weights < 1.045


def test_without_recomputation_there_are_three_passes(chronicle_rows: list[Row]) -> None:
    from dataclasses import replace

    setup = setup_of(next(row for row in chronicle_rows if row.name == "r614"))
    assert not isinstance(setup, str)
    without = tflops_of(replace(setup, recompute=False), 100)
    assert without.full == pytest.approx(tflops_of(setup, 100).full * 3 / 4)

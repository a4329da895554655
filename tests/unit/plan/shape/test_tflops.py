"""TFLOP/s in both conventions."""

from __future__ import annotations

import pytest

from bigsci_launch.plan.calibrate.rows import MeasuredRow, setup_of
from bigsci_launch.plan.shape.tflops import CONVENTION_DAY, tflops_of


def test_every_printed_figure_is_reproduced(chronicle_rows: list[MeasuredRow]) -> None:
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


def test_the_other_convention_would_not_fit(chronicle_rows: list[MeasuredRow]) -> None:
    row = next(row for row in chronicle_rows if row.name == "r614")
    setup = setup_of(row)
    assert not isinstance(setup, str)
    figures = tflops_of(setup, row.seconds or 0)
    assert 1.035 < figures.full / figures.weights < 1.045


def test_without_recomputation_the_layers_have_three_passes_and_the_head_as_before(
    chronicle_rows: list[MeasuredRow],
) -> None:
    from dataclasses import replace

    setup = setup_of(next(row for row in chronicle_rows if row.name == "r614"))
    assert not isinstance(setup, str)
    without = tflops_of(replace(setup, technique=replace(setup.technique, recomputation="none")), 100)
    assert without.weights == pytest.approx(tflops_of(setup, 100).weights * 3 / 4)
    tokens = setup.global_batch_size * setup.shape.sequence_length
    head = 6 * tokens * setup.shape.hidden_size * setup.shape.padded_vocab_size(setup.topology.tp)
    head /= 100 * setup.topology.world_size * 1e12
    assert without.full - head == pytest.approx((tflops_of(setup, 100).full - head) * 3 / 4)

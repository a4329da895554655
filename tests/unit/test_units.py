"""Durations round-trip and follow sbatch(1)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.units import format_age, format_bytes, format_count, format_slurm_duration, parse_slurm_duration


@given(st.integers(0, 10_000_000))
def test_durations_round_trip(seconds: int) -> None:
    assert parse_slurm_duration(format_slurm_duration(seconds)) == seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("10:30", 630), ("20:00:00", 72000), ("4-4", 360000), ("1-02:03", 93780), ("1-02:03:04", 93784)],
)
def test_every_form_of_sbatch(text: str, seconds: int) -> None:
    assert parse_slurm_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "1h", "1:2:3:4", "-5", "1-", "20:00:00 h", "infinite"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_slurm_duration(text)


def test_people_read_these() -> None:
    assert format_age(3.14) == "3.1 s"
    assert format_age(190) == "3 min 10 s"
    assert format_age(7500) == "2 h 05 min"
    assert format_age(100 * 3600) == "4 d 04 h"
    assert format_bytes(1536) == "1.5 KiB"
    assert format_bytes(2.3 * 1024**4) == "2.3 TiB"
    assert format_count(176_247_271_424) == "176.2B"

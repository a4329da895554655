"""How the console reports bytes: late, by tenths without a terminal, with a rate and the time left."""

from __future__ import annotations

import pytest

from bigsci_launch.cli import console

GIB = 1 << 30


@pytest.mark.parametrize(
    ("num_done", "num_read", "seconds", "text"),
    [
        (512 * GIB, 256 * GIB, 256, "512.0 GiB of 2.0 TiB, 1.0 GiB/s, 25 min 36 s left"),
        (512 * GIB, 0, 3, "512.0 GiB of 2.0 TiB"),
        (2048 * GIB, 1024 * GIB, 512, "2.0 TiB of 2.0 TiB, 2.0 GiB/s, 0.0 s left"),
        (3072 * GIB, 1024 * GIB, 512, "3.0 TiB, 2.0 GiB/s"),
    ],
    ids=["running", "nothing read yet", "done", "more than expected"],
)
def test_a_rate_counts_only_what_was_read(num_done: int, num_read: int, seconds: float, text: str) -> None:
    assert console.bytes_text(num_done, 2048 * GIB, num_read, seconds) == text


def test_short_work_shows_nothing_and_asks_for_no_total(capsys: pytest.CaptureFixture[str]) -> None:
    def total() -> int:
        raise AssertionError

    with console.late_bytes("comparing", total) as report_progress:
        report_progress(5)
    assert capsys.readouterr().err == ""


def test_without_a_terminal_there_is_a_line_for_each_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    with console.late_bytes("comparing", lambda: 100, after_s=-1.0) as report_progress:
        for num_done in range(101):
            report_progress(num_done)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" of ")[0] for line in lines] == [f"comparing: {10 * tenth} B" for tenth in range(11)]

"""Ranks that were asked to stop are given the time that they may need, also where nothing is known of it yet."""

from __future__ import annotations

from bigsci_launch.watch.act.patience import patience_s


def test_what_was_measured_counts_more_than_what_is_expected() -> None:
    assert patience_s({"step": 100.0, "save": 40.0, "eval": 720.0}.get, None) == 30 + 300 + 80 + 1440
    assert patience_s({"step": 100.0}.get, None) == 30 + 300 + 2 * 60, "no save was seen yet"
    assert patience_s({}.get, None) == 30 + 3 * 120 + 2 * 60, "a watcher that has just begun must not end a step"

"""The clock of loops that others wait for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bigsci_launch import awake_clock
from bigsci_launch.awake_clock import PAUSE_S, AwakeClock


def test_it_stands_still_while_its_process_does(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([100.0, 100.5, 140.5, 141.0, 141.0 + PAUSE_S])
    monkeypatch.setattr(awake_clock, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    clock = AwakeClock()
    assert [clock.read() for _ in range(4)] == [100.5, 100.5, 101.0, 101.0 + PAUSE_S]

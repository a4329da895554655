"""What people ask of real ranks: each of them saves and stops after the step that was named, and no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bigsci_launch.runs.control.request import Request, put_request

from .conftest import Start

pytestmark = pytest.mark.torch
RANKS = range(2)


def test_all_ranks_save_and_stop_after_exactly_the_step_that_was_named(start: Start, tmp_path: Path) -> None:
    slow = {"kind": "slow", "rank": 1, "step": 1, "seconds": 0.1}
    attempt = start(tmp_path, "dp=2", training={"steps": 2000}, faults=[slow], guards={"interval": 50})
    attempt.until(lambda: bool(attempt.steps()))
    last = max(attempt.steps()) + 31
    for verb, step in (("save", last - 10), ("restart", last)):
        asked = Request(f"{verb}-a", verb, "alice", "a new revision", step, attempt.folder.name)
        put_request(attempt.folder, asked)
    assert attempt.wait() == [0] * 2, attempt.logs()
    saves = [[(each["step"], each.get("request")) for each in attempt.events(rank, "save")] for rank in RANKS]
    assert saves == [[(last - 10, "save-a"), (last, None)], [(last - 10, None), (last, None)]]
    ends = [attempt.events(rank, "end")[-1] for rank in RANKS]
    assert [(each["step"], each["reason"]) for each in ends] == [(last, "asked")] * 2
    by = json.loads(attempt.folder.ended_by.read_text())
    assert (by["act"], by["who"], by["continues"], by["step"]) == ("restart", "alice", True, last)

"""How often the host waits for its device in a step, counted on a CPU whose tensors say that they are on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .conftest import Attempt

# The first two steps are checked, and the last; before a checked one the whole state is fingerprinted.
TRAINING = {"steps": 6, "global_batch_size": 8}
NORM, LOSS, WORDS = (f"bigsci_launch/train/{each}" for each in ("parallel/optimizer.py", "loop.py", "rank/exchange.py"))
MOST_IN_A_CHECK = 32


def waits_of(attempt: Attempt, rank: int) -> dict[int, dict[str, Any]]:
    """Return what a rank has counted, by step."""
    lines = (attempt.folder.path / f"waits-{rank}.jsonl").read_text().splitlines()
    return {line["step"]: line for line in map(json.loads, lines)}


def places(waits: dict[str, int]) -> dict[str, int]:
    return {place.rpartition(":")[0]: count for place, count in waits.items()}


@pytest.mark.parametrize(
    ("topology", "precision"),
    [("dp=2", "bf16"), *(pytest.param("tp=1", each, marks=pytest.mark.long) for each in ("bf16", "fp32"))],
)
def test_a_step_waits_for_the_norm_the_loss_and_the_words(
    train_several: Any, tmp_path: Path, topology: str, precision: str
) -> None:
    sections = {"training": {**TRAINING, "precision": precision}, "guards": {"interval": 100}}
    attempt = train_several(tmp_path, topology, [("run", sections)], "pretended_device")["run"]
    for rank in range(len(attempt.processes)):
        steps = waits_of(attempt, rank)
        assert [step for step, found in steps.items() if found["checked"]] == [1, 2, 6]
        for step in (3, 4):
            assert places(steps[step]["waits"]) == {NORM: 1, LOSS: 1, WORDS: 1}, steps[step]
        assert sum(steps[2]["waits"].values()) <= MOST_IN_A_CHECK, steps[2]


def test_all_ranks_collect_garbage_after_the_same_steps(train_several: Any, tmp_path: Path) -> None:
    sections = {"training": {**TRAINING, "steps": 10}, "guards": {"interval": "off"}}
    attempt = train_several(tmp_path, "dp=2", [("run", sections)], "littering")["run"]
    found = [json.loads((attempt.folder.path / f"collections-{rank}.json").read_text()) for rank in (0, 1)]
    assert found[0] == found[1] == {"seen": [[4, 2], [8, 2]], "left": [9, 10]}

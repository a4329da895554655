"""Gradients that are summed over the replicas while the last backward pass still runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .conftest import Attempt

TRAINING = {"steps": 5, "precision": "bf16"}
OVERLAPPED = {"overlap": ["data"]}


def buckets(attempt: Attempt, rank: int) -> list[dict[str, Any]]:
    """Return what a rank has said of each bucket that it sent."""
    return [json.loads(line) for line in (attempt.folder.path / f"buckets-{rank}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("topology", ["dp=2", pytest.param("pp=2,dp=2", marks=pytest.mark.long)])
def test_two_replicas_compute_the_same_bits_and_send_before_the_backward_pass_ends(
    train_several: Any, tmp_path: Path, topology: str
) -> None:
    sections = {"training": TRAINING, "guards": {"interval": 2}}
    spoiled = {**sections, "run": {"name": "spoiled"}, "parallelism": OVERLAPPED}
    runs = [("plain", sections), ("overlapped", {**sections, "parallelism": OVERLAPPED}), ("spoiled", spoiled)]
    attempts = train_several(tmp_path, topology, runs, "small_buckets")
    plain, overlapped = (attempts[name].steps() for name in ("plain", "overlapped"))
    for key in ("loss_hex", "grad_norm"):
        assert [step[key] for step in plain.values()] == [step[key] for step in overlapped.values()]
    for rank in range(len(attempts["plain"].processes)):
        seen = buckets(attempts["overlapped"], rank)
        assert {each["step"] for each in seen} == {2, 3, 4, 5}
        early = [each for each in seen if each["missing"]]
        assert len(early) > len(seen) / 2, seen
    step, message = attempts["spoiled"].stopped()
    assert (step, "gradient reduction" in message) == (4, True)

"""What `bsl spy` says of real waits for a GPU and for NCCL, recorded on one H200 (torch 2.11, NCCL 2.28.9)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bigsci_launch.lost_peer import says_lost_peer
from bigsci_launch.spy.evidence.bundle import Bundle
from bigsci_launch.spy.judge.verdict import judge

RECORDINGS = Path(__file__).parents[1] / "recordings" / "gpu"
ALONE = ("device-synchronize", "stream-synchronize", "event-never-comes", "event-query", "item")
HANGS = ("gil-thread-1", "gil-child-1", "no-group-0", "no-group-1", "no-collective-1")
WORDS = {"watchdog.log": 4, "unique-id-1.log": 1, "gloo-killed-0.log": 1}
"""The logs of ranks that waited for others, and how many of their lines have words that are known to say so."""


@pytest.mark.parametrize("name", ALONE)
def test_one_rank_that_waits_for_its_device_is_not_healthy(name: str) -> None:
    verdict = judge(Bundle({}, (json.loads((RECORDINGS / f"{name}.json").read_text()),)).evidence())
    assert verdict.state.value == "unknown"
    assert verdict.confidence <= 0.2


@pytest.mark.parametrize("name", HANGS)
def test_the_rank_that_does_not_come_is_looked_at_first(name: str) -> None:
    verdict = judge(Bundle({}, (json.loads((RECORDINGS / f"{name}.json").read_text()),)).evidence())
    assert verdict.state.value == "waiting"
    assert verdict.look_first[0].rank == int(name[-1])


@pytest.mark.parametrize(("name", "number"), WORDS.items())
def test_words_about_others_are_recognised(name: str, number: int) -> None:
    assert sum(map(says_lost_peer, (RECORDINGS / name).read_text().splitlines())) >= number

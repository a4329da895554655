"""What `bsl spy` says of real waits for a GPU and for NCCL, recorded on one H200 (torch 2.11, NCCL 2.28.9)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bigsci_launch.cli.main import bsl
from bigsci_launch.lost_peer import says_lost_peer
from bigsci_launch.runs.ending.output import collective_of
from bigsci_launch.spy.evidence.bundle import Bundle
from bigsci_launch.spy.inputs.gather import open_evidence
from bigsci_launch.spy.judge.verdict import judge

RECORDINGS = Path(__file__).parents[1] / "recordings" / "gpu"
ALONE = ("device-synchronize", "stream-synchronize", "event-never-comes", "event-query", "item")
HANGS = ("gil-thread-1", "gil-child-1", "no-group-0", "no-group-1", "no-collective-1")
ENDS = {"watchdog.log": "hang", "unique-id-1.log": "rendezvous", "gloo-killed-0.log": "network"}
"""How `bsl why` says that they ended."""
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


@pytest.mark.parametrize(("name", "kind"), ENDS.items())
def test_why_says_how_it_ended_and_does_not_blame_a_rank(name: str, kind: str) -> None:
    done = CliRunner().invoke(bsl, ["why", str(RECORDINGS / name), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["kind"], found["first_failure"]["is_known"]) == (kind, False)


def test_the_collective_of_the_watchdog_is_that_of_the_dump() -> None:
    (line,) = [each for each in (RECORDINGS / "watchdog.log").read_text().splitlines() if "cpp:689" in each]
    said = collective_of(line)
    evidence = open_evidence([RECORDINGS / "nccl_trace_rank_0"]).evidence()
    recorder = evidence.ranks[0].recorder
    assert recorder is not None
    (call,) = recorder.open_calls
    assert str(call) == f"all_reduce number {said['sequence']}"
    assert recorder.members == {"0": (0,)}
    assert judge(evidence).state.value == "unknown", "a dump of one rank is one look"

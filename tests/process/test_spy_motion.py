"""What tells hung from slow, on real processes: how long threads have slept, what moved, looks over a longer time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.spy.evidence.bundle import Bundle
from bigsci_launch.spy.evidence.ranks import Evidence
from bigsci_launch.spy.evidence.samples import Sample

Facts = dict[str, Any]
AskAgent = Callable[..., Facts]
PLACES = ["load_batch", "send_to_peer", "save_state", "train_step", "poll_queue"]
ASLEEP_S = 12.0
SETTLE_S = 8.0
NUM_BYTES = 10_000_000
LIMIT_S = 6.0


@pytest.fixture(scope="module")
def launched(launch: Any) -> tuple[list[int], float]:
    """The processes in the order of PLACES, and when they were started."""
    found = launch("hung_rank.py", [f"{place} {{ready}}" for place in PLACES])
    return [pid for pid in found.descendants() if parent_of(pid) == found.pid], time.monotonic()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture
def ask(launched: tuple[list[int], float], ask_agent: AskAgent, tmp_path: Path) -> AskAgent:
    """`ask("load_batch", ..., settle_s=8)` looks at the processes in these places."""

    def ask_about(*places: str, **request: Any) -> Facts:
        host = os.uname().nodename
        for place in places:
            rank, pid = places.index(place), launched[0][PLACES.index(place)]
            document = {"rank": rank, "node": host, "host": host, "pid": pid}
            (tmp_path / f"rank-{rank:04d}.json").write_text(json.dumps(document))
        return ask_agent(pid_files=str(tmp_path), **request)

    return ask_about


@pytest.fixture
def settled(ask: AskAgent) -> Evidence:
    return Bundle({}, (ask(*PLACES, settle_s=SETTLE_S),)).evidence()


def samples_of(found: Facts, rank: int) -> tuple[Sample, ...]:
    return Bundle({}, (found,)).evidence().ranks[rank].samples


def test_bytes_to_a_peer_are_told_from_bytes_to_a_file(ask: AskAgent) -> None:
    found = ask("send_to_peer", "save_state", more_looks=0)
    sender, saver = (samples_of(found, rank)[0] for rank in (0, 1))
    assert sender.socket_sent is not None
    assert sender.socket_sent >= NUM_BYTES
    assert (sender.file_bytes, sender.socket_received) == (0, 0)
    assert (saver.socket_sent, saver.socket_received) == (0, 0)
    assert saver.file_bytes == NUM_BYTES
    assert (saver.written_bytes or 0) >= NUM_BYTES
    for rank, first in enumerate((sender, saver)):
        later = samples_of(found, rank)[-1]
        assert (later.socket_sent, later.file_bytes) == (first.socket_sent, first.file_bytes), "nothing moved"


def test_settling_takes_more_samples_and_sees_what_moves_slowly(settled: Evidence) -> None:
    for place, seen in zip(PLACES, settled.ranks, strict=True):
        times = [(sample.mono or 0.0) - (seen.samples[0].mono or 0.0) for sample in seen.samples]
        assert 4 <= len(times) <= 5, (place, times)
        assert SETTLE_S - 0.5 < times[-1] < SETTLE_S + 3.0, (place, times)
        functions = [
            {frame.function for thread in sample.threads or () for frame in thread.frames} for sample in seen.samples
        ]
        assert all(functions), place
        has_moved = len({frozenset(names & {"poll_first", "poll_second"}) for names in functions}) > 1
        assert has_moved == (place == "poll_queue"), (place, functions)


def test_a_rank_that_polls_is_looked_at_longer_than_one_that_sleeps(ask: AskAgent) -> None:
    polling = ask("load_batch", "train_step")
    assert 2 < len(polling["ranks"][0]["samples"]) <= 5
    assert len(polling["ranks"][0]["samples"]) == len(polling["ranks"][1]["samples"])
    assert polling["wall_s"] < LIMIT_S
    asleep = ask("load_batch", "save_state")
    assert [len(rank["samples"]) for rank in asleep["ranks"]] == [2, 2]


def test_the_command_looks_for_as_long_as_it_is_asked_to(launched: tuple[list[int], float], tmp_path: Path) -> None:
    pid = launched[0][PLACES.index("load_batch")]
    argv = [sys.executable, "-m", "bigsci_launch", "spy", "--pid", str(pid), "--settle", "3.5", "--output", "evidence"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert "spy: looking: 1/4 s" in done.stderr
    (path,) = (tmp_path / "evidence" / "nodes").glob("*.json")
    samples = json.loads(path.read_text())["ranks"][0]["samples"]
    assert samples[-1]["mono"] - samples[0]["mono"] >= 3.4


def test_how_long_a_thread_has_slept(launched: tuple[list[int], float], ask: AskAgent) -> None:
    """It comes last: by then, the threads have slept for most of the time."""
    pids, began = launched
    time.sleep(max(0.0, began + ASLEEP_S - time.monotonic()))
    slept = time.monotonic() - began
    found = ask("load_batch", "train_step", more_looks=0)
    slept_at_last = time.monotonic() - began
    asleep, running = (samples_of(found, rank)[-1].thread_idle_s for rank in (0, 1))
    if asleep is None or running is None:
        pytest.skip("this kernel does not show when a thread last ran")
    assert slept - 3.0 < asleep[str(pids[PLACES.index("load_batch")])] < slept_at_last + 3.0
    assert running[str(pids[PLACES.index("train_step")])] < 3.0

"""What rank 0 is asked: each request is granted once, and training never waits for the file."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from bigsci_launch.runs.control.request import Request, put_request, withdraw
from bigsci_launch.runs.layout import AttemptDir, RunDir
from bigsci_launch.train.rank import stop
from bigsci_launch.train.rank.stop import StepRequests, followed_requests
from bigsci_launch.train.steps.word import AskedWord, DataWord, StepWord, decode, encode


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AttemptDir:
    monkeypatch.setattr(stop, "LOOK_S", 0.01)
    found = RunDir(tmp_path).attempt("0001")
    found.make()
    return found


def ask(attempt: AttemptDir, verb: str, key: str, after_step: int | None = None) -> None:
    put_request(attempt, Request(f"{verb}-{key}", verb, "alice", "new code", after_step, attempt.name))


def wait_until_due(requests: StepRequests, step: int) -> None:
    deadline = time.monotonic() + 10
    while not requests.save_due(step):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_each_save_is_due_once_and_a_late_one_at_once(attempt: AttemptDir) -> None:
    with followed_requests(attempt, 0) as requests:
        assert not requests.save_due(1)
        ask(attempt, "save", "a")
        wait_until_due(requests, 2)
        assert requests.save_key == "save-a" and not requests.save_due(3)
        ask(attempt, "save", "b", 7)
        time.sleep(0.2)
        assert [requests.save_due(step) for step in (5, 6, 7, 8)] == [False, False, True, False]
        ask(attempt, "save", "c", 6)
        wait_until_due(requests, 9)
        assert requests.save_key == "save-c"


def test_a_stop_that_was_told_to_the_ranks_remains_and_is_written_down_if_its_step_was_named(
    attempt: AttemptDir,
) -> None:
    with followed_requests(attempt, 0) as requests:
        ask(attempt, "restart", "a", 7)
        ask(attempt, "save", "seen")
        wait_until_due(requests, 1)
        assert requests.stop_due(6) is None
        requests.record_stop()
        assert not attempt.ended_by.exists()
        assert requests.stop_due(7) is not None
        withdraw(attempt, "restart-a")
        ask(attempt, "save", "seen-again")
        wait_until_due(requests, 7)
        assert requests.stop_due(8) is not None, "other ranks are on their way to the save"
        requests.record_stop()
    by = json.loads(attempt.ended_by.read_text())
    assert (by["act"], by["who"], by["why"], by["continues"], by["step"]) == ("restart", "alice", "new code", True, 7)


def test_only_rank_0_looks(attempt: AttemptDir) -> None:
    ask(attempt, "save", "a")
    ask(attempt, "exit", "b")
    with followed_requests(attempt, 1) as requests:
        time.sleep(0.2)
        assert not requests.save_due(1) and requests.stop_due(1) is None


@pytest.mark.timeout(10)
def test_a_file_that_hangs_whoever_reads_it_stops_no_step(attempt: AttemptDir) -> None:
    os.mkfifo(attempt.requests / "save-a.json")
    with followed_requests(attempt, 0) as requests:
        time.sleep(0.1)
        began = time.monotonic()
        assert not requests.save_due(1) and requests.stop_due(1) is None
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("flags", [f"{number:06b}" for number in range(64)])
def test_a_word_is_the_same_after_the_exchange(flags: str) -> None:
    wants_stop, skipped, alarm, *asked = (flag == "1" for flag in flags)
    word = StepWord(wants_stop, skipped, alarm, -0.0, DataWord(1, -2, 3, 2**63 - 1), AskedWord(*asked))
    assert decode(encode(word)) == word and len(encode(word)) == 6

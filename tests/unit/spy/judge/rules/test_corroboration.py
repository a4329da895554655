"""Corroborating evidence changes the confidence and the lines of a verdict, but never who is accused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from bigsci_launch.spy.evidence.kernel import FileLock, MemoryEvents, Socket
from bigsci_launch.spy.evidence.ranks import Evidence
from bigsci_launch.spy.judge.conclusion import Conclusion, Strength, Suspect
from bigsci_launch.spy.judge.corroboration import corroborate as add_clues
from bigsci_launch.spy.judge.corroboration import refine_class
from bigsci_launch.spy.taxonomy import HangClass, State
from tests.support.texts import has_parts

from ...conftest import make_evidence, rank_of

BATON = "wait@/venv/torch/utils/file_baton.py:50 < load@/venv/torch/utils/cpp_extension.py:9 < main@/src/train.py:1"
BUILDING = "run@/usr/lib/python3.11/subprocess.py:5 < _run_ninja_build@/venv/torch/utils/cpp_extension.py:9"
POOL = "wait@/usr/lib/python3.11/threading.py:1 < get@/usr/lib/python3.11/multiprocessing/pool.py:768"
WORLD = "all_reduce@c10d:10 < step@/src/train.py:5"
GRAPH = "the graph says so"


def hang(rank: int | None = 1, hang_class: HangClass = HangClass.BLOCKED_IN_C, state: State = State.HANG) -> Conclusion:
    suspects = () if rank is None else (Suspect(rank, "sleeps"),)
    return Conclusion(
        state, "rank 1 sleeps", Strength.DERIVED, hang_class=hang_class, suspects=suspects, evidence=(GRAPH,)
    )


def corroborate(conclusion: Conclusion, evidence: Evidence) -> Conclusion:
    return add_clues(refine_class(conclusion, evidence), evidence)


def error(rank: int, time: float, message: str = "no space left", **more: Any) -> dict[str, Any]:
    record = {"rank": rank, "type": "OSError", "message": message, "time": time, "place": "save (train.py:9)"}
    return {**record, "source": "its log", **more}


@pytest.fixture
def four() -> Callable[..., Evidence]:
    """Four ranks on two nodes, rank 1 in `stack`; keywords are added to the collection."""

    def make(stack: str = "load@/src/data.py:3", other: str = WORLD, **collection: Any) -> Evidence:
        ranks = [rank_of(rank, stack if rank == 1 else other, members={}) for rank in range(4)]
        return make_evidence(ranks, **collection)

    return make


def change(evidence: Evidence, rank: int, **fields: Any) -> Evidence:
    ranks = tuple(replace(seen, **fields) if seen.rank == rank else seen for seen in evidence.ranks)
    return replace(evidence, ranks=ranks)


def test_without_anything_else_the_verdict_stays(four: Callable[..., Evidence]) -> None:
    assert corroborate(hang(), four()) == hang()


def test_the_first_exception_of_a_suspect_confirms_it(four: Callable[..., Evidence]) -> None:
    """Later errors, and errors of ranks that only lost a peer, do not matter."""
    lost = error(0, 5.0, "Connection closed by peer [127.0.0.1]:4711")
    found = corroborate(hang(hang_class=HangClass.LEFT_EARLY), four(tracebacks=[error(1, 10.0), error(3, 20.0), lost]))
    assert found.strength == Strength.AGREED
    raised, *rest = found.evidence
    assert has_parts(raised, "rank 1 (n0)", "OSError: no space left", "save (train.py:9)", "00:00:10 UTC", "its log")
    assert found.hang_class == HangClass.BARRIER_AFTER_EXCEPTION, "it left the schedule because it failed"
    assert rest == [GRAPH]


@pytest.mark.parametrize("source", ["errors", "tracebacks"])
def test_the_first_exception_of_another_rank_is_shown_and_accuses_nobody(
    four: Callable[..., Evidence], source: str
) -> None:
    found = corroborate(hang(), four(**{source: [error(3, 10.0)]}))
    assert found.suspects == hang().suspects
    assert found.strength == Strength.GUESS
    assert has_parts(found.evidence[0], "rank 3 (n1)", "OSError") and len(found.missing) == 1
    later = corroborate(hang(), four(tracebacks=[error(3, 10.0), error(1, 11.0)]))
    assert later.strength == Strength.GUESS
    assert has_parts(later.evidence[0], "rank 3 (n1)", "rank 1")


def test_where_nobody_is_accused_an_exception_accuses_nobody(four: Callable[..., Evidence]) -> None:
    found = corroborate(hang(rank=None, hang_class=HangClass.PHASES_SPLIT), four(errors=[error(3, 10.0)]))
    assert (found.suspects, found.hang_class, found.strength) == ((), HangClass.PHASES_SPLIT, Strength.DERIVED)
    assert has_parts(found.evidence[0], "rank 3 (n1)", "OSError")


def test_an_exception_that_the_rank_outlived_says_little(four: Callable[..., Evidence]) -> None:
    beat = {"rank": 1, "phase": "step", "step": 7, "time": 12.0}
    found = corroborate(hang(hang_class=HangClass.LEFT_EARLY), four(tracebacks=[error(1, 10.0)], heartbeats=[beat]))
    assert (found.hang_class, found.strength) == (HangClass.LEFT_EARLY, Strength.DERIVED)
    assert has_parts(found.evidence[0], "rank 1 (n0)", "OSError")


def test_a_kill_for_lack_of_memory(four: Callable[..., Evidence]) -> None:
    killed = {"rank": 1, "node": "n0", "code": None, "signal": "SIGKILL", "time": 1.0}
    evidence = four(exits=[killed])
    unknown = corroborate(hang(hang_class=HangClass.RANK_KILLED, state=State.CRASHED), evidence)
    assert unknown.strength == Strength.DERIVED
    assert [has_parts(line, "SIGKILL") for line in unknown.missing] == [True]
    known = change(evidence, 0, memory_events=MemoryEvents("/job_7/step_0", 2))
    found = corroborate(hang(hang_class=HangClass.RANK_KILLED, state=State.CRASHED), known)
    assert has_parts(found.evidence[0], "2 times", "/job_7/step_0", "n0")
    assert found.strength == Strength.AGREED
    elsewhere = change(evidence, 3, memory_events=MemoryEvents("/job_7/step_0", 2))
    assert (
        corroborate(hang(hang_class=HangClass.RANK_KILLED, state=State.CRASHED), elsewhere).missing == unknown.missing
    )


def test_a_kill_for_lack_of_memory_explains_a_pool_that_waits(four: Callable[..., Evidence]) -> None:
    events = MemoryEvents("/job_7/step_0", 1)
    assert (
        corroborate(hang(hang_class=HangClass.POOL_STUCK), change(four(POOL), 1, memory_events=events)).strength
        == Strength.AGREED
    )
    found = corroborate(hang(), change(four(), 1, memory_events=events))
    assert found.strength == Strength.DERIVED, "it explains nothing of a rank that waits for none"
    assert has_parts(found.evidence[0], "once", "/job_7/step_0", "n0")


def test_kills_that_may_be_older_than_the_job_are_told_after_what_bears_on_the_hang(
    four: Callable[..., Evidence],
) -> None:
    lock = FileLock("n0", 4711, (101,), "python", "S", "/data/index.lock")
    evidence = replace(change(four(), 1, memory_events=MemoryEvents("/job_7", 4)), locks=(lock,))
    found = corroborate(hang(hang_class=HangClass.FILE_LOCK_HELD), evidence)
    assert "/data/index.lock" in found.evidence[0]
    assert has_parts(found.evidence[1], "4 times", "/job_7", "n0")


def test_the_holder_of_a_file_lock_is_named(four: Callable[..., Evidence]) -> None:
    lock = FileLock("n0", 4711, (101,), "python", "S", "/data/index.lock")
    found = corroborate(hang(hang_class=HangClass.FILE_LOCK_HELD), replace(four(), locks=(lock,)))
    assert has_parts(found.evidence[0], "/data/index.lock", "4711 (python)", "n0")
    assert found.strength == Strength.AGREED
    other_rank = replace(lock, holder=100)
    assert (
        corroborate(hang(hang_class=HangClass.FILE_LOCK_HELD), replace(four(), locks=(other_rank,)))
        .evidence[0]
        .endswith("rank 0 (n0)")
    )
    for foreign in (replace(lock, node="n1"), replace(lock, waiters=(9,))):
        found = corroborate(hang(hang_class=HangClass.FILE_LOCK_HELD), replace(four(), locks=(foreign,)))
        assert found.strength == Strength.DERIVED
        assert [has_parts(line, "/proc/locks") for line in found.missing] == [True]


def test_a_lock_file_is_stale_where_nobody_builds(four: Callable[..., Evidence]) -> None:
    assert corroborate(hang(hang_class=HangClass.BUILD_LOCK_STALE), four(BATON)).strength == Strength.AGREED
    building = corroborate(hang(hang_class=HangClass.BUILD_LOCK_STALE), four(BATON, other=BUILDING))
    assert building.strength == Strength.GUESS
    assert "rank 0 (n0)" in building.evidence[0]


def test_connections_that_carry_nothing_speak_against_a_rank(four: Callable[..., Evidence]) -> None:
    lost = Socket("10.0.0.1:5", "10.0.0.2:6", "ESTABLISHED", 48_000, 0, 5, False)
    found = corroborate(hang(), change(four(), 2, sockets=(lost,)))
    assert found.strength == Strength.GUESS
    assert found.suspects == hang().suspects
    assert has_parts(found.evidence[0], "rank 2", "46.9 KiB", "10.0.0.2:6")
    once = replace(lost, num_resent=1)
    assert corroborate(hang(), change(four(), 2, sockets=(once,))) == hang(), "a packet is lost now and then"


def test_bytes_that_a_process_does_not_read_confirm_that_it_stands(four: Callable[..., Evidence]) -> None:
    closed = Socket("10.0.0.2:6", "10.0.0.1:5", "ESTABLISHED", 48_000, 0, 0, True)
    there = Socket("10.0.0.1:5", "10.0.0.2:6", "ESTABLISHED", 0, 65_536, 0, False)
    sending = change(four(), 2, sockets=(closed,))
    assert corroborate(hang(), sending) == hang(), "it may be anybody who does not read"
    assert corroborate(hang(), change(sending, 1, sockets=(replace(there, unread=0),))) == hang(), "it has read all"
    found = corroborate(hang(), change(sending, 1, sockets=(there,)))
    assert has_parts(found.evidence[0], "rank 1 (n0)", "rank 2")
    assert found.strength == Strength.AGREED


@pytest.mark.parametrize("state", [State.PROGRESSING, State.FINISHED, State.UNKNOWN])
def test_what_is_no_fault_is_not_corroborated(four: Callable[..., Evidence], state: State) -> None:
    assert corroborate(hang(state=state), four(errors=[error(1, 1.0)])) == hang(state=state)


def test_a_collective_that_the_garbage_collector_began(four: Callable[..., Evidence]) -> None:
    stack = "barrier@c10d:1 < __del__@/src/pool.py:5 < main@/src/train.py:1"
    found = corroborate(hang(hang_class=HangClass.LEFT_EARLY), four(stack))
    assert (found.hang_class, found.strength) == (HangClass.COLLECTIVE_IN_DESTRUCTOR, Strength.AGREED)
    assert "__del__ (pool.py:5)" in found.evidence[0]
    assert corroborate(hang(hang_class=HangClass.BLOCKED_IN_C), four(stack)).hang_class == HangClass.BLOCKED_IN_C
    assert (
        corroborate(hang(hang_class=HangClass.LEFT_EARLY), four("__del__@/src/pool.py:5")).hang_class
        == HangClass.LEFT_EARLY
    )

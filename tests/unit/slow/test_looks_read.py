"""From the document of a node to shares of the time."""

from __future__ import annotations

from typing import Any

import pytest

from bigsci_launch.slow.looks_read import read_looks
from bigsci_launch.slow.straggler import StepPhase
from bigsci_launch.spy.evidence.bundle import Bundle

TORCH = "/lib/site-packages/torch"
WORK = "main (/job/train.py:1);forward (/job/train.py:2)"
WAIT = f"main (/job/train.py:1);all_reduce ({TORCH}/distributed/distributed_c10d.py:3252)"
ENGINE = f"main (/job/train.py:1);_engine_run_backward ({TORCH}/autograd/graph.py:979)"
IDLE = "_bootstrap (/usr/lib/python3.11/threading.py:1);wait (/usr/lib/python3.11/threading.py:300)"
STACKS = [WORK, WAIT, ENGINE, IDLE]
MAIN, OTHER = "thread (7): MainThread", "thread (8): Thread-1"
Rows = list[list[Any]]


def bundle(*ranks: dict[str, Any], **node: Any) -> Bundle:
    document = {"node": "n1", "host": "n1", "time": 1.0, "clock_ticks_per_s": 100, "ranks": list(ranks), "others": [],
                "problems": [], "stacks": STACKS, "lines": {}, "looked_s": 10.0, **node}  # fmt: skip
    return Bundle({"job": "x", "time": 1.0, "topology": None, "world_size": None, "nodes_asked": ["n1"],
                   "nodes_silent": []}, (document,))  # fmt: skip


def rank(number: int, *segments: Rows, **more: Any) -> dict[str, Any]:
    ends = more.pop("ends", {})
    counters = [{"mono": 0.0}, {"mono": 10.0}]
    for name, (before, after) in ends.items():
        counters[0][name], counters[1][name] = before, after
    sample = {"mono": 1.0, "state": "S"}
    return {"rank": number, "pid": 7 + number, "source": "environment", "step": None, "world_size": 2, "attempt": None,
            "samples": [sample], "segments": list(segments), "states": {"S": 1}, "counters": counters,
            **more}  # fmt: skip


def test_a_wait_is_a_collective_or_native_code_that_sleeps() -> None:
    """Of 60 looks at the backward pass, the second recorder, which looks half as often, saw 15 run."""
    rows: Rows = [[MAIN, 0, 20, 10], [MAIN, 1, 20, 0], [MAIN, 2, 60, 15]]
    (found,), missing, seconds = read_looks(bundle(rank(0, rows)))
    assert found.waits == (pytest.approx(0.2 + 0.6 * 0.5),) and (missing, seconds) == ((), 10.0)
    assert found.in_phase(StepPhase.BACKWARD) == pytest.approx(0.3)
    assert found.in_phase(StepPhase.FORWARD) == pytest.approx(0.2)
    assert found.num_looks == 100


def test_a_backward_pass_in_threads_of_torch_is_no_wait() -> None:
    rows: Rows = [[MAIN, 0, 40, 20], [MAIN, 2, 60, 0]]
    (found,), _, _ = read_looks(bundle(rank(0, rows, ends={"autograd_ns": (0, 6 * 10**9)})))
    assert found.waits == (pytest.approx(0.0),)


def test_where_the_main_thread_only_waits_for_another_that_one_counts() -> None:
    rows: Rows = [[MAIN, 3, 100, 0], [OTHER, 1, 50, 0], [OTHER, 0, 50, 0]]
    (found,), _, _ = read_looks(bundle(rank(0, rows)))
    assert found.waits == (0.5,)


def test_time_without_a_core_is_of_the_main_thread() -> None:
    times = ({"run_ns": 0, "delay_ns": 0}, {"run_ns": 3 * 10**9, "delay_ns": 10**9})
    (found,), _, _ = read_looks(bundle(rank(0, [[MAIN, 0, 1, 1]], ends={"schedule": times})))
    assert (found.late, found.ran) == (pytest.approx(0.1), pytest.approx(0.3))
    (unknown,), _, _ = read_looks(bundle(rank(0, [[MAIN, 0, 1, 1]])))
    assert (unknown.late, unknown.ran) == (None, None)


def test_a_rank_that_cannot_be_looked_at_is_reported_and_the_others_count() -> None:
    found, missing, _ = read_looks(bundle(rank(0, [[MAIN, 0, 1, 1]]), rank(1, why="py-spy: Permission denied")))
    assert [each.rank for each in found] == [0]
    assert len(missing) == 1 and "rank 1" in missing[0] and "Permission denied" in missing[0]


def test_a_segment_in_which_a_rank_was_not_seen_keeps_its_place() -> None:
    (found,), _, _ = read_looks(bundle(rank(0, [[MAIN, 1, 5, 0]], [], [[MAIN, 0, 5, 5]])))
    assert (found.waits, found.waited, found.num_segments) == ((1.0, None, 0.0), 0.5, 2)

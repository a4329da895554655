"""What the node agent makes of the calls in a ring, whether it still holds all of them or not."""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.spy.evidence.calls.ring import parse_ring

WORLD, TENSOR = "0: 0,1", "1: 0,1"


@pytest.fixture(scope="module")
def node_ring(agent: ModuleType) -> ModuleType:
    return agent.node_ring  # type: ignore[no-any-return]


def call(number: int, entered: float, group: str = WORLD, step: int = 0) -> list[Any]:
    return [entered, entered + 0.1, "all_reduce", group, None, "float32 [4]", None, None, number, step, False, True]


def ring(*lanes: list[list[Any]], size: int = 1000) -> dict[str, Any]:
    """A ring whose lanes have room for `size` calls each."""
    known = {"rank": 0, "world_size": 2, "step": 0, "phase": "", "heartbeat": 0.0, "lost_names": 0, "lost_threads": 0}
    told = [{"tid": 7 + at, "name": "", "count": len(calls), "calls": calls[-size:]} for at, calls in enumerate(lanes)]
    return {**known, "topology": None, "is_whole": True, "lanes": told}


def test_the_collectives_that_a_full_ring_has_lost_are_counted(node_ring: ModuleType) -> None:
    calls = [call(at, float(at)) for at in range(1, 11)]
    assert node_ring.summarize(ring(calls))["recorder"]["first_record"] == 0
    found = node_ring.summarize(ring(calls, size=4))["recorder"]
    assert (found["first_record"], len(found["stream"]), found["last_sequence"]) == (6, 4, {"0": 10})


def test_only_the_time_that_all_threads_cover_is_compared(node_ring: ModuleType) -> None:
    """One thread has lost its calls up to number 6; those of the other from that time would leave gaps."""
    busy, calm = [call(at, float(at)) for at in range(1, 11)], [call(1, 2.5, TENSOR), call(2, 8.5, TENSOR)]
    found = node_ring.summarize(ring(busy, calm, size=4))["recorder"]
    assert [found["tokens"][at][0] for at in found["stream"]] == ["0", "0", "1", "0", "0"]
    assert found["first_record"] == 6 + 1


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 2)), max_size=40), st.booleans())
def test_the_steps_of_collectives_are_told_in_runs_without_loss(
    node_ring: ModuleType, shape: list[tuple[int, int]], is_full: bool
) -> None:
    """`shape`: how many collectives each step makes, and how far the number of the step grows."""
    numbers, begun, calls = itertools.count(1), {}, []
    for (count, _), step in zip(shape, itertools.accumulate(grows for _, grows in shape), strict=True):
        for at, number in enumerate(itertools.islice(numbers, count)):
            begun |= {number: step} if at == 0 else {}
            calls.append(call(number, float(number), step=step))
    size = 10 if is_full else 1000
    lost = len(calls) - size
    found = parse_ring({**node_ring.summarize(ring(calls, size=size)), "set_keys": []}).steps.get(WORLD, {})
    assert found == {number: step for number, step in begun.items() if lost <= 0 or number > lost + 1}

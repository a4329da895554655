"""What the kernel shows of gloo's process groups, on four real ranks: the world alone, and one more group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bigsci_launch.spy.evidence.ranks import Evidence, read_evidence
from bigsci_launch.spy.judge.case import JobCase
from bigsci_launch.spy.judge.verdict import judge

pytestmark = pytest.mark.torch
NUM_RANKS = 4


@pytest.fixture
def look(launch: Any, ask_agent: Callable[..., dict[str, Any]], free_port: int) -> Callable[[str], Evidence]:
    """`look("world")` starts the ranks, and returns what the node agent sees of them."""

    def see(case: str) -> Evidence:
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port), "OMP_NUM_THREADS": "1"}
        launched = launch("gloo_groups.py", [f"{case} {{ready}}"] * NUM_RANKS, limit_s=90, **environment)
        return read_evidence({}, [ask_agent(launcher_pid=launched.pid)])

    return see


def test_the_world_is_the_only_group_and_the_one_that_is_elsewhere_comes_first(look: Callable[[str], Evidence]) -> None:
    case = JobCase.of(look("world"))
    assert len(case.evidence.ranks) == NUM_RANKS
    assert case.graph.of_world_only is True, [seen.connections for seen in case.evidence.ranks]
    assert case.graph.is_certain
    conclusion = judge(case.evidence)
    assert conclusion.suspects == ()
    assert [pointer.rank for pointer in conclusion.look_first][:1] == [NUM_RANKS - 1]


@pytest.mark.long
def test_a_group_of_two_makes_it_uncertain(look: Callable[[str], Evidence]) -> None:
    case = JobCase.of(look("pair"))
    assert len(case.evidence.ranks) == NUM_RANKS
    assert case.graph.of_world_only is False, [seen.connections for seen in case.evidence.ranks]
    assert not case.graph.is_certain

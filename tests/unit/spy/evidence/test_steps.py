from __future__ import annotations

from typing import Any

import pytest

from bigsci_launch.spy.evidence.steps import without_other_steps
from tests.support.texts import has_parts


def rank(number: int, step: str, source: str = "task id", cpu_s: float = 0, is_python: bool = True) -> dict[str, Any]:
    samples = [{"cpu_ticks": cpu_s * 100}]
    return {"rank": number, "step": step, "source": source, "is_python": is_python, "samples": samples}


def kept(*nodes: list[dict[str, Any]]) -> tuple[set[tuple[str, int]], list[str]]:
    documents = [{"node": f"n{index}", "ranks": ranks} for index, ranks in enumerate(nodes)]
    left, words = without_other_steps(documents)
    return {(each["step"], each["rank"]) for node in left for each in node["ranks"]}, words


def test_one_step_is_left_alone() -> None:
    assert kept([rank(0, "0")], [rank(1, "0")]) == ({("0", 0), ("0", 1)}, [])


@pytest.mark.parametrize(
    ("monitor", "training"),
    [
        (rank(0, "0"), rank(0, "1")),  # nothing else tells: who watches is there before
        (rank(0, "0", cpu_s=1.0), rank(0, "1", cpu_s=0.9)),  # what starting takes tells nothing
        (rank(0, "0", cpu_s=99), rank(0, "1", cpu_s=90)),
        (rank(0, "1"), rank(0, "0", cpu_s=9)),
        (rank(0, "1"), rank(0, "0", source="environment")),
        (rank(0, "1", is_python=False), rank(0, "0")),
        (rank(0, "1", is_python=False, cpu_s=9), rank(0, "batch", source="environment")),
    ],
)
def test_the_training_is_told_from_a_loop_that_watches(monitor: dict[str, Any], training: dict[str, Any]) -> None:
    found, words = kept([monitor, training])
    assert found == {(training["step"], 0)}
    assert len(words) == 1
    left_out, kept_one = f"step {monitor['step']}, with 1 process on n0: ", f"step {training['step']} "
    assert has_parts(words[0], left_out, kept_one, f"`--step {monitor['step']}`")


def test_a_loop_with_fewer_processes_is_no_training_whatever_it_has_done() -> None:
    found, words = kept([rank(0, "3", cpu_s=99), rank(0, "1"), rank(1, "1")], [rank(1, "3"), rank(2, "1")])
    assert found == {("1", 0), ("1", 1), ("1", 2)}
    assert has_parts(words[0], "step 3, ", "2 processes on n[0-1]")


def test_steps_of_one_training_stay_together() -> None:
    """A loop over the nodes with one srun for each: RANK numbers their ranks, across the steps."""
    nodes = [[rank(2 * node + local, str(node), "environment") for local in (0, 1)] for node in (0, 1)]
    assert kept(*nodes) == ({("0", 0), ("0", 1), ("1", 2), ("1", 3)}, [])

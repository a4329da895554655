"""Which processes belong to a tree, and which to a cluster."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.minicluster.proctree import descendants, step_daemons
from bigsci_launch.procfs import Process


def process(pid: int, parent: int, command: str = "x") -> Process:
    return Process(pid, command, state="S", parent_pid=parent, session=pid, cpu_ticks=0, start_ticks=1)


def tree(parents: dict[int, int]) -> dict[int, Process]:
    return {pid: process(pid, parent) for pid, parent in parents.items()}


def test_a_tree_is_found_whole_and_nothing_else():
    processes = tree({1: 0, 10: 1, 11: 10, 12: 10, 13: 12, 20: 1, 21: 20})
    assert set(descendants([10], processes)) == {10, 11, 12, 13}
    assert descendants([99], processes) == []


@given(st.dictionaries(st.integers(2, 60), st.integers(1, 60), max_size=40), st.sets(st.integers(1, 60)))
def test_children_come_before_their_parents(parents: dict[int, int], roots: set[int]):
    # As in a kernel, a parent is older than its children.
    processes = tree({pid: parent for pid, parent in parents.items() if parent < pid})
    found = descendants(roots, processes)
    assert len(found) == len(set(found))
    for place, pid in enumerate(found):
        assert processes[pid].parent_pid not in found[:place]
    assert set(found) >= roots & processes.keys()


def test_only_slurmstepds_that_hold_the_clusters_files_are_its_own(tmp_path: Path):
    us = os.getpid()
    with (tmp_path / "slurmd-n0.log").open("w"):
        named = {us: process(us, 1, "slurmstepd")}
        assert step_daemons(tmp_path, named) == {us}
        assert step_daemons(tmp_path / "other", named) == set()
        assert step_daemons(tmp_path, {us: process(us, 1, "python3")}) == set()

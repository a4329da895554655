"""Which processes are whose."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.minicluster.proctree import (
    Process,
    descendants,
    parse_stat,
    read_process,
    read_processes,
    step_daemons,
)

FIELDS = "5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 4242 23"


def process(pid: int, parent: int) -> Process:
    return Process(pid=pid, parent_pid=parent, state="S", start_ticks=1, command="x")


def tree(parents: dict[int, int]) -> dict[int, Process]:
    return {pid: process(pid, parent) for pid, parent in parents.items()}


@given(st.text(min_size=1, max_size=15).filter(lambda text: "\n" not in text))
def test_a_stat_line_is_read_whatever_the_command_is_called(command: str):
    found = parse_stat(f"17 ({command}) S 3 {FIELDS}\n")
    assert found == Process(pid=17, parent_pid=3, state="S", start_ticks=4242, command=command)


def test_our_own_process_is_read():
    found = read_process(os.getpid())
    assert found is not None
    assert (found.pid, found.parent_pid, found.is_alive) == (os.getpid(), os.getppid(), True)
    assert read_processes()[os.getpid()].start_ticks == found.start_ticks


def test_a_process_that_is_not_there_is_none():
    assert read_process(2**22 + 1) is None


def test_a_zombie_is_not_alive():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    found = read_process(pid)
    assert found is not None
    assert not found.is_alive
    assert pid not in read_processes()
    os.waitpid(pid, 0)


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
        named = {us: Process(us, 1, "S", 1, "slurmstepd")}
        assert step_daemons(tmp_path, named) == {us}
        assert step_daemons(tmp_path / "other", named) == set()
        assert step_daemons(tmp_path, {us: Process(us, 1, "S", 1, "python3")}) == set()

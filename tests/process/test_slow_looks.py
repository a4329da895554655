"""A look that lasts, at real processes that are really disturbed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.slow.causes import causes_by_rank
from bigsci_launch.slow.looks import answer_of_bundle, look_at
from bigsci_launch.spy.evidence.bundle import Bundle
from bigsci_launch.spy.look.target import target_of_process

LIMITED, FIRST, SECOND, READS = range(4)
CGROUPS = Path("/sys/fs/cgroup")
SPIN = "while True: pass"


def pid_of(launcher: int, rank: int) -> int:
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher and f"\0RANK={rank}\0" in "\0" + path.read_text():
                return int(path.parent.name)
    raise AssertionError(f"rank {rank} is not there")


@contextmanager
def quota_on(pid: int) -> Iterator[bool]:
    """Limit a process to a fiftieth of a core, if this user may; say whether it is."""
    is_old = (CGROUPS / "cpu" / "cpu.shares").exists()
    group = (CGROUPS / "cpu" if is_old else CGROUPS) / f"bsl-test-{pid}"
    try:
        group.mkdir()
        if is_old:
            (group / "cpu.cfs_quota_us").write_text("2000")
        else:
            (group / "cpu.max").write_text("2000 100000")
        (group / "cgroup.procs").write_text(str(pid))
    except OSError:
        with suppress(OSError):
            group.rmdir()
        yield False
        return
    yield True
    (group.parent / "cgroup.procs").write_text(str(pid))
    group.rmdir()


@pytest.fixture(scope="module")
def seen(launch: Any) -> Iterator[tuple[Bundle, bool, int]]:
    """One rank with a quota, two bound to a core that another process uses too, and one in the kernel."""
    ranks = launch("hung_rank.py", ["tokenise {ready}"] * 3 + ["read_shard {ready}"])
    core = min(os.sched_getaffinity(0))
    busy = subprocess.Popen([sys.executable, "-c", SPIN], start_new_session=True)
    with suppress(OSError):  # it is the busiest there, whatever else the machine does
        Path(f"/proc/{busy.pid}/autogroup").write_text("-19")
    for pid in (busy.pid, pid_of(ranks.pid, FIRST), pid_of(ranks.pid, SECOND)):
        os.sched_setaffinity(pid, {core})
    with quota_on(pid_of(ranks.pid, LIMITED)) as is_limited:
        yield look_at(target_of_process(ranks.pid), 4.0), is_limited, busy.pid
    busy.kill()
    busy.wait()


def test_it_sees_each_rank_at_random_moments(seen: tuple[Bundle, bool, int]) -> None:
    (node,) = seen[0].nodes
    assert [rank["rank"] for rank in node["ranks"]] == [0, 1, 2, 3] and not node["problems"]
    for rank, function in ((LIMITED, "tokenise"), (READS, "read_shard")):
        rows = [row for segment in node["ranks"][rank]["segments"] for row in segment]
        assert sum(row[2] for row in rows if function in node["stacks"][row[1]]) > 20, rows
        runs = sum(row[3] for row in rows)
        assert runs == 0 if rank == READS else runs > 10
    assert any(line == "pass" for line in node["lines"].values())


def test_nothing_is_slow_where_none_waits_for_another(seen: tuple[Bundle, bool, int]) -> None:
    answer = answer_of_bundle(seen[0])
    assert not answer.stragglers and answer.undecided


def test_causes_are_read(seen: tuple[Bundle, bool, int]) -> None:
    bundle, is_limited, busy = seen
    found = causes_by_rank(bundle)
    assert any("quota of 0.02" in cause for cause in found.get(LIMITED, ())) == is_limited
    for rank in (FIRST, SECOND):
        assert any(f"process {busy} " in cause for cause in found[rank]), found
        assert any("ranks 1-2" in cause for cause in found[rank]) or os.cpu_count() == 1, found
    assert any("state D" in cause for cause in found[READS]) and len(found[READS]) == 1, found

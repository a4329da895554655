"""What may make a rank slow, as its node counts it."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest


@pytest.mark.parametrize(
    ("is_unified", "files", "stat"),
    [
        (True, {"cpu.max": "50000 100000\n"}, "usage_usec 9\nnr_periods 8\nnr_throttled 3\nthrottled_usec 2000000\n"),
        (
            False,
            {"cpu.cfs_quota_us": "50000\n", "cpu.cfs_period_us": "100000\n"},
            "nr_periods 8\nnr_throttled 3\nthrottled_time 2000000000\n",
        ),
    ],
)
def test_a_quota_may_be_above(
    agent: ModuleType, tmp_path: Path, is_unified: bool, files: dict[str, str], stat: str
) -> None:
    inner = tmp_path / "job_7" / "step_0"
    inner.mkdir(parents=True)
    for name, text in {**files, "cpu.stat": stat}.items():
        (inner.parent / name).write_text(text)
    (inner / "cpu.max").write_text("max 100000\n")
    found = agent.node_counters.quotas_above(str(tmp_path), "/job_7/step_0", is_unified)
    assert found == [{"cgroup": "/job_7", "cores": 0.5, "throttled_s": 2.0, "throttled": 3, "periods": 8}]


def test_the_counters_of_a_process_that_has_ended_are_missing_and_not_zero(agent: ModuleType) -> None:
    gone = subprocess.Popen(["true"])
    rank = {"pid": gone.pid, "counters": []}
    gone.wait()
    agent.node_counters.add_rank_counters([rank])
    assert list(rank["counters"][0]) == ["mono"]
    zombie = subprocess.Popen(["true"])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    rank = {"pid": zombie.pid, "counters": []}
    agent.node_counters.add_rank_counters([rank])
    assert "swapped_kib" not in rank["counters"][0]
    zombie.wait()


def test_segments_of_a_connection(agent: ModuleType) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as connection:
        other, _ = server.accept()
        before = dict(agent.node_counters.read_sockets([os.getpid()]))["sockets"][os.getpid()]
        for _ in range(20):
            connection.sendall(b"x")
            other.recv(1)
        after = dict(agent.node_counters.read_sockets([os.getpid()]))["sockets"][os.getpid()]
        other.close()
    assert after["sent"] - before["sent"] >= 20 and after["round_trip_us"] > 0


@pytest.fixture
def full_folder(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", tmp_path]).returncode:
        pytest.skip("needs root, to mount a small file system")
    with suppress(OSError):
        (tmp_path / "file").write_bytes(bytes(1 << 20))
    yield tmp_path
    subprocess.run(["umount", "--lazy", tmp_path], check=True)


def test_a_full_file_system_is_that_of_who_stands_in_it(agent: ModuleType, full_folder: Path) -> None:
    inside, outside = (subprocess.Popen(["sleep", "60"], cwd=folder) for folder in (full_folder, "/"))
    try:
        places = agent.node_counters.read_places([{"pid": inside.pid}, {"pid": outside.pid}])
        (full,) = [place for place in places if place["path"] == str(full_folder)]
        assert full["free_share"] == 0.0 and full["pids"] == [inside.pid]
    finally:
        for process in (inside, outside):
            process.kill()
            process.wait()


def test_rows_of_a_recorder(agent: ModuleType) -> None:
    text = "thread (7): MainThread;main (a b.py:1);f (c;d.py:2) 3\nno count\nthread (7): MainThread 4\n"
    text += "thread (7): MainThread;main (a b.py:1);f (c;d.py:2) 2\n"
    assert agent.node_looks.rows_of(text) == {("thread (7): MainThread", "main (a b.py:1);f (c;d.py:2)"): 5}


def test_a_source_line_is_read_only_from_a_file(agent: ModuleType, tmp_path: Path) -> None:
    source = tmp_path / "train.py"
    source.write_text("first()\n    gc.collect()\n")
    os.mkfifo(tmp_path / "pipe.py")
    stacks = [f"f ({source}:2)", f"f ({source}:9)", f"f ({tmp_path}/pipe.py:1)", "f (<string>:1)", "torn"]
    assert agent.node_looks.read_lines([{"pid": os.getpid()}], stacks) == {stacks[0]: "gc.collect()"}

"""How the node agent reads the kernel's tables."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from types import ModuleType

import pytest

TCP = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0
   1: 0100007F:C350 0200000A:1F90 01 0000BE50:00000010 01:000003E8 00000005     0        0 4712 1 0
   2: 0100007F:C351 0200000A:1F90 02 00000000:00000000 01:000003E8 00000001     0        0 4713 1 0
   3: 0100007F:C352 0200000A:1F90 06 00000000:00000000 03:000003E8 00000000     0        0 0 1 0
"""
LOCKS = """1: POSIX  ADVISORY  WRITE 10 08:01:77 0 EOF
2: FLOCK  ADVISORY  WRITE 20 08:01:99 0 EOF
2: -> FLOCK  ADVISORY  WRITE 30 08:01:99 0 EOF
2: -> FLOCK  ADVISORY  READ 31 08:01:99 0 EOF
3: OFDLCK ADVISORY  READ  -1 08:01:55 0 EOF
3: -> POSIX  ADVISORY  WRITE 40 08:01:55 0 EOF
"""


@pytest.mark.skipif(sys.byteorder != "little", reason="the kernel writes addresses in the order of the machine")
def test_the_table_of_sockets(agent: ModuleType) -> None:
    table = agent.node_sockets.parse_table(TCP)
    assert set(table) == {"4711", "4712", "4713"}, "a socket that belongs to nobody has no inode"
    assert table["4711"] == {"local": "127.0.0.1:8080", "remote": "0.0.0.0:0", "state": "LISTEN"}
    assert table["4712"] == {
        "local": "127.0.0.1:50000", "remote": "10.0.0.2:8080", "state": "ESTABLISHED", "tx": 48720, "rx": 16,
        "timer": "retransmit", "retransmits": 5,
    }  # fmt: skip
    assert table["4713"]["state"] == "SYN_SENT"


@pytest.mark.skipif(sys.byteorder != "little", reason="the kernel writes addresses in the order of the machine")
def test_addresses_of_the_other_family(agent: ModuleType) -> None:
    assert agent.node_sockets.parse_address("0000000000000000FFFF00000100007F:0016") == "127.0.0.1:22"
    assert agent.node_sockets.parse_address("00000000000000000000000001000000:0016") == "[0:0:0:0:0:0:0:1]:22"


def test_connections_are_counted_by_the_end_that_listens(agent: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than are kept, or a table that was not read to its end, are unknown."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), server.accept()[0]:
            networks: dict[str, dict[str, object]] = {}
            found = agent.node_sockets.read_connections(os.getpid(), networks)
            for table in networks.values():
                table[agent.node_sockets.CUT] = {"state": "?"}
            with pytest.raises(ValueError, match="too many"):
                agent.node_sockets.read_connections(os.getpid(), networks)
            monkeypatch.setattr(agent.node_sockets, "MAX_OPENED", 0)
            with pytest.raises(ValueError, match="too many"):
                agent.node_sockets.read_connections(os.getpid(), {})
    assert found["listening"][f"127.0.0.1:{port}"] == 1
    assert found["opened"]["127.0.0.1"].count(port) == 1


def test_terminals_are_no_devices(agent: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = ["/dev/null", "/dev/pts/3", "/dev/nvidia0", "/dev/nvidia0", "/dev/infiniband/uverbs0", "pipe:[7]"]
    monkeypatch.setattr(agent.node_sockets, "read_targets", lambda _: targets)
    assert agent.node_sockets.read_connections(os.getpid(), {})["devices"] == [
        "/dev/infiniband/uverbs0", "/dev/nvidia0",
    ]  # fmt: skip


def test_trouble_comes_first(agent: ModuleType) -> None:
    quiet, listening = {"state": "ESTABLISHED"}, {"state": "LISTEN"}
    sockets = [listening, quiet, {**quiet, "rx": 1}, {**quiet, "tx": 1, "timer": "retransmit"}]
    assert [agent.node_sockets.importance(each) for each in sockets] == [0, 1, 2, 3]


def test_who_waits_for_whose_lock(agent: ModuleType) -> None:
    found = agent.node_kernel.parse_locks(LOCKS)
    waited_for = [row for row in found if row["waiters"]]
    assert [(row["kind"], row["file"], row["holder"], row["waiters"]) for row in waited_for] == [
        ("FLOCK", "08:01:99", 20, [30, 31]),
        ("OFDLCK", "08:01:55", 0, [40]),
    ]  # fmt: skip


def test_kills_are_counted_in_the_step_which_outlives_the_task(
    agent: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def answer(path: str) -> str:
        read.append(path)
        return "low 0\nhigh 7\nmax 3\noom 1\noom_kill 1\n"

    monkeypatch.setattr(agent.node_kernel, "read_text", answer)
    job = "/system.slice/slurmstepd.scope/job_7/step_0"
    assert agent.node_kernel.memory_events(2, f"{job}/user/task_3") == {
        "oom_kill": 1, "high": 7, "max": 3, "cgroup": job,
    }  # fmt: skip
    agent.node_kernel.memory_events(1, "/user/me")
    assert read == [f"/sys/fs/cgroup{job}/memory.events", "/sys/fs/cgroup/memory/user/me/memory.oom_control"]


def test_the_children_that_tell_most(agent: ModuleType) -> None:
    def child(pid: int, comm: str, state: str, ticks: int) -> dict[str, object]:
        return {"pid": pid, "comm": comm, "state": state, "cpu_ticks": ticks}

    children = [child(1, "python3", "S", 1), child(2, "pt_data_worker", "S", 90), child(3, "python3", "T", 0),
                child(4, "sh", "S", 0), child(5, "python3", "Z", 99)]  # fmt: skip
    assert [each["pid"] for each in agent.node_stacks.choose_children({"children": children})] == [3, 2]


def test_what_the_threads_of_a_process_wait_in(agent: ModuleType) -> None:
    """A thread that waits for a lock does so in the kernel's futex code; the main thread is reported elsewhere."""
    lock = threading.Lock()
    lock.acquire()
    thread = threading.Thread(target=lock.acquire)
    thread.start()
    try:
        end = time.monotonic() + 10
        while not any(
            wait.startswith("futex") and thread.native_id in threads
            for wait, threads in (agent.node_kernel.thread_waits(os.getpid(), {}) or {}).items()
        ):
            assert time.monotonic() < end
            time.sleep(0.01)
    finally:
        lock.release()
        thread.join()

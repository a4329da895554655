"""What the node agent reads from the kernel, on real processes: sockets, locks, pipes, children, threads."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Facts = dict[str, Any]
PLACES = ["send_result", "wait_for_lock", "write_log", "compile_kernels", "end_worker", "wait_for_worker"]
LIMIT_S = 40.0
DIAGNOSTICS = Path(__file__).parents[2] / "diagnostics"


@pytest.fixture(scope="module")
def document(launch: Any, ask_agent: Callable[..., Facts]) -> Facts:
    """The agent's document once every process has reached its place."""
    hung = launch("hung_rank.py", [f"{place} {{ready}}" for place in PLACES])
    end = time.monotonic() + LIMIT_S
    while True:
        found = ask_agent(launcher_pid=hung.pid)
        assert len(found["ranks"]) == len(PLACES)
        if is_settled(found) or time.monotonic() > end:
            return found


def is_settled(found: Facts) -> bool:
    is_asleep = first(found, "end_worker")["state"] == "S"
    return is_asleep and bool(found["locks"]) and all(calls_of(found, place) for place in ("send_result", "write_log"))


def first(found: Facts, place: str) -> Facts:
    sample = found["ranks"][PLACES.index(place)]["samples"][0]
    assert isinstance(sample, dict)
    return sample


def calls_of(found: Facts, place: str) -> str:
    return str((first(found, place).get("system_call") or {}).get("name") or "")


def test_queues_and_timer_of_a_socket_whose_peer_does_not_read(document: Facts) -> None:
    found = first(document, "send_result")
    sending = found["sockets"]["list"][0]
    assert sending["tx"] > 0, found["sockets"]
    assert sending["state"] == "ESTABLISHED"
    reading = next(each for each in found["sockets"]["list"] if each["local"] == sending["remote"])
    assert reading["rx"] > 0
    assert found["system_call"]["name"] == "sendto"
    assert found["system_call"]["socket"]["remote"] == sending["remote"], "who it waits for"


def test_who_holds_the_lock_and_who_waits(document: Facts) -> None:
    rank = document["ranks"][PLACES.index("wait_for_lock")]
    (lock,) = document["locks"]
    assert lock["waiters"] == [rank["pid"]]
    assert lock["holder"] == rank["samples"][0]["children"][0]["pid"]
    assert (lock["kind"], lock["mode"], lock["holder_state"]) == ("FLOCK", "WRITE", "S")
    assert lock["path"] == rank["samples"][0]["system_call"]["target"]
    assert lock["path"].endswith(".lock")


def test_the_stack_of_a_child_tells_what_it_does(document: Facts) -> None:
    child = first(document, "wait_for_lock")["children"][0]
    functions = [frame["function"] for frame in child["stack"]["threads"][0]["frames"]]
    assert functions[0] == "hold_lock"


def test_who_should_empty_the_pipe(document: Facts) -> None:
    call = first(document, "write_log")["system_call"]
    assert (call["name"], call["target"][:6]) == ("write", "pipe:[")
    assert [(end["comm"], end["state"]) for end in call["other_ends"]] == [("sleep", "S")]


def test_a_child_that_works_is_told_from_one_that_does_not(document: Facts) -> None:
    for place, works in (("compile_kernels", True), ("wait_for_worker", False)):
        (child,) = first(document, place)["children"]
        last = document["ranks"][PLACES.index(place)]["samples"][-1]["child_ticks"][str(child["pid"])]
        assert (last > child["cpu_ticks"]) == works, (place, child)


def test_a_thread_that_cannot_run_beside_a_main_thread_that_sleeps(document: Facts) -> None:
    found = first(document, "end_worker")
    assert found["state"] == "S"
    assert [thread["state"] for thread in found["blocked_threads"]] == ["D"]


def test_counts_that_tell_slow_from_stuck(document: Facts) -> None:
    for rank in document["ranks"]:
        sample = rank["samples"][0]
        assert sample["io"]["rchar"] > 0, "the interpreter was read"
        assert {"read_bytes", "write_bytes"} <= set(sample["io"])
        assert sample["run_delay_ns"] >= 0
        assert sample["major_faults"] >= 0
        assert sample.get("memory_events", {"oom_kill": 0})["oom_kill"] >= 0


def test_what_may_not_be_read_says_why() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    program = f"import sys; sys.path.insert(0, {str(DIAGNOSTICS)!r}); import node_kernel, json; "
    program += f"print(json.dumps(dict(node_kernel.read_rank_kernel({{'pid': {child.pid}}}, {{}}, {{}}))))"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["children"] == []
    assert found["unread"]["io"] == os.strerror(errno.ENOENT)
    assert {"system_call", "sockets", "memory_events", "blocked_threads"} <= set(found["unread"])

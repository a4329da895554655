"""Stacks that faulthandler wrote, as several versions of Python print them."""

from __future__ import annotations

import faulthandler
import tempfile
import threading
from typing import Any

import pytest

from bigsci_launch.spy.evidence.calls.written_stacks import parse_written_stacks
from tests.support.texts import has_parts

OLD = """Thread 0x00007f248cfb36c0 (most recent call first):
  File "/usr/lib/python3.8/threading.py", line 302 in wait
  File "/usr/lib/python3.8/queue.py", line 170 in get

Current thread 0x00007f248d7b46c0 (most recent call first):
  File "/opt/bsl/diagnostics/ring_hook.py", line 124 in _heartbeat

Thread 0x00007f248d7b36c0 (most recent call first):
  File "/usr/lib/python3.8/threading.py", line 306 in wait
  File "/opt/bsl/diagnostics/ring_hook.py", line 140 in _follow

Thread 0x00007f248e1d6b80 (most recent call first):
  File "/home/me/my train.py", line 10 in save
  File "/home/me/my train.py", line ??? in <module>
"""
NEW = OLD.replace("c0 (most", "c0 [offload] (most").replace("80 (most", "80 [MainThread] (most")
NEW += "\nExtension modules: numpy._core._multiarray_umath, torch._C (total: 2)\n"


def ring(text: str, *, heartbeat: float = 100.0, written: float = 140.0) -> dict[str, Any]:
    return {"heartbeat": heartbeat, "read": 175.0, "stacks": {"text": text, "written": written}}


@pytest.mark.parametrize("text", [OLD, NEW], ids=["3.8", "3.14"])
def test_the_main_thread_comes_first_and_the_threads_of_the_ring_are_left_out(text: str) -> None:
    found = parse_written_stacks(ring(text))
    assert found is not None and found.age_s == 35.0
    assert [[str(frame) for frame in thread.frames] for thread in found.threads] == [
        ["save (my train.py:10)", "<module> (my train.py)"],
        ["wait (threading.py:302)", "get (queue.py:170)"],
    ]
    assert has_parts(found.place, "save (my train.py:10)", "faulthandler", "35 s")


def test_a_text_that_is_cut_gives_what_is_left_of_it() -> None:
    found = parse_written_stacks(ring(OLD[: OLD.index(" in get")]))
    assert found is not None and [str(frame) for frame in found.threads[0].frames] == ["wait (threading.py:302)"]
    assert parse_written_stacks(ring(OLD[:40])) is None


def test_stacks_of_a_process_that_has_run_since_are_no_evidence() -> None:
    assert parse_written_stacks(ring(OLD, heartbeat=150.0)) is None
    assert parse_written_stacks({"heartbeat": 100.0, "read": 175.0}) is None


def test_what_this_python_prints_is_read() -> None:
    entered, gate = threading.Event(), threading.Event()

    def wait_at_the_gate() -> None:
        entered.set()
        gate.wait()

    thread = threading.Thread(target=wait_at_the_gate)
    thread.start()
    entered.wait()
    with tempfile.TemporaryFile("w+") as stream:
        faulthandler.dump_traceback(stream, all_threads=True)
        stream.seek(0)
        found = parse_written_stacks(ring(stream.read()))
    gate.set()
    thread.join()
    assert found is not None
    assert any(frame.function == "wait_at_the_gate" for each in found.threads for frame in each.frames)

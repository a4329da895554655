"""Tries the node of a slot after a rank has died there, before another one starts in its place. For rank_slot.py.
Standard library only.

It runs check_node.py on this node alone. What that finds broken in itself makes the slot unfit. What could not be tried
is not held against it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import safe_files
from own_place import why_not_ours
from rank_log import say
from rank_process import node_name

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    import queue
    from typing import Any

LIMIT_S = 20.0
"""Seconds that the tests may take. Starting torch on a busy node comes on top."""
START_S = 20.0
PREFIX = "@check "
VISIBLE = "CUDA_VISIBLE_DEVICES"


class NodeVerdict:
    """What the check has found: `fault` is None if nothing is wrong, or if it could not be tried."""

    def __init__(self, fault: str | None) -> None:
        self.fault = fault


class NodeCheck:
    """The check of one slot. `only_own_gpu`: the other GPUs of the node are in use."""

    def __init__(self, local_rank: int, *, only_own_gpu: bool, is_local: bool, events: queue.SimpleQueue[Any]) -> None:
        self._node = node_name(is_local=is_local)
        self._environment = dict(os.environ)
        if only_own_gpu:
            self._environment[VISIBLE] = own_gpu(os.environ.get(VISIBLE), local_rank)
        self._events = events
        self.is_running, self.is_unfit = False, False

    def begin(self) -> None:
        """Start it in a thread, which puts a `NodeVerdict` among the events of the slot."""
        self.is_running = True
        threading.Thread(target=lambda: self._events.put(NodeVerdict(self._find_fault())), daemon=True).start()

    def end(self, fault: str | None) -> None:
        self.is_running, self.is_unfit = False, fault is not None

    def _find_fault(self) -> str | None:
        tools = Path(__file__).resolve().parent
        if (why := why_not_ours(tools)) is not None:
            say(f"rank_runner: {self._node} could not be checked: {why}")
            return None
        command = [sys.executable, "-I", str(tools / "check_node.py"), "--limit-s", str(LIMIT_S), "--hosts", self._node]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=self._environment,
                                  timeout=LIMIT_S + START_S, check=False)  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            say(f"rank_runner: {self._node} could not be checked: {error}")
            return None
        return fault_in(done.stdout.decode(errors="replace"))


def own_gpu(visible: str | None, local_rank: int) -> str:
    """Return the GPU of a rank: its place among those that are visible, or the only one that is."""
    listed = visible.split(",") if visible else []
    if not listed:
        return str(local_rank)
    return listed[local_rank] if local_rank < len(listed) else listed[0]


def fault_in(output: str) -> str | None:
    """Return what check_node.py has found broken, in its words; None if nothing."""
    for line in output.splitlines():
        if not line.startswith(PREFIX):
            continue
        try:
            record = safe_files.parse_json(line[len(PREFIX) :])
            failed = [test for test in record.get("tests", ()) if test["status"] == "failed"]
            broken = [f"{test['name']}: {test['why']}" for test in failed]
        except (ValueError, LookupError, TypeError, AttributeError):
            continue
        if broken:
            return "; ".join(broken)
    return None

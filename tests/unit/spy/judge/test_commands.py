"""Commands in an answer can be typed where `bsl spy` was."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from bigsci_launch.spy.evidence.bundle import Bundle
from bigsci_launch.spy.judge.commands import ASK_NATIVE, ASK_RECORDER, OF_FILES, on_node, typed

NODE = {"node": "n1", "host": "h", "py_spy": "/env/bin/py-spy", "ranks": []}
STEP = "srun --overlap --jobid=34 --gres=gpu:0 -N1 -n1 -w n1"
DUMP = on_node("n1", "py-spy dump --pid 7")


def line(command: str, **collection: Any) -> str:
    return typed(command, Bundle({"scheduler": "Slurm", "job_id": "34", **collection}, (NODE,)).evidence())


@pytest.mark.parametrize(
    ("command", "collection", "found"),
    [
        (DUMP, {"py_spy": "/env/bin/py-spy"}, f"{STEP} py-spy dump --pid 7"),
        (DUMP, {}, f"{STEP} /env/bin/py-spy dump --pid 7"),
        (DUMP, {"scheduler": None}, "py-spy dump --pid 7  # on n1"),
        (DUMP, {"het_groups": {"n1": 1}}, f"{STEP} /env/bin/py-spy dump --pid 7".replace("=34", "=34 --het-group=1")),
        (on_node("n1", "ls /proc/7/fd", "who holds it"), {}, f"{STEP} ls /proc/7/fd  # who holds it"),
        ("bsl spy --settle 10  # wait", {"asked": "--jobid 6_1"}, "bsl spy --jobid 6_1 --settle 10  # wait"),
        ("bsl spy  # again", {"asked": "night"}, "bsl spy night  # again"),
        ("bsl spy  # again", {}, "bsl spy  # again"),
        ("scontrol show node n1  # whether it is lost", {}, "scontrol show node n1  # whether it is lost"),
    ],
)
def test_a_line_can_be_typed(command: str, collection: dict[str, Any], found: str) -> None:
    assert line(command, **collection) == found


def test_a_pipe_runs_on_the_node_too() -> None:
    command = "dmesg -T | grep -i 'killed process'"
    assert shlex.split(line(on_node("n1", command))) == [*shlex.split(STEP), "sh", "-c", command]


@pytest.mark.parametrize("ask", [ASK_NATIVE, ASK_RECORDER])
def test_what_bsl_spy_would_read_is_advised_only_where_it_can_look(ask: str) -> None:
    rank = {"rank": 0, "pid": 7, "source": "files", "samples": [{"mono": 0.0, "state": "?"}]}
    stored = Bundle({}, ({"node": "n1", "found_by": "files", "ranks": [rank]},)).evidence()
    assert stored.is_from_files and typed(ask, stored) == OF_FILES[ask] and "bsl spy" not in OF_FILES[ask]
    seen = Bundle({"asked": "--jobid 34"}, ({"node": "n1", "ranks": [{**rank, "source": None}]},)).evidence()
    assert typed(ask, seen) == ask.replace("bsl spy", "bsl spy --jobid 34")

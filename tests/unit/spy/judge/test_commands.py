"""Commands in an answer can be typed where `bsl spy` was."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from bigsci_launch.spy.evidence.bundle import Bundle
from bigsci_launch.spy.judge.commands import on_node, typed

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

"""The check of a node, as real processes: alone, in pairs, with broken parts. The tests of GPUs run on torch's CPU."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.content import packaged
from bigsci_launch.nodes.verdict import judge
from tests.support.listening import listeners
from tests.support.texts import has_parts
from tests.unit.house.conftest import standalone

from .attempt_records import program_argv

PROGRAM = packaged("diagnostics", "check_node.py")
HOSTNAMES = "#!/bin/sh\nprintf '127.0.0.1\\n%.0s' $(seq $NUM_NODES)\n"


@pytest.fixture(scope="module")
def scontrol(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a `scontrol` that calls every node 127.0.0.1."""
    program = tmp_path_factory.mktemp("bin") / "scontrol"
    program.write_text(HOSTNAMES)
    program.chmod(0o755)
    return program.parent


def start(
    scontrol: Path, index: int, count: int, *words: str, step: int = 3, token: str = "a secret"
) -> subprocess.Popen[str]:
    variables = {
        "BSL_CHECK_TOKEN": f"{token}.{os.getpid()}.{step}",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": str(step),
        "SLURM_NODEID": str(index),
        "SLURM_STEP_NODELIST": "x",
        "SLURMD_NODENAME": f"n{index}",
        "NUM_NODES": str(count),
        "PATH": f"{scontrol}:{os.environ['PATH']}",
    }
    argv = [sys.executable, "-I", str(PROGRAM), *words]
    return subprocess.Popen(argv, env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True)


def ends(processes: list[subprocess.Popen[str]]) -> list[str]:
    return [line for process in processes for line in process.communicate(timeout=300)[0].splitlines()]


def result(lines: list[str], node: str) -> dict[str, Any]:
    records = [json.loads(line.removeprefix("@check ")) for line in lines]
    return next(record for record in records if record["node"] == node and record["kind"] == "result")


def test_nodes_meet_each_other_in_rounds(scontrol: Path) -> None:
    lines = ends([start(scontrol, index, 3) for index in range(3)])
    for index in range(3):
        found = result(lines, f"n{index}")
        assert [(peer["status"], peer["why"]) for peer in found["peers"]] == [("ok", "")] * 2
        statuses = {test["name"]: test["status"] for test in found["tests"]}
        assert statuses["cpu"] == statuses["memory"] == statuses["shared memory"] == statuses["exchange"] == "ok"
    assert {node["verdict"] for node in judge(lines, ["n0", "n1", "n2"])["nodes"]} <= {"ok", "slow"}


@pytest.fixture(scope="module")
def waited(scontrol: Path) -> tuple[list[str], list[str]]:
    """What the nodes of two steps say: the second of three is absent, and the first of two. They wait at once."""
    three = [start(scontrol, index, 3, step=4) for index in (0, 2)]
    two = [start(scontrol, 1, 2, "--limit-s", "20", step=5)]
    return ends(three), ends(two)


def test_a_node_that_does_not_come_is_not_waited_for_and_blames_nobody(waited: tuple[list[str], list[str]]) -> None:
    found = result(waited[0], "n0")
    assert sorted((peer["status"], bool(peer["why"])) for peer in found["peers"]) == [
        ("not_tried", True),
        ("ok", False),
    ]


def test_without_the_first_node_the_exchange_is_not_tried(waited: tuple[list[str], list[str]]) -> None:
    found = result(waited[1], "n1")
    [exchange] = [test for test in found["tests"] if test["name"] == "exchange"]
    assert exchange["status"] == "not_tried" and "was not found" in exchange["why"]


def test_without_a_token_the_exchange_is_not_tried(scontrol: Path) -> None:
    variables = {"SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "x", "NUM_NODES": "2", "BSL_CHECK_TOKEN": ""}
    path = {"PATH": f"{scontrol}:{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, "-I", str(PROGRAM)],
        env={**os.environ, **variables, **path},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    [exchange] = [test for test in last_record(done.stdout)["tests"] if test["name"] == "exchange"]
    assert exchange["status"] == "not_tried" and "BSL_CHECK_TOKEN is not set" in exchange["why"]


def last_record(output: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(output.splitlines()[-1].removeprefix("@check "))
    return record


def test_strangers_are_counted_and_change_no_exchange(scontrol: Path) -> None:
    """They call at every port that the nodes open, from the first moment on, and some stay."""
    nodes = [start(scontrol, index, 3, step=6) for index in range(3)]
    called, crowd = set(), []
    while any(node.poll() is None for node in nodes):
        for port in {each.port for each in listeners([node.pid for node in nodes])}:
            for data in (b"", b"GET / HTTP/1.1\r\n\r\n", b"[" * 100_000 + b"\n", b'{"token": "0", "index": 1e999}\n'):
                with contextlib.suppress(OSError):
                    crowd.append(socket.create_connection(("127.0.0.1", port), timeout=1))
                    crowd[-1].sendall(data)
                    called.add(port)
        for each in crowd[:-200]:
            each.close()
        del crowd[:-200]
        time.sleep(0.02)
    for each in crowd:
        each.close()
    lines = ends(nodes)
    found = [result(lines, f"n{index}") for index in range(3)]
    assert [[peer["status"] for peer in each["peers"]] for each in found] == [["ok"] * 2] * 3, found
    assert len(called) >= 3 and sum(each["strangers"] for each in found) >= len(called)
    assert judge(lines, ["n0", "n1", "n2"])["strangers"] == sum(each["strangers"] for each in found)


def test_a_node_without_slurm_is_alone() -> None:
    done = subprocess.run([sys.executable, "-I", str(PROGRAM)], capture_output=True, text=True, timeout=300, check=True)
    first, last = (json.loads(line.removeprefix("@check ")) for line in done.stdout.splitlines())
    assert first["kind"] == "start" and last["peers"] == []


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
def test_full_shared_memory_has_failed(scontrol: Path, tmp_path: Path) -> None:
    small = "mount -t tmpfs -o size=1m none /dev/shm && exec"
    argv = ["unshare", "--mount", "sh", "-c", f"{small} {sys.executable} -I {PROGRAM}"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=True)
    into = tmp_path / "check"
    judged = [*program_argv(), "check-verdict", "--into", str(into), "--nodes", "n1"]
    verdict = subprocess.run(judged, input=done.stdout, capture_output=True, text=True, timeout=300, check=False)
    assert verdict.returncode == 3, verdict.stdout
    assert has_parts(verdict.stdout, "failed: shared memory: 64 MiB", "/dev/shm: No space left")
    assert json.loads((into / "n1.json").read_text())["verdict"] == "not_known"
    assert json.loads((into / "result.json").read_text())["verdict"] == "failed"


def test_a_test_that_hangs_has_failed(tmp_path: Path) -> None:
    """A memory that never answers: the watchdog says which test was running."""
    folder = tmp_path / "tools"
    shutil.copytree(PROGRAM.parent, folder, ignore=shutil.ignore_patterns("signatures", "lab", "node_*"))
    program = folder / "check_node.py"
    program.write_text(
        program.read_text().replace(
            "def check_memory() -> float:\n", "def check_memory() -> float:\n    time.sleep(99)\n"
        )
    )
    argv = [sys.executable, "-I", str(program), "--limit-s", "6"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=True)
    last = json.loads(done.stdout.splitlines()[-1].removeprefix("@check "))
    memory = next(test for test in last["tests"] if test["name"] == "memory")
    assert memory["status"] == "failed" and memory["why"].endswith(" s")


def test_nothing_that_arrives_is_no_failure(tmp_path: Path) -> None:
    argv = [*program_argv(), "check-verdict", "--into", str(tmp_path), "--nodes", "n0 n1"]
    done = subprocess.run(argv, input="", capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0
    assert has_parts(done.stdout, "node check: 2 not", "n0: ", "n1: ")
    assert json.loads((tmp_path / "result.json").read_text())["verdict"] == "not_known"


@pytest.mark.torch
def test_the_tests_of_gpus_on_the_cpu() -> None:
    import torch

    class Wrong(Exception):
        pass

    with standalone() as program:
        gpus = program("check_gpus")
        tests = list(gpus.try_gpus(torch, ["cpu", "cpu"], Wrong))
        assert [name for name, _, _ in tests] == [
            *("gpu 0 matmul", "gpu 0 memory", "gpu 1 matmul", "gpu 1 memory", "gpu 0 to 1", "gpu 1 to 0"),
        ]
        assert all(test() > 0 for _, _, test in tests)

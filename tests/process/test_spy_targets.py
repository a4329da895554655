"""Ranks that run another Python, or in a container: what is seen of a rank that sleeps is the same."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import wait_until

PROGRAM = """
import os, pathlib, sys, threading, time
def load_batch(): time.sleep(300)
lock = threading.Lock()
def wait_for_peers(): lock.acquire(); lock.acquire()
def serve():
    while True: time.sleep(0.01)
if "threads" in sys.argv: threading.Thread(target=serve, daemon=True).start()
pathlib.Path("ready-" + os.environ["RANK"]).touch()
load_batch() if os.environ["RANK"] == "2" else wait_for_peers()
"""
NEWEST = ("3.14", "3.13", "3.12", "3.11", "3.10", "3.9", "3.8", "3.7", "3.6")
Start = Callable[..., int]


def pythons() -> list[str]:
    """Return an interpreter of each version that this machine has."""
    places = [Path.home().glob(f".pyenv/versions/{version}.*/bin/python") for version in NEWEST]
    found = [next(iter(sorted(map(str, place))), shutil.which(f"python{version}"))
             for version, place in zip(NEWEST, places, strict=True)]  # fmt: skip
    return [each for each in found if each] or [sys.executable]


def variants() -> list[Any]:
    """The oldest differs most; the others are variants of it."""
    *others, oldest = pythons()
    return [oldest, *(pytest.param(each, marks=pytest.mark.long) for each in others)]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a launcher of two ranks and return its process number once both are ready."""
    started: list[subprocess.Popen[bytes]] = []
    (tmp_path / "rank.py").write_text(PROGRAM)

    def start(python: str, *words: str, before: Sequence[str] = ()) -> int:
        line = f"for r in 0 1 2; do RANK=$r WORLD_SIZE=3 {python} rank.py {' '.join(words)} & done; wait"
        process = subprocess.Popen([*before, "sh", "-c", line], cwd=tmp_path, start_new_session=True)
        started.append(process)
        wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 3)
        return process.pid

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def spy(launcher: int, folder: Path) -> dict[str, Any]:
    words = ["spy", "--local", "--pid", str(launcher), "--output", str(folder / "evidence"), "--json"]
    argv = [sys.executable, "-m", "bigsci_launch", *words]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    document: dict[str, Any] = json.loads(done.stdout)
    assert document["coverage"]["ranks_read"] == 3, (document["coverage"], document["verdict"])
    return document


def sleeper(document: dict[str, Any]) -> tuple[str, int]:
    verdict = document["verdict"]
    return verdict["class"], (verdict["suspects"] or verdict["look_first"])[0]["rank"]


def slept_s(folder: Path, rank: int) -> float:
    """For how long the main thread of a rank has not run, as the node agent stored it; 0 if it does not know."""
    [node] = (json.loads(path.read_text()) for path in (folder / "evidence").glob("nodes/*.json"))
    [found] = (each for each in node["ranks"] if each["rank"] == rank)
    (thread,) = (each["tid"] for each in found["samples"][0]["stack"]["threads"] if each["name"] == "MainThread")
    return float(found["samples"][-1]["thread_idle_s"].get(str(thread), 0.0))


@pytest.mark.parametrize("python", variants(), ids=lambda path: Path(path).parent.parent.name)
def test_a_sleep_is_recognised_in_each_python(python: str, start: Start, tmp_path: Path) -> None:
    """Until 3.10, `time.sleep` is a select of no files, and py-spy knows no thread numbers."""
    assert sleeper(spy(start(python), tmp_path)) == ("H31", 2)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to make a PID namespace")
def test_threads_in_a_pid_namespace_have_their_numbers_on_the_node(start: Start, tmp_path: Path) -> None:
    """py-spy reads the numbers of the container, the kernel's tables those of the node."""
    apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    launcher = start(sys.executable, "threads", before=apart)
    assert sleeper(spy(launcher, tmp_path)) == ("H31", 2)
    assert slept_s(tmp_path, 2) > 0

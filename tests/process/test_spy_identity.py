"""Who is a rank, and which: launchers of all kinds, as `bsl spy --local --pid LAUNCHER --json` sees them.

The ranks write their own process numbers, which are compared with what was found.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import wait_until

PROGRAM = Path(__file__).parent / "programs" / "numbered_ranks.py"
SIZE = 3
LIMIT_S = 90.0

Document = dict[str, Any]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., int]]:
    """`start(shell_text)` starts a launcher; `{rank}` is the program, `{folder}` where the ranks report."""
    started: list[subprocess.Popen[bytes]] = []

    def run(text: str, **environment: str) -> int:
        words = {"rank": f"{sys.executable} {PROGRAM}", "python": sys.executable, "folder": str(tmp_path)}
        argv = ["bash", "-c", text.format(**words) + "\nwait"]
        process = subprocess.Popen(
            argv, env={**os.environ, **environment}, stderr=subprocess.DEVNULL, start_new_session=True
        )
        started.append(process)
        return process.pid

    yield run
    for process in started:
        for pid in in_session(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(180)


def in_session(session: int) -> list[int]:
    """Return the processes of a session: torchrun puts its workers into groups of their own, but not into sessions."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[3]) == session:
                found.append(int(path.parent.name))
    return found


def reported(folder: Path, count: int = SIZE) -> dict[int, int]:
    """Wait until so many ranks have reported, and return {rank: pid}."""
    wait_until(lambda: len(list(folder.glob("rank-*"))) >= count, LIMIT_S)
    time.sleep(0.5)  # from the report to where they hang
    return {int(file.name[5:]): int(file.read_text()) for file in folder.glob("rank-*")}


def spy(pid: int, folder: Path, *options: str) -> Document:
    argv = [sys.executable, "-m", "bigsci_launch", "spy", "--local", "--pid", str(pid), "--json", *options]
    argv += ["--output", str(folder / "evidence")]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    document: Document = json.loads(done.stdout)
    return document


def numbered(document: Document) -> dict[int, int]:
    """Return {rank: pid} of the ranks whose numbers are known."""
    known = [rank for rank in document["ranks"] if rank["numbered_by"] != "order of start"]
    return {rank["rank"]: rank["pid"] for rank in known if rank["pid"] is not None}


def sources(document: Document) -> set[str]:
    return {rank["numbered_by"] for rank in document["ranks"]}


def whys(document: Document, role: str) -> list[str]:
    return [other["why"] for other in document["others"] if other["role"] == role]


@pytest.mark.parametrize("method", ["spawn", pytest.param("fork", marks=pytest.mark.long)])
def test_ranks_of_torchs_spawn_are_not_its_resource_tracker(
    start: Callable[..., int], tmp_path: Path, method: str
) -> None:
    """The shell's RANK is inherited by all of them, and is that of none."""
    pid = start(f"{{rank}} {method} {{folder}} &", RANK="0", WORLD_SIZE="1")
    truth = reported(tmp_path)
    document = spy(pid, tmp_path)
    assert numbered(document) == truth
    assert sources(document) == {"frames"}
    assert document["world_size"] == SIZE
    assert any("started with torch" in why for why in whys(document, "launcher"))
    if method == "spawn":
        assert ["resource tracker" in why for why in whys(document, "helper")] == [True]


def test_variables_that_ranks_set_themselves(start: Callable[..., int], tmp_path: Path) -> None:
    """They are not in /proc/PID/environ."""
    pid = start("{rank} variables {folder} &")
    truth = reported(tmp_path)
    document = spy(pid, tmp_path)
    assert numbered(document) == truth
    assert sources(document) == {"environment now"}


REVERSED = "for number in 2 1 0; do {rank} WAY {folder} OPTION$number & done"


def test_ranks_as_arguments_started_in_another_order(start: Callable[..., int], tmp_path: Path) -> None:
    pid = start(REVERSED.replace("WAY", "arguments").replace("OPTION", "--rank "))
    truth = reported(tmp_path)
    document = spy(pid, tmp_path)
    assert numbered(document) == truth
    assert sources(document) == {"arguments"}


def test_a_number_that_merely_looks_like_a_rank_is_none(start: Callable[..., int], tmp_path: Path) -> None:
    pid = start(REVERSED.replace("WAY", "nothing").replace("OPTION", ""))
    truth = reported(tmp_path)
    document = spy(pid, tmp_path, "--topology", "dp=3")
    assert numbered(document) == {}
    assert {rank["pid"] for rank in document["ranks"]} == set(truth.values())
    assert {rank["name"] for rank in document["ranks"]} == {f"process {pid}" for pid in truth.values()}
    assert document["coverage"]["numbering"] == "guessed"
    assert any("coordinates" in problem for problem in document["coverage"]["problems"])
    text = (tmp_path / "evidence" / "report.txt").read_text()
    assert f"3 processes: {', '.join(map(str, sorted(truth.values())[:2]))}" in text


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    """A file per rank, which says to which group it belongs."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for rank in range(SIZE):
        document = {"rank": rank, "world_size": SIZE, "port": port}
        (tmp_path / f"settings-{rank}.json").write_text(json.dumps(document))
    return tmp_path


@pytest.mark.long
@pytest.mark.parametrize("way", ["file", "store"])
def test_ranks_that_only_the_process_group_knows(start: Callable[..., int], settings: Path, way: str) -> None:
    """`store`: they wait for a fourth one that never joins."""
    pid = start(REVERSED.replace("WAY", way).replace("OPTION$number", "{folder}/settings-$number.json"))
    truth = reported(settings)
    document = spy(pid, settings)
    assert numbered(document) == truth
    assert document["world_size"] == (SIZE if way == "file" else SIZE + 1)


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.long), SIZE])
def test_workers_of_data_loaders_inherit_rank_and_are_none(
    start: Callable[..., int], tmp_path: Path, count: int
) -> None:
    numbers = " ".join(str(rank) for rank in reversed(range(count)))
    pid = start(f"for number in {numbers}; do RANK=$number {{rank}} load {{folder}} & done", WORLD_SIZE=str(count))
    truth = reported(tmp_path, count)
    wait_until(lambda: len(list(tmp_path.glob("worker-*"))) >= 2 * count, LIMIT_S)
    document = spy(pid, tmp_path)
    assert numbered(document) == truth
    assert document["world_size"] == count
    assert len(whys(document, "helper")) == 2 * count


def test_a_shell_that_numbers_ranks_and_runs_something_else(start: Callable[..., int], tmp_path: Path) -> None:
    """A Python program without a number is no rank where others have numbers."""
    ranks = "for number in 2 1 0; do RANK=$number {rank} environment {folder} & done;"
    pid = start(f"{ranks} {{python}} -c 'import time; time.sleep(600)' &", WORLD_SIZE=str(SIZE))
    truth = reported(tmp_path)
    document = spy(pid, tmp_path)
    assert numbered(document) == truth
    assert [other["role"] for other in document["others"]] == ["unknown", "launcher"]


def test_a_rank_that_is_not_there_has_a_reason(start: Callable[..., int], tmp_path: Path) -> None:
    """Two of eight ranks are below this launcher: nobody can say whether the others are elsewhere."""
    pid = start("for number in 4 5; do RANK=$number {rank} environment {folder} & done", WORLD_SIZE="8")
    truth = reported(tmp_path, 2)
    document = spy(pid, tmp_path)
    assert numbered(document) == truth
    missing = {each["rank"]: each["why"] for each in document["coverage"]["ranks_unreadable"]}
    assert sorted(missing) == [0, 1, 2, 3, 6, 7]
    assert all("only some of " in why for why in missing.values())


def test_torchrun_before_and_after_it_has_started_ranks(start: Callable[..., int], tmp_path: Path) -> None:
    """At every moment, what is named a rank is one; the agent of torchrun is none."""
    torchrun = f"{{python}} -m torch.distributed.run --standalone --nproc-per-node {SIZE}"
    pid = start(f"{torchrun} {PROGRAM} environment {{folder}} &")
    seen = [spy(pid, tmp_path) for _ in range(2)]
    truth = reported(tmp_path)
    for document in seen:
        assert set(numbered(document).items()) <= set(truth.items())
        assert all(rank["numbered_by"] != "order of start" for rank in document["ranks"])
    assert seen[0]["verdict"]["state"] == "unknown"
    document = spy(pid, tmp_path)
    assert numbered(document) == truth
    assert "unknown" not in {other["role"] for other in document["others"]}

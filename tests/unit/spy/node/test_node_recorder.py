"""A rank's own recorder is asked, and nobody who has put a socket in its place is believed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.texts import has_parts

STRANGER = 65_000
SERVER = """
import os, socket, sys, time
os.setuid(int(sys.argv[1]))
with socket.socket(socket.AF_UNIX) as server:
    server.bind("rank-0000.sock")
    os.chmod("rank-0000.sock", 0o666)
    server.listen()
    print("listens", flush=True)
    while True:
        link, _ = server.accept()
        link.recv(1000)
        try:
            while sys.argv[2:]:
                link.sendall(b"x")
                time.sleep(float(sys.argv[2]))
            link.sendall(b'HTTP/1.1 200 OK\\r\\n\\r\\n{"entries": []}')
        except OSError:
            pass
        link.close()
"""
Serve = Callable[..., None]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """`serve(uid)` has a process of that user answer in the place of rank 0; with `pause`, without end."""
    started: list[subprocess.Popen[bytes]] = []
    for above in tmp_path.parents[:3]:
        above.chmod(above.stat().st_mode | 0o011)
    tmp_path.chmod(0o777)
    monkeypatch.chdir(tmp_path)

    def start(uid: int, *pause: str) -> None:
        words = [sys.executable, "-c", SERVER, str(uid), *pause]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, cwd=tmp_path)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == b"listens\n"

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_recorder_of_the_user_of_the_rank_is_believed(agent: ModuleType, tmp_path: Path, serve: Serve) -> None:
    serve(os.getuid())
    own = agent.node_processes.owner_of(os.getpid())
    groups = tmp_path / "rank-0000.json"
    groups.write_text(json.dumps({"members": {"0": [0, 1]}}))
    groups.chmod(0o644)
    assert agent.node_recorder.ask_recorder(str(tmp_path), 0, own)["members"] == {"0": [0, 1]}
    groups.chmod(0o664)
    assert agent.node_recorder.ask_recorder(str(tmp_path), 0, own)["members"] == {}, "others may have written it"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_one_of_somebody_else_is_not(agent: ModuleType, tmp_path: Path, serve: Serve) -> None:
    """Who may write the folder can put a socket of their own there."""
    serve(STRANGER)
    rank = {"rank": 0, "pid": os.getpid()}
    found = list(agent.node_recorder.read_rank_recorder(rank, {"recorder_folder": str(tmp_path)}, {}))
    [(key, why)] = found
    assert key == "recorder_why" and has_parts(why, f"user {STRANGER}", "user 0")


def ask_for(agent: ModuleType, tmp_path: Path) -> tuple[str, float]:
    began = time.monotonic()
    rank = {"rank": 0, "pid": os.getpid()}
    [(key, why)] = agent.node_recorder.read_rank_recorder(rank, {"recorder_folder": str(tmp_path)}, {})
    assert key == "recorder_why"
    return why, time.monotonic() - began


def test_an_answer_that_drips_or_never_ends_holds_nobody(
    agent: ModuleType, tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(os.getuid(), "0.05")
    why, took_s = ask_for(agent, tmp_path)
    assert why == "timed out" and took_s < 3
    monkeypatch.setattr(agent.node_recorder, "LARGEST_DUMP", 4)
    assert "4 bytes" in ask_for(agent, tmp_path)[0]


def test_a_dump_is_read_within_bounds_and_only_if_the_user_of_the_rank_has_written_it(
    agent: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "dump"
    path.write_text(json.dumps({"pg_config": {}, "entries": []}))
    read = agent.node_recorder.read_dump
    assert read(str(path), os.getuid())["stream"] == []
    with pytest.raises(OSError, match=f"a file of user {os.getuid()}, not of user {STRANGER}"):
        read(str(path), STRANGER)
    monkeypatch.setattr(agent.node_recorder, "LARGEST_DUMP", 10)
    for content in (path.read_bytes(), b"\x80\x04" + path.read_bytes()):
        path.write_bytes(content)
        with pytest.raises(OSError, match="larger than 10 bytes"):
            read(str(path), os.getuid())

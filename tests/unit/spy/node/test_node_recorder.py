"""A rank's own recorder is asked, and nobody who has put a socket in its place is believed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

STRANGER = 65_000
SERVER = """
import os, socket, sys
os.setuid(int(sys.argv[1]))
with socket.socket(socket.AF_UNIX) as server:
    server.bind("rank-0000.sock")
    os.chmod("rank-0000.sock", 0o666)
    server.listen()
    print("listens", flush=True)
    while True:
        link, _ = server.accept()
        link.recv(1000)
        link.sendall(b'HTTP/1.1 200 OK\\r\\n\\r\\n{"entries": []}')
        link.close()
"""
Serve = Callable[[int], None]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """`serve(uid)` has a process of that user answer in the place of rank 0."""
    started: list[subprocess.Popen[bytes]] = []
    for above in tmp_path.parents[:3]:
        above.chmod(above.stat().st_mode | 0o011)
    tmp_path.chmod(0o777)
    monkeypatch.chdir(tmp_path)

    def start(uid: int) -> None:
        process = subprocess.Popen([sys.executable, "-c", SERVER, str(uid)], stdout=subprocess.PIPE, cwd=tmp_path)
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
    assert found == [("recorder_why", f"user {STRANGER} answers there, not user 0, whose rank it is")]

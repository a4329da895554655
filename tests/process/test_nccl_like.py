"""What the backend of `tests/support/nccl_like` must have in common with NCCL, for the tests that stand on it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from bigsci_launch.lost_peer import says_lost_peer
from bigsci_launch.train.survive import blocked

pytestmark = pytest.mark.torch

PROGRAM = Path(__file__).parent / "programs" / "nccl_like_ranks.py"


def end_of_rank_0(case: str, folder: Path, port: int, limit_s: float = 60.0) -> tuple[int | None, str]:
    """Return how the rank that waits has ended, or None if it has not, and what it printed."""
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    logs, ranks = [folder / f"rank-{rank}.log" for rank in range(2)], []
    for rank, log in enumerate(logs):
        given = {**environment, "RANK": str(rank), "OMP_NUM_THREADS": "1"}
        with log.open("w") as output:
            argv = [sys.executable, str(PROGRAM), case]
            ranks.append(subprocess.Popen(argv, env=given, stdout=output, stderr=subprocess.STDOUT))
    try:
        ranks[1].wait(180)
        with suppress(subprocess.TimeoutExpired):
            ranks[0].wait(limit_s)
        return ranks[0].returncode, logs[0].read_text()
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def test_a_call_returns_at_once_and_an_abort_ends_the_wait_without_an_error(tmp_path: Path, free_port: int) -> None:
    code, printed = end_of_rank_0("abort", tmp_path, free_port)
    assert code == 0, printed
    returned = re.search(r"returned after (\S+) s", printed)
    ended = re.search(r"ended after (\S+) s with (\S+)", printed)
    assert returned is not None and ended is not None, printed
    assert float(returned[1]) < 0.5 < 1.0 <= float(ended[1]) + 0.1
    assert float(ended[2]) not in (8.0, 16.0), "what was aborted leaves garbage"


@pytest.mark.long
def test_the_watchdog_ends_the_process_with_the_words_of_torch(tmp_path: Path, free_port: int) -> None:
    code, printed = end_of_rank_0("watchdog", tmp_path, free_port)
    assert code == -signal.SIGABRT, printed
    assert any(map(says_lost_peer, printed.splitlines()))


@pytest.mark.long
def test_nothing_ends_the_wait_for_a_communicator_whose_peer_does_not_come(tmp_path: Path, free_port: int) -> None:
    code, printed = end_of_rank_0("communicator", tmp_path, free_port, limit_s=2.0)
    assert code is None, printed


@pytest.mark.parametrize("name", ["abort", "_abort", "_shutdown"])
def test_a_group_without_an_abort_has_a_backend_with_one(name: str) -> None:
    """torch 2.4 to 2.7: none of these is here."""
    calls: list[str] = []
    backend = SimpleNamespace(**{each: lambda each=each: calls.append(each) for each in {name, "_shutdown"}})
    blocked._abort(SimpleNamespace(_get_backend=lambda device: backend))
    assert calls == [name]

"""What is read only on request, torch's flight recorder and native stacks; and the process continues unharmed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.spy.inputs.gather import open_evidence
from tests.support.waiting import wait_until

pytestmark = pytest.mark.torch
AskAgent = Callable[..., dict[str, Any]]
PLACES = ["beat", "hold_gil"]
LIMIT_S = 20.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recorded")


@pytest.fixture(scope="module")
def ranks(launch: Any, folder: Path) -> Any:
    arguments = [f"{place} {folder} {{ready}}" for place in PLACES]
    return launch("recorded_rank.py", arguments, limit_s=150, OMP_NUM_THREADS="1")


@pytest.fixture(scope="module")
def document(ranks: Any, ask_agent: AskAgent) -> dict[str, Any]:
    return ask_agent(launcher_pid=ranks.pid, flight_recorder="fork", native=True)


def assert_unharmed(ranks: Any, folder: Path) -> None:
    """Check that nothing is stopped, nothing was left below the ranks, and the working rank keeps working."""

    def is_stopped() -> bool:
        return bool({"T", "t"} & {state for pid in ranks.descendants() for state in thread_states(pid)})

    # A py-spy whose agent was killed reads on for a moment. What it has left stopped stays so.
    wait_until(lambda: not is_stopped(), LIMIT_S, evidence=ranks.states)
    before = (folder / "beat").read_text()
    wait_until(lambda: (folder / "beat").read_text() != before, LIMIT_S, evidence=ranks.states)
    wait_until(lambda: len(ranks.descendants()) <= len(PLACES), LIMIT_S, evidence=ranks.states)


def thread_states(pid: int) -> list[str]:
    texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return [text.rpartition(")")[2].split()[0] for text in texts]


def test_the_recorder_of_a_process_that_offers_nothing(document: dict[str, Any], ranks: Any, folder: Path) -> None:
    for rank in document["ranks"]:
        sample = rank["samples"][-1]
        assert "recorder_why" not in sample, sample["recorder_why"]
        assert sample["recorder"]["last_sequence"] == {"0": 5}
        assert [token[2] for token in sample["recorder"]["tokens"]] == ["all_reduce"]
    assert_unharmed(ranks, folder)


def test_what_was_pulled_is_what_torch_dumps(document: dict[str, Any], folder: Path) -> None:
    """The second rank holds the GIL, so it cannot be asked through Python."""
    evidence = open_evidence([folder / f"nccl_trace_rank_{rank}" for rank in range(len(PLACES))]).evidence()
    for rank, seen in enumerate(evidence.ranks):
        pulled = document["ranks"][rank]["samples"][-1]["recorder"]
        assert seen.recorder is not None
        assert [[token.group, token.operation, token.sizes, token.types] for token in seen.recorder.tokens] == [
            [token[0], *token[2:]] for token in pulled["tokens"]
        ]
        assert (list(seen.recorder.stream), dict(seen.recorder.last_sequence)) == (
            pulled["stream"], pulled["last_sequence"],
        )  # fmt: skip


def test_native_stacks(document: dict[str, Any]) -> None:
    sample = document["ranks"][PLACES.index("hold_gil")]["samples"][-1]
    frames = next(thread["frames"] for thread in sample["native"] if thread["name"] == "MainThread")
    assert any("nanosleep" in frame or "sleep (libc" in frame or ".so" in frame for frame in frames), frames
    assert any(frame.startswith("hold_gil (recorded_rank.py:") for frame in frames), frames


def test_nothing_is_asked_of_a_process_by_default(ranks: Any, ask_agent: AskAgent) -> None:
    sample = ask_agent(launcher_pid=ranks.pid)["ranks"][0]["samples"][-1]
    assert {"recorder", "recorder_why", "native", "native_why"}.isdisjoint(sample)


def test_a_process_without_torch_says_so(launch: Any, ask_agent: AskAgent) -> None:
    launched = launch("hung_rank.py", ["wait_for_peers {ready}", "stop_here {ready}"])
    found = ask_agent(launcher_pid=launched.pid, flight_recorder="fork", native=True)
    first, stopped = (rank["samples"][-1] for rank in found["ranks"])
    assert "torch" in first["recorder_why"] and "recorder" not in first
    assert first["native"]
    assert "native" not in stopped, "it would hold the reader"


def test_killing_the_agent_at_any_moment_harms_nobody(ranks: Any, agent_path: Path, folder: Path) -> None:
    request = {"launcher_pid": ranks.pid, "flight_recorder": "fork", "native": True, "samples": 1}
    argv = [sys.executable, "-I", "-S", str(agent_path), json.dumps(request)]
    for step in range(4):
        kill_after(argv, 0.2 + 0.1 * step)
    assert_unharmed(ranks, folder)


@pytest.mark.parametrize("num_kills", [4, pytest.param(10, marks=pytest.mark.long)])
def test_killing_what_holds_a_thread_harms_nobody(ranks: Any, agent_path: Path, folder: Path, num_kills: int) -> None:
    """It pulls repeatedly, 50 times a second on an idle machine, and dies while it holds, writes, points or waits."""
    pid = ranks.descendants()[0]
    program = f"import sys; sys.path.insert(0, {str(agent_path.parent)!r})\n"
    program += f"from node_injection import pull\nwhile True: pull({pid}, {{}})"
    for step in range(num_kills):
        kill_after([sys.executable, "-I", "-S", "-c", program], 0.3 + 0.0171 * step)
    assert_unharmed(ranks, folder)


def test_killing_bsl_spy_at_any_moment_harms_nobody(ranks: Any, folder: Path, tmp_path: Path) -> None:
    """Its agent is left alone and ends."""
    argv = [sys.executable, "-m", "bigsci_launch", "spy", "--pid", str(ranks.pid), "--output", str(tmp_path / "e")]
    orphans = [child for step in range(2) for child in kill_bsl([*argv, "--native", "--flight-recorder=fork"], step)]
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in orphans), LIMIT_S + 20)
    assert_unharmed(ranks, folder)


def kill_bsl(argv: list[str], step: int) -> list[int]:
    """Kill `bsl` when its agent has run for `step` half seconds, and return its children, which survive."""
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    children: list[int] = []
    until = time.monotonic() + LIMIT_S
    while not children and process.poll() is None and time.monotonic() < until:
        children = children_of(process.pid)
        time.sleep(0.02)
    time.sleep(0.5 * step)
    process.kill()
    process.wait(180)
    return children


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def kill_after(argv: list[str], delay_s: float) -> None:
    """Kill a program and its readers, which have their own process groups."""
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    time.sleep(delay_s)
    for pid in [process.pid, *children_of(process.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(180)

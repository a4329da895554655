"""The node agent on real processes: what it reads, that it disturbs nothing, and when it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.spy.look.collect import WireReader, agent_program
from bigsci_launch.spy.look.target import Target
from tests.support.texts import has_parts

AskAgent = Callable[..., dict[str, Any]]
PLACES = ["wait_for_peers", "load_batch", "tokenise", "stop_here", "read_shard", "wait_for_worker"]
STATES = {"wait_for_peers": "S", "load_batch": "S", "tokenise": "R", "stop_here": "T", "read_shard": "D",
          "wait_for_worker": "S"}  # fmt: skip


@pytest.fixture(scope="module")
def hung(launch: Any) -> Any:
    return launch("hung_rank.py", [f"{place} {{ready}}" for place in PLACES])


@pytest.fixture(scope="module")
def document(hung: Any, ask_agent: AskAgent) -> dict[str, Any]:
    before = hung.states()
    found = ask_agent(launcher_pid=hung.pid)
    found["states"] = (before, hung.states())
    return found


def functions(sample: dict[str, Any]) -> list[str]:
    return [frame["function"] for frame in sample["stack"]["threads"][0]["frames"]]


@pytest.mark.parametrize(("rank", "place"), list(enumerate(PLACES)))
def test_every_stack_is_read_in_whatever_state(document: dict[str, Any], rank: int, place: str) -> None:
    found = document["ranks"][rank]
    assert (found["rank"], found["source"], found["world_size"]) == (rank, "environment", len(PLACES))
    first, *_, last = found["samples"]
    assert place in functions(first), first
    assert {first["state"], last["state"]} <= {STATES[place], "R" if place == "tokenise" else STATES[place]}
    assert last["mono"] - first["mono"] >= 1.0


def test_who_asks_for_rings_alone_waits_for_no_stack(hung: Any, ask_agent: AskAgent) -> None:
    found = ask_agent(launcher_pid=hung.pid, only_rings=True, samples=1)
    assert [len(rank["samples"]) for rank in found["ranks"]] == [1] * len(PLACES)
    assert not any({"stack", "motion"} & rank["samples"][0].keys() for rank in found["ranks"])


def test_a_process_that_did_not_run_is_not_read_twice(document: dict[str, Any]) -> None:
    second = {PLACES[rank["rank"]]: rank["samples"][1] for rank in document["ranks"]}
    assert second["wait_for_peers"]["same_stack"]
    assert "same_stack" not in second["tokenise"] or second["tokenise"]["cpu_ticks"] > 0


def test_what_the_kernel_says(document: dict[str, Any]) -> None:
    by_place = {PLACES[rank["rank"]]: rank["samples"][-1] for rank in document["ranks"]}
    assert by_place["stop_here"]["wchan"] == "do_signal_stop"
    assert by_place["load_batch"]["wchan"] == "hrtimer_nanosleep"
    children = document["ranks"][PLACES.index("wait_for_worker")]["samples"][0]["children"]
    assert [child["state"] for child in children] == ["T"]
    ticks = [sample["cpu_ticks"] for sample in document["ranks"][PLACES.index("tokenise")]["samples"]]
    assert ticks[1] > ticks[0]


def test_it_is_quick_and_disturbs_nobody(document: dict[str, Any]) -> None:
    before, after = document["states"]
    calm = {pid: state for pid, state in before.items() if state != "R"}
    assert {pid: after[pid] for pid in calm} == calm
    assert document["cpu_s"] < 1.0


def test_ranks_without_numbers_are_counted(launch: Any, ask_agent: AskAgent) -> None:
    launched = launch("hung_rank.py", ["wait_for_peers {ready}", "load_batch {ready}"], numbered=False)
    found = ask_agent(launcher_pid=launched.pid)
    assert [(rank["rank"], rank["source"]) for rank in found["ranks"]] == [(0, "order of start"), (1, "order of start")]
    assert "load_batch" in functions(found["ranks"][1]["samples"][0])


def slow_py_spy(folder: Path) -> str:
    """A reader that never answers, and writes down how many there are while it begins."""
    path = folder / "py-spy"
    path.write_text(f"""#!/bin/sh
touch {folder}/reader-$$
for each in {folder}/reader-*; do kill -0 ${{each##*-}} && num=$((num + 1)); done
echo $num >> {folder}/counts
sleep 600
""")
    path.chmod(0o755)
    return str(path)


def test_a_reader_that_never_answers_is_killed_and_the_rest_is_kept(
    hung: Any, ask_agent: AskAgent, tmp_path: Path
) -> None:
    found = ask_agent(launcher_pid=hung.pid, py_spy=slow_py_spy(tmp_path), py_spy_timeout_s=4.0)
    assert max(map(int, (tmp_path / "counts").read_text().split())) > 1, "they read at once"
    assert len(found["ranks"]) == len(PLACES)
    for rank in found["ranks"]:
        assert has_parts(rank["samples"][0]["why"], "py-spy", "no answer in "), "at least 4 s, and more on a busy node"
        assert rank["samples"][0]["wchan"] is not None
        assert rank["samples"][0]["thread_times"]
    assert not [path.name for path in Path("/proc").glob("[0-9]*") if was_started_from(path, str(tmp_path))]


def was_started_from(process: Path, text: str) -> bool:
    """Return whether the command line of a process contains `text`."""
    try:
        return text in (process / "cmdline").read_text()
    except OSError:
        return False


def test_no_py_spy_is_evidence_and_no_error(hung: Any, ask_agent: AskAgent) -> None:
    found = ask_agent(launcher_pid=hung.pid, py_spy="/nowhere/py-spy")
    assert found["py_spy"] is None
    assert all("py-spy is not installed" in rank["samples"][-1]["why"] for rank in found["ranks"])


def test_a_foreign_user_gets_kernel_facts_and_the_reason(hung: Any) -> None:
    python = shutil.which("python3", path="/usr/bin")
    if os.geteuid() != 0 or python is None:
        pytest.skip("needs root to become somebody else, and a Python that everybody may run")
    done = subprocess.run(
        [python, "-I", "-S", "-"],
        input=agent_program(Target("x", {"launcher_pid": hung.pid, "py_spy": shutil.which("py-spy")})),
        capture_output=True, text=True, timeout=300, user=65534, group=65534, check=True,
    )  # fmt: skip
    reader = WireReader()
    found = reader.documents[next(node for line in done.stdout.splitlines() if (node := reader.feed(line)))]
    assert len(found["ranks"]) >= len(PLACES)
    for rank in found["ranks"]:
        sample = rank["samples"][-1]
        assert sample["state"] in "SRTD"
        assert "Permission" in sample["why"] or "not installed" in sample["why"]


def test_a_launcher_that_is_gone_has_no_ranks(ask_agent: AskAgent) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert ask_agent(launcher_pid=process.pid)["ranks"] == []


def test_pid_files_that_name_a_process_of_before_say_that_it_is_gone(
    hung: Any, ask_agent: AskAgent, tmp_path: Path
) -> None:
    """The pid now belongs to another process, because the start time does not match."""
    host = os.uname().nodename
    document = {"rank": 3, "node": host, "host": host, "pid": hung.pid, "start_ticks": 1}
    (tmp_path / "rank-0003.json").write_text(json.dumps(document))
    (tmp_path / "rank-0004.json").write_text("{torn")
    found = ask_agent(pid_files=str(tmp_path))
    assert [rank["samples"][0]["state"] for rank in found["ranks"]] in ([], ["gone"])
    (tmp_path / "rank-0004.json").unlink()
    found = ask_agent(pid_files=str(tmp_path))
    assert [(rank["rank"], rank["samples"][0]["state"]) for rank in found["ranks"]] == [(3, "gone")]


def test_killing_the_agent_leaves_no_process_stopped(hung: Any, agent_path: Path) -> None:
    before = hung.states()
    for delay_s in (0.03, 0.06, 0.1, 0.2):
        argv = [sys.executable, "-I", "-S", str(agent_path), json.dumps({"launcher_pid": hung.pid})]
        process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, start_new_session=True)
        time.sleep(delay_s)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(180)
    time.sleep(0.2)
    stopped = {pid for pid, state in hung.states().items() if state in ("T", "t")}
    assert stopped == {pid for pid, state in before.items() if state in ("T", "t")}

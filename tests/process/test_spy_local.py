"""`bsl spy` on this machine, as a user types it: another launcher's ranks, a local run, stored evidence, mistakes."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import invoke
from tests.support.texts import has_parts
from tests.support.waiting import wait_until

PROGRAM = """
import os, sys, time
def wait_for_peers():
    print("up", flush=True)
    time.sleep(120)
def load_batch():
    print("up", flush=True)
    time.sleep(120)
load_batch() if os.environ["RANK"] == "2" else wait_for_peers()
"""


def bsl(*words: str, cwd: Path, limit_s: float = 300.0) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "bigsci_launch", *words]
    return subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=limit_s, check=False)


@pytest.fixture(scope="module")
def launcher(launch: Any) -> int:
    places = ["wait_for_peers", "wait_for_peers", "wait_for_peers", "load_batch"]
    pid = launch("hung_rank.py", [f"{place} {{ready}}" for place in places]).pid
    assert isinstance(pid, int)
    return pid


@pytest.fixture(scope="module")
def stopped(launch: Any) -> int:
    """A launcher with a rank that is stopped, which is a hang at first sight."""
    places = ["wait_for_peers", "wait_for_peers", "wait_for_peers", "stop_here"]
    pid = launch("hung_rank.py", [f"{place} {{ready}}" for place in places]).pid
    assert isinstance(pid, int)
    return pid


def test_ranks_of_another_launcher(launcher: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "here").mkdir()
    done = bsl("spy", "--local", "--pid", str(launcher), "--topology", "dp=2,tp=2", cwd=tmp_path / "here")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("rank 3 (")
    assert "dp1 pp0 tp1) sleeps in load_batch (hung_rank.py:" in lines[0]
    assert "3 ranks: 0-2" in done.stdout
    assert "\x1b" not in done.stdout, "no colour in a pipe"
    folder = Path(done.stderr.strip().removeprefix("evidence: "))
    assert folder.parent == tmp_path / "state" / "bsl" / "spy"
    assert re.fullmatch(rf"\d{{8}}-\d{{6}}Z-local-{launcher}", folder.name)
    assert (folder / "report.txt").read_text() == done.stdout
    assert not list((tmp_path / "here").iterdir()), "nothing is left where it was typed"


def test_json_and_the_stored_bundle_say_the_same(launcher: int, tmp_path: Path) -> None:
    options = ["--topology", "dp=4", "--json"]
    live = bsl("spy", "--pid", str(launcher), "--output", "evidence", *options, cwd=tmp_path)
    again = bsl("spy", "--bundle", "evidence", "--json", cwd=tmp_path)
    assert json.loads(again.stdout) == json.loads(live.stdout)
    document = json.loads(live.stdout)
    assert (document["verdict"]["state"], document["verdict"]["suspects"]) == ("waiting", []), "it has just begun"
    assert document["verdict"]["look_first"][0]["rank"] == 3
    assert document["world_size"] == document["coverage"]["ranks_read"] == 4
    assert json.loads((tmp_path / "evidence" / "verdict.json").read_text()) == document


def test_the_answer_is_given_also_where_the_evidence_cannot_be_stored(launcher: int, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = bsl("spy", "--pid", str(launcher), "--output", "file", cwd=tmp_path)
    assert done.returncode == 4
    assert done.stdout.startswith("rank 3 (")
    assert done.stderr.startswith("error: file: ")


def test_a_home_that_takes_nothing_costs_a_line(stopped: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses a file instead of a folder, because root may write to read-only folders."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    done = bsl("spy", "--pid", str(stopped), "--exit-code", cwd=tmp_path)
    assert done.stdout.startswith("rank 3 (")
    assert done.returncode == 1, "the exit code is that of the answer"
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"warning: {tmp_path}/file/bsl/spy/")
    assert os.strerror(errno.ENOTDIR) in line and line.endswith("--output DIR")


SHELL = """
for rank in 0 1; do
    {python} -c "import pathlib, time; pathlib.Path('up-$rank').touch(); time.sleep(600)" &
done
until [ -e up-0 ] && [ -e up-1 ]; do sleep 0.05; done
{python} -m bigsci_launch spy --pid $$ --json
kill $(jobs -p)
"""


def test_bsl_is_no_rank_of_the_shell_that_it_was_typed_in(tmp_path: Path) -> None:
    text = SHELL.format(python=sys.executable)
    done = subprocess.run(["bash", "-c", text], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert json.loads(done.stdout)["world_size"] == 2, done.stderr


def test_a_hang_may_be_an_exit_code(stopped: int, launcher: int, tmp_path: Path) -> None:
    for pid, code in ((stopped, 1), (launcher, 0)):
        words = ("spy", "--pid", str(pid), "--output", "e")
        assert bsl(*words, "--exit-code", cwd=tmp_path).returncode == code


@pytest.fixture
def local_run(tmp_path: Path) -> Iterator[Path]:
    config = {
        "run": {"name": "stuck", "command": [sys.executable, "-c", PROGRAM]},
        "slurm": {"site": "local"},
        "parallelism": {"tensor_parallel_size": 2, "data_parallel_size": 2},
        "model": {
            "num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "sequence_length": 8, "vocab_size": 64,
        },
        "training": {"steps": 10, "micro_batch_size": 1, "global_batch_size": 4},
        "data": {"prefix": "none"},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    done = bsl("submit", "run.yaml", "--local", "--detach", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "stuck"
    logs = [run / "attempts" / "0001" / "logs" / f"rank-{rank:04d}.log" for rank in range(4)]
    wait_until(lambda: all(log.exists() and "up" in log.read_text() for log in logs))
    yield run
    assert bsl("cancel", str(run), cwd=tmp_path).returncode == 0


def test_a_local_run_by_name_by_default_and_as_the_only_one(local_run: Path) -> None:
    folder = local_run.parents[1]
    for words in (["stuck"], [], ["--local"], [str(local_run)]):
        done = bsl("spy", *words, "--json", cwd=folder)
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert document["job"] == "stuck"
        assert document["coverage"]["ranks_read"] == 4
        suspect = document["verdict"]["look_first"][0]
        assert (suspect["rank"], suspect["coordinate"]) == (2, {"pp": 0, "tp": 0, "dp": 1})
        assert "load_batch" in suspect["why"]
    assert len(list((local_run / "spy").iterdir())) >= 1, "the evidence of a run is stored with the run"


@pytest.mark.parametrize(
    ("words", "rc"),
    [
        ("--pid 4194303", 4),
        ("--local", 4),
        ("nowhere", 2),
        ("--bundle nowhere", 2),
        ("--bundle /dev/null", 2),
        ("one two", 2),
        ("--pid 1 --topology tp=0", 2),
        ("--pid 1 --jobid 7", 2),
    ],
)
def test_mistakes(
    tmp_path: Path, words: str, rc: int, check_text: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = invoke("spy", *words.split())
    assert done.exit_code == rc, done.stderr
    check_text(done.stderr)


def test_the_topology_must_fit_the_number_of_ranks(launcher: int, tmp_path: Path) -> None:
    done = bsl("spy", "--pid", str(launcher), "--topology", "tp=3", "--output", "e", cwd=tmp_path)
    assert done.returncode == 2
    assert has_parts(done.stderr, "tp=3,pp=1,dp=1", " 3 ranks", " 4")

"""A pipe in the place of a file of a run, as a colleague may leave one: nobody waits until somebody writes there."""

from __future__ import annotations

import inspect
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bigsci_launch.checkpoints.folder import CheckpointsDir
from bigsci_launch.cli.main import bsl
from bigsci_launch.runs.attempts import JobRecord, write_job
from bigsci_launch.runs.layout import RunDir, node_memory, write_json
from bigsci_launch.scheduler.local import Launcher
from bigsci_launch.topology import Topology

from ..checkpoints.test_verify import save

TOPOLOGY = Topology(tp=2, pp=1, dp=1)
LIMIT_S = 8
READ = (
    *("list", "status demo", "status demo --json", "logs demo", "control demo", "checkpoint list demo", "nodes list"),
    *("checkpoint verify demo", "checkpoint prune demo --keep 1 --dry-run", "diff-weights demo demo"),
)
"""What only reads files, and is quick."""
LOOK = (
    "watch demo --once",
    "watch demo --once --html demo.html",
    "spy demo --settle 0",
    "trace last demo",
    "trace export demo --perfetto demo.json",
)
"""What starts programs too."""
OUTCOMES = (0, 1, 2, 4)
"""Exit codes that the manual names: well, something is wrong, this cannot be asked, this could not be seen."""
MARKS = ("lease", "queued", "cancelled", "latest")
"""Files whose names have no suffix."""
UNSEEN = "not a regular file"


class Waited(BaseException):
    """A command waited for a pipe. No handler of errors in between may take it for one of a file."""


@contextmanager
def in_time(words: str) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Waited(words)

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)


def ask(words: str) -> Result:
    with in_time(words):
        done = CliRunner().invoke(bsl, words.split())
    assert done.exception is None or isinstance(done.exception, SystemExit), words
    assert done.exit_code in OUTCOMES, f"{words}: {done.output}"
    return done


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Run `demo`, with two checkpoints, whose two ranks failed."""
    monkeypatch.setenv("BSL_RUNS", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    run = RunDir((tmp_path / "demo").resolve())
    attempt = run.attempt("0001")
    attempt.make()
    write_json(run.record, {"name": "demo", "topology": TOPOLOGY.as_dict()})
    write_job(attempt, JobRecord("local", time.time(), launcher=Launcher(1, 1, socket.gethostname()), total_steps=9))
    write_json(attempt.exit, {"reason": "failed", "exit_code": 1, "first_failure": None})
    for rank in range(2):
        at = {"rank": rank, "node": "n", "host": "n", "coordinate": TOPOLOGY.coordinate(rank).as_dict()}
        write_json(attempt.pid_file(rank), {**at, "pid": 9, "started": time.time()})
        step = {"kind": "step", "step": 7, "time": time.time(), "loss": 1.0}
        attempt.event_file(rank).write_text(json.dumps(step) + "\n")
        attempt.log_file(rank).write_text("2026-01-01T00:00:00.000000Z hello\n")
    checkpoints = CheckpointsDir(run.checkpoints)
    save(checkpoints, 5)
    save(checkpoints, 10)
    return run


def files_of(run: RunDir) -> list[Path]:
    """Return every file that a run may have, of each kind at least one."""
    attempt, checkpoints = run.attempt("0001"), CheckpointsDir(run.checkpoints)
    named = [
        path
        for owner in (run, attempt, checkpoints)
        for name, _ in inspect.getmembers(type(owner), lambda member: isinstance(member, property))
        if isinstance(path := getattr(owner, name), Path) and (path.suffix or path.name in MARKS)
    ]
    per_rank = [attempt.rings / f"rank-0000.{kind}" for kind in ("ring", "stacks", "calls")]
    per_rank += [attempt.error_file(0), attempt.exit_file(0), attempt.recorder_groups(0)]
    per_rank += [attempt.requests / "save-1-1.json", attempt.answers / "fence.0001.0.json"]
    watching = [run.watcher_file("x"), run.watch_by(os.getuid() + 1) / "findings.jsonl", run.control / "save"]
    there = [path for path in run.path.rglob("*") if path.is_file()]
    return sorted({*named, *per_rank, *watching, *there, node_memory(run.path.parent)})


@contextmanager
def pipe_at(path: Path) -> Iterator[None]:
    """Have a pipe in the place of a file, which may be missing."""
    kept = path.read_bytes() if path.exists() else None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    yield
    path.unlink()
    if kept is not None:
        path.write_bytes(kept)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_no_command_that_reads_a_run_waits_for_a_pipe(run: RunDir) -> None:
    said: dict[tuple[str, str], str] = {}
    for path in files_of(run):
        with pipe_at(path):
            said.update({(str(path.relative_to(run.path.parent)), words): ask(words).output for words in READ})
    assert len(said) >= 50 * len(READ)
    for name, words in (
        ("demo/attempts/0001/logs/rank-0001.log", "logs demo"),
        ("demo/attempts/0001/job.json", "status demo"),
        ("demo/checkpoints/global_step10/checkpoint.json", "checkpoint verify demo"),
        ("nodes.json", "nodes list"),
    ):
        assert name in said[name, words] and UNSEEN in said[name, words], words
    assert "rank 0 dp0 pp0 tp0] hello" in said["demo/attempts/0001/logs/rank-0001.log", "logs demo"]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_no_look_at_a_run_of_pipes_waits_for_one(run: RunDir) -> None:
    attempt = run.attempt("0001")
    kept = (run.record, attempt.job, attempt.queued_mark, attempt.pid_file(0), attempt.pid_file(1))
    with ExitStack() as stack:
        for path in files_of(run):
            if path not in kept:
                stack.enter_context(pipe_at(path))
        said = {words: ask(words).output for words in (*READ, *LOOK)}
    assert f"logs/rank-0000.log: {UNSEEN}" in said["watch demo --once"]
    assert f"rank-0000.ring: {UNSEEN}" in said["trace last demo"]

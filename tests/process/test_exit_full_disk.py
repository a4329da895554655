"""A run directory on a file system that is full: cause and exit code must stay true."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import bigsci_launch
from bigsci_launch.runs.attempts import read_exit
from bigsci_launch.runs.layout import AttemptDir
from bigsci_launch.status.ending import ending_advice
from tests.support.texts import has_parts

from .attempt_records import Attempt, program_argv
from .conftest import fill

RUNNER = Path(bigsci_launch.__file__).parent / "assets" / "diagnostics" / "rank_runner.py"


def run_rank(attempt: Attempt, rank: int, program: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-I", "-S", str(RUNNER), "--attempt-dir", str(attempt.dir.path), "--topology"]
    argv += ["tp=2,pp=2,dp=2", "--ranks-per-node", "2", "--rank", str(rank), "--", sys.executable, "-c", program]
    return subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)


def test_the_rank_that_failed_and_its_code_are_known(small_disk: Path, tmp_path: Path) -> None:
    attempt = Attempt(small_disk / "0001")
    attempt.exits(*(rank for rank in range(8) if rank != 5), code=None, signal="SIGTERM", terminated=91.0)
    attempt.output()
    fill(small_disk)
    done = run_rank(attempt, 5, "raise SystemExit(7)")
    assert done.returncode == 7
    assert "cannot write" in done.stderr and "No space left" in done.stderr
    (small_disk / "ballast").write_bytes(b"")  # room for job.out, which srun writes
    attempt.output(*(f"5: {line}" for line in done.stderr.splitlines()))
    (small_disk / "ballast").unlink()
    fill(small_disk)
    said = attempt.run(code=143)
    assert attempt.code == "7"
    assert has_parts(said.stderr, "crashed", "exit code 7", "rank 5 (dp0 pp1 tp1)")
    assert "exit_reason: cannot write" in said.stderr and "No space left" in said.stderr
    assert said.returncode == 1 and not attempt.dir.exit.exists()
    record = said.stderr.partition("exit_reason: record exit ")[2]
    assert json.loads(record.splitlines()[0])["exit_code"] == 7
    assert not list(attempt.dir.path.glob(".exit.json*"))
    (small_disk / "ballast").write_bytes(b"")
    attempt.output(*said.stderr.splitlines())
    found = read_exit(attempt.dir)
    assert found is not None and (found["reason"], found["first_failure"]["rank"]) == ("crashed", 5)
    assert read_exit(AttemptDir(small_disk / "0001.r1")) is None, "a requeue shares job.out"


def test_where_nothing_can_be_written_no_rank_is_called_killed(small_disk: Path) -> None:
    attempt = Attempt(small_disk / "0001")
    attempt.exits(0, 1, 2, 3, 6, 7, code=None, signal="SIGTERM", terminated=91.0)
    fill(small_disk)
    said = run_rank(attempt, 5, "raise SystemExit(1)").stderr.splitlines()
    (small_disk / "ballast").write_bytes(b"")
    attempt.output(*said)  # rank 4 could not even say it
    found = attempt.describe(code=1)
    assert (found["reason"], found["first_failure"]["rank"], found["failed_ranks"]) == ("crashed", 5, [5])
    assert has_parts(found["cause"], "No space left", attempt.dir.pid_file(5))
    assert "room" in (ending_advice(found, "run") or "")


def test_output_that_cannot_be_written_changes_neither_code_nor_record(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path / "0001")
    attempt.exits(5, code=7)
    argv = [*program_argv(), "exit-reason", "--attempt-dir", str(attempt.dir.path), "--world-size", "8"]
    argv += ["--started", "10", "--exit-code", "143"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=full, text=True, timeout=300, check=False)
    assert (done.stdout, done.returncode) == ("7\n", 0)
    assert json.loads(attempt.dir.exit.read_text())["exit_code"] == 7


def test_a_record_that_was_written_counts_before_an_older_one_that_was_not(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path / "0001")
    older = json.dumps(attempt.exit_record(5, terminated=90.0, time=90.0))
    attempt.exits(5, code=7, time=95.0)
    attempt.output(f"5: rank_runner: record exits/rank-0005 {older}", "5: rank_runner: record exits/rank-0006 {torn")
    attempt.exits(*(rank for rank in range(8) if rank != 5), code=None, signal="SIGTERM", terminated=96.0)
    assert attempt.describe(code=143)["first_failure"]["rank"] == 5

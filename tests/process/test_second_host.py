"""A local run that another host started: it is not started again while nobody knows that it has ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bigsci_launch.runs.layout import AttemptDir, RunDir
from bigsci_launch.scheduler.lease import renewed_at
from tests.support.waiting import wait_until

BSL = [sys.executable, "-m", "bigsci_launch"]
IN_OTHER = ["unshare", "--uts", "sh", "-c", 'hostname elsewhere; exec "$@"', "sh"]
"""A namespace with another host name."""


def has_other_hosts() -> bool:
    try:
        return subprocess.run([*IN_OTHER, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


pytestmark = pytest.mark.skipif(not has_other_hosts(), reason="no namespace with another host name can be made here")


def call(folder: Path, *words: str, elsewhere: bool = False) -> subprocess.CompletedProcess[str]:
    argv = [*(IN_OTHER if elsewhere else []), *BSL, *words]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def launcher_of(attempt: AttemptDir) -> int:
    return int(json.loads(attempt.job.read_text())["launcher"]["pid"])


def end(attempt: AttemptDir, number: int) -> None:
    pid = launcher_of(attempt)
    os.kill(pid, number)
    wait_until(lambda: not Path(f"/proc/{pid}").exists())


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    """A run that runs here."""
    config = {
        "run": {"name": "trial", "command": ["sleep", "120"]},
        "slurm": {"site": "local"},
        "parallelism": {"data_parallel_size": 1},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    done = call(tmp_path, "submit", "run.yaml", "--detach")
    assert done.returncode == 0, done.stderr
    run = RunDir(tmp_path / "runs" / "trial")
    wait_until(lambda: renewed_at(run.attempt("0001").lease) is not None)
    yield run
    for attempt in run.attempts():
        if Path(f"/proc/{launcher_of(attempt)}").exists():
            end(attempt, signal.SIGTERM)


def test_another_host_starts_no_second_attempt_while_the_first_may_run(run: RunDir) -> None:
    folder = run.path.parent.parent
    job = json.loads(call(folder, "status", "trial", "--json", elsewhere=True).stdout)["job"]
    assert job["state"] == "UNKNOWN"
    refused = call(folder, "submit", "run.yaml", "--detach", elsewhere=True)
    assert refused.returncode == 2 and "attempt 0001 (pid " in refused.stderr and "may still run" in refused.stderr
    forced = call(folder, "submit", "run.yaml", "--detach", "--force", elsewhere=True)
    assert forced.returncode == 2 and "attempt 0001" in forced.stderr
    end(run.attempt("0001"), signal.SIGTERM)
    assert [each.name for each in run.attempts()] == ["0001"]
    again = call(folder, "submit", "run.yaml", "--detach", elsewhere=True)
    assert again.returncode == 0, "the first has ended, and its exit.json says so"


@pytest.mark.long  # tests/unit/runs/test_next.py has the decision
def test_a_host_that_is_gone_is_named_and_only_force_starts_the_next(run: RunDir) -> None:
    folder = run.path.parent.parent
    end(run.attempt("0001"), signal.SIGKILL)
    refused = call(folder, "submit", "run.yaml", "--detach", elsewhere=True)
    assert refused.returncode == 2 and "`bsl submit --force`" in refused.stderr
    assert call(folder, "submit", "run.yaml", "--detach", "--force", elsewhere=True).returncode == 0
    assert [each.name for each in run.attempts()] == ["0001", "0002"]

"""The folder for the evidence of a look."""

from __future__ import annotations

import calendar
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.errors import CollectError, JobNotFound
from bigsci_launch.runs.attempts import JobRecord, write_job
from bigsci_launch.runs.layout import AttemptDir, RunDir, write_json
from bigsci_launch.spy.look.target import Target, find_target

MOMENT = calendar.timegm((2026, 11, 21, 3, 22, 49))
STAMP = "20261121-032249Z"


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)


@pytest.mark.parametrize(
    ("state_home", "folder"),
    [
        (None, "/home/me/.local/state/bsl/spy"),
        ("", "/home/me/.local/state/bsl/spy"),
        ("not/absolute", "/home/me/.local/state/bsl/spy"),
        ("/var/state", "/var/state/bsl/spy"),
    ],
)
def test_a_foreign_job_has_its_evidence_in_the_state_of_the_user(
    monkeypatch: pytest.MonkeyPatch, state_home: str | None, folder: str
) -> None:
    if state_home is not None:
        monkeypatch.setenv("XDG_STATE_HOME", state_home)
    assert Target("1234", {}).evidence_folder(MOMENT) == Path(folder) / f"{STAMP}-1234"


@pytest.mark.parametrize(
    ("label", "name"),
    [("1234_7", "1234_7"), ("1234+1", "1234+1"), ("local:4711", "local-4711"), ("a/../b c", "a-..-b-c")],
)
def test_the_job_is_in_the_name(label: str, name: str) -> None:
    assert Target(label, {}).evidence_folder(MOMENT).name == f"{STAMP}-{name}"


@pytest.fixture
def tokyo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This machine is nine hours ahead of UTC."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC-9")
        time.tzset()
        yield
    time.tzset()


def test_the_time_in_the_name_is_that_of_the_logs(tmp_path: Path, tokyo: None) -> None:
    assert Target("1234", {}, run=RunDir(tmp_path)).evidence_folder(MOMENT).name == STAMP


def test_a_run_keeps_its_evidence(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "night")
    assert Target("night", {}, run=run).evidence_folder(MOMENT) == run.bundles / STAMP


@pytest.mark.parametrize("value", [None, "", "nowhere"])
def test_without_a_home_there_is_no_place(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is None:
        monkeypatch.delenv("HOME")
    else:
        monkeypatch.setenv("HOME", value)
    with pytest.raises(CollectError, match="XDG_STATE_HOME nor HOME"):
        Target("1234", {}).evidence_folder(MOMENT)


@pytest.fixture
def attempt(tmp_path: Path, fake_slurm: Callable[..., Any]) -> AttemptDir:
    """An attempt of a job that Slurm no longer knows."""
    fake_slurm("squeue", "scontrol").answer("squeue")
    run = RunDir(tmp_path / "night")
    found = run.attempt("0001")
    found.path.mkdir(parents=True)
    run.record.write_text("{}")
    write_job(found, JobRecord("slurm", time.time() - 60, job_id="1234"))
    return found


def with_ring(attempt: AttemptDir) -> None:
    attempt.rings.mkdir()
    (attempt.rings / "rank-0000.ring").write_bytes(b"")


def test_a_run_that_has_ended_is_known_from_the_record_of_its_end(attempt: AttemptDir) -> None:
    write_json(attempt.exit, {"reason": "cancelled", "exit_code": 143})
    found = find_target(str(attempt.path.parent.parent), None)
    assert found.is_over and found.attempt is not None and found.attempt.name == "0001"


def test_a_job_that_nobody_says_has_ended_is_not_taken_for_ended(attempt: AttemptDir) -> None:
    with_ring(attempt)
    with pytest.raises(JobNotFound):
        find_target(str(attempt.path.parent.parent), None)

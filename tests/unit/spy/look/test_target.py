"""The folder for the evidence of a look."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bigsci_launch.errors import CollectError
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.spy.look.target import Target

MOMENT = time.mktime((2026, 11, 21, 3, 22, 49, 0, 0, -1))
STAMP = "20261121-032249"


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


def test_a_run_keeps_its_evidence(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "night")
    assert Target("night", {}, run=run).evidence_folder(MOMENT) == run.bundles / STAMP


@pytest.mark.parametrize("value", [None, "", "nowhere"])
def test_without_a_home_there_is_no_place(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is None:
        monkeypatch.delenv("HOME")
    else:
        monkeypatch.setenv("HOME", value)
    with pytest.raises(CollectError, match="neither XDG_STATE_HOME nor HOME is set"):
        Target("1234", {}).evidence_folder(MOMENT)

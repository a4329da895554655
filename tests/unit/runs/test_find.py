"""Which run is meant by a user who names none, or a job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bigsci_launch.errors import RunDirError
from bigsci_launch.runs.attempts import JobRecord, write_job
from bigsci_launch.runs.find import find_run
from bigsci_launch.runs.layout import RunDir

from ..other_users import AS_ROOT, MALLORY


@pytest.mark.parametrize(
    ("argument", "hint"), [("1234", "`bsl spy --jobid 1234`"), ("night", "`bsl list`"), (None, "`bsl spy --jobid ID`")]
)
def test_who_names_no_run_is_told_what_to_type(
    argument: str | None, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunDirError) as caught:
        find_run(argument)
    assert hint in str(caught.value.hint)


@AS_ROOT
def test_the_newest_run_is_one_of_my_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BSL_RUNS", str(tmp_path))
    for name, submitted in (("mine", 100.0), ("theirs", 200.0)):
        run = RunDir(tmp_path / name)
        run.attempt("0001").make()
        run.record.write_text("{}")
        write_job(run.attempt("0001"), JobRecord("slurm", submitted, job_id="1"))
    assert find_run(None).name == "theirs"
    os.chown(tmp_path / "theirs", MALLORY, MALLORY)
    assert find_run(None).name == "mine"

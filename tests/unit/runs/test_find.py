"""The error for a user who names a job instead of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigsci_launch.errors import RunDirError
from bigsci_launch.runs.find import find_run


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

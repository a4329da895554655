"""Records of a run with fields of another type than their writers give them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.errors import RunDirError
from bigsci_launch.runs.attempts import read_exit, read_job
from bigsci_launch.runs.layout import AttemptDir, read_record, write_json
from bigsci_launch.runs.record_types import record_of
from bigsci_launch.spy.look.run_records import read_records


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("rank", value) for value in ("3", 3.0, True, -1, 1 << 40, [])],
        *[("time", value) for value in ("now", -1e11, 1e300, [1])],
        *[("node", value) for value in (3, {"a": 1}, [])],
        *[("step", value) for value in ("3", 1 << 70, 0.5)],
        ("first_failure", "rank 3"),
        ("evidence", "it crashed"),
    ],
)
def test_a_field_of_another_type_is_left_out(name: str, value: Any) -> None:
    assert record_of({name: value, "other": value}) == {"other": value}
    assert record_of({"first_failure": {name: value}, "suspects": [{name: value}]}) == {
        "first_failure": {},
        "suspects": [{}],
    }


def test_records_as_they_are_written_stay_whole() -> None:
    record = {"rank": 3, "node": "n1", "time": 5.5, "code": None, "signal": "SIGKILL", "step": 0, "more": [1, {"a": 2}]}
    assert record_of(record) == record
    assert record_of([record]) == record_of(None) == {}


def test_readers_of_a_run_take_them_for_missing(tmp_path: Path) -> None:
    attempt = AttemptDir(tmp_path / "0001")
    write_json(attempt.exit_file(2), {"rank": {}, "code": 1})
    write_json(attempt.exit_file(3), {"rank": 3, "code": "x", "time": []})
    assert read_record(attempt.exit_file(2)) == {"code": 1}
    assert read_records(attempt)["exits"] == [{"rank": 3}]
    write_json(attempt.exit, {"reason": ["crashed"], "exit_code": 1})
    assert read_exit(attempt) is None
    write_json(attempt.job, {"scheduler": "slurm", "submitted": 1, "job_id": 12, "launcher": None, "total_steps": None})
    with pytest.raises(RunDirError, match="job_id"):
        read_job(attempt)

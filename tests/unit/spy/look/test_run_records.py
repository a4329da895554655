"""What a run recorded about its ranks, read back as evidence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bigsci_launch.runs.layout import AttemptDir, RunDir
from bigsci_launch.spy.look.run_records import (
    LOG_TAIL_BYTES,
    first_abort,
    first_traceback,
    last_heartbeat,
    log_sizes,
    place_of,
    read_printed,
    read_records,
)

STAMP = "2026-11-21T01:02:03.500000Z "
RAISED = [
    "Traceback (most recent call last):",
    '  File "/home/user/train.py", line 88, in read_shard',
    "    return numpy.load(path)",
    '  File "/venv/lib/python3.11/site-packages/numpy/lib.py", line 9, in load',
    "    raise OSError(path)",
    "OSError: [Errno 5] Input/output error: 'shard-7.npy'",
]


def write_log(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{STAMP}{line}\n" for line in lines))
    return path


@pytest.mark.parametrize("prefix", ["", "[rank3]: ", "[default3]:", "[default3]:[rank3]: "])
def test_the_first_traceback_of_a_log_with_its_own_frame_and_time(tmp_path: Path, prefix: str) -> None:
    """This includes lines with the prefixes of torch and torchrun."""
    again = [*RAISED[:-1], "RuntimeError: later"]
    lines = ["iteration 1", *(f"{prefix}{line}" for line in (*RAISED, "", *again))]
    log = write_log(tmp_path / "rank-0003.log", lines)
    found = first_traceback(log, 3)
    assert found is not None
    assert (found["rank"], found["type"], found["place"]) == (3, "OSError", "read_shard (train.py:88)")
    assert found["message"] == "[Errno 5] Input/output error: 'shard-7.npy'"
    assert found["time"] == pytest.approx(1795222923.5)


@pytest.mark.parametrize("lines", [["iteration 1"], RAISED[:3], []])
def test_no_traceback_or_half_of_one_says_nothing(tmp_path: Path, lines: list[str]) -> None:
    assert first_traceback(write_log(tmp_path / "log", lines), 0) is None
    assert first_traceback(tmp_path / "missing", 0) is None


def test_the_words_of_an_abort(tmp_path: Path) -> None:
    words = "[enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 512 vs 256."
    aborted = ["terminate called after throwing an instance of 'gloo::EnforceNotMet'", f"  what():  {words}"]
    found = first_abort(write_log(tmp_path / "rank-0003.log", ["iteration 1", *aborted]), 3)
    assert found is not None
    assert (found["rank"], found["type"], found["message"]) == (3, "gloo::EnforceNotMet", words)
    assert first_abort(write_log(tmp_path / "log", aborted[:1]), 3) is None


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log", [*RAISED, *["x" * 100] * (LOG_TAIL_BYTES // 100)])
    assert first_traceback(log, 0) is None


def test_an_error_without_words_or_with_words_over_many_lines(tmp_path: Path) -> None:
    found = first_traceback(write_log(tmp_path / "log", [*RAISED[:-1], "KeyboardInterrupt"]), 0)
    assert found is not None
    assert (found["type"], found["message"]) == ("KeyboardInterrupt", "")
    assert place_of(RAISED[3:]) == "load (lib.py:9)"
    assert place_of(["nothing"]) == ""


def test_the_last_phase_and_the_first_step_since_the_start(tmp_path: Path) -> None:
    events = [
        {"kind": "heartbeat", "phase": "step", "step": 3, "time": 1.0},
        {"kind": "start", "step": None, "time": 2.0},
        {"kind": "heartbeat", "phase": "init", "step": None, "time": 2.5},
        {"kind": "heartbeat", "phase": "step", "step": 41, "time": 3.0},
        {"kind": "step", "step": 41, "time": 4.0},
        {"kind": "heartbeat", "phase": "save", "step": 42, "time": 5.0},
    ]
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events) + '{"kind": "heartb')
    expected = {"rank": 7, "phase": "save", "step": 42, "time": 5.0, "first_step": 41}
    assert last_heartbeat(path, 7) == expected
    path.write_text(json.dumps(events[3]) + "\n")
    assert last_heartbeat(path, 7) == {**expected, "phase": "step", "step": 41, "time": 3.0, "first_step": None}
    assert last_heartbeat(tmp_path / "missing", 7) is None


def test_all_records_of_an_attempt(tmp_path: Path) -> None:
    attempt: AttemptDir = RunDir(tmp_path / "run").attempt("0001")
    attempt.make()
    for rank in range(2):
        attempt.pid_file(rank).write_text(json.dumps({"rank": rank, "node": "n0", "host": "n0", "pid": 10 + rank}))
    attempt.error_file(1).write_text(
        json.dumps({"rank": 1, "type": "OSError", "message": "no", "time": 9.0, "traceback": "\n".join(RAISED)})
    )
    write_log(attempt.log_file(0), RAISED)
    records = read_records(attempt)
    assert [record["pid"] for record in records["expected"]] == [10, 11]
    assert records["errors"][0]["place"] == "read_shard (train.py:88)"
    assert [record["rank"] for record in records["tracebacks"]] == [0]
    assert records["exits"] == records["heartbeats"] == []
    assert read_records(None) == {}


def test_what_ranks_print_while_they_are_looked_at(tmp_path: Path) -> None:
    attempt = RunDir(tmp_path).attempt("0001")
    attempt.logs.mkdir(parents=True)
    logs = [write_log(attempt.log_file(rank), ["iteration 1/ 9 | lm loss: 5.0 |"]) for rank in range(3)]
    before = log_sizes(attempt)
    assert read_printed(attempt, before) == []
    for log, lines in ((logs[0], ["iteration 2/ 9 | lm loss: 4.0 |", "saved"]), (logs[2], ["x" * 99])):
        with log.open("a") as stream:
            stream.writelines(f"{STAMP}{line}\n" for line in lines)
    assert read_printed(attempt, before) == [
        {"rank": 0, "lines": 2, "last": "saved", "step": 2},
        {"rank": 2, "lines": 1, "last": "x" * 80, "step": None},
    ]
    assert read_printed(None, {}) == []

"""One view of all logs: merged by time, labelled, selected, followed."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.cli.main import bsl
from bigsci_launch.runs import log_reader, logs
from bigsci_launch.runs.logs import LogFilter, MergedLogs, end_detector, parse_ranks, parse_since
from bigsci_launch.topology import compress_ranks
from tests.support.texts import has_parts


def invoke(*words: str) -> Result:
    return CliRunner().invoke(bsl, ["logs", "trial", *words])


def stamped(second: int, text: str) -> str:
    return f"2026-11-21T01:02:{second:02d}.123456Z {text}\n"


@pytest.fixture
def logged(trial: Any) -> Any:
    trial.log(0, stamped(1, "a"), stamped(4, "d"))
    trial.log(5, stamped(2, "b"), stamped(3, "c error"))
    return trial


def test_lines_are_merged_and_say_who_they_are_from(logged: Any) -> None:
    assert invoke().stdout.splitlines() == [
        "11-21 01:02:01.123 [n0 rank 0 dp0 pp0 tp0] a",
        "11-21 01:02:02.123 [n2 rank 5 dp0 pp1 tp1] b",
        "11-21 01:02:03.123 [n2 rank 5 dp0 pp1 tp1] c error",
        "11-21 01:02:04.123 [n0 rank 0 dp0 pp0 tp0] d",
    ]


@pytest.fixture
def in_tokyo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    logs._local_minute.cache_clear()
    yield
    monkeypatch.undo()
    time.tzset()
    logs._local_minute.cache_clear()


@pytest.mark.usefixtures("in_tokyo")
def test_times_are_those_of_the_reader_and_json_has_utc(logged: Any) -> None:
    logged.log(5, "2026-99-99T01:02:02.123456Z not a time\n")
    first, *_, last = invoke().stdout.splitlines()
    assert first.startswith("11-21 10:02:01.123 [") and last.startswith("99-99 01:02:02.123 [")
    assert json.loads(invoke("--json").stdout.splitlines()[0])["time"] == "2026-11-21T01:02:01.123456Z"
    assert invoke("--since", "2026-11-21T10:02:03").stdout.count("[n") == 3
    assert invoke("--since", "2026-11-21T01:02:03Z").stdout.count("[n") == 3


NOW = 1_795_809_600.0
"""2026-11-27T20:00:00Z, which is 05:00 of the next day in Tokyo."""


@pytest.mark.usefixtures("in_tokyo")
@pytest.mark.parametrize(
    ("text", "stamp"),
    [
        ("04:30", "2026-11-27T19:30:00.000000"),
        ("05:30", "2026-11-26T20:30:00.000000"),
        ("2026-11-27", "2026-11-26T15:00:00.000000"),
        ("2026-11-27T14:30:05Z", "2026-11-27T14:30:05.000000"),
        ("10m", "2026-11-27T19:50:00.000000"),
        ("999999999d", "0001-01-01T00:00:00.000000"),
    ],
)
def test_a_time_is_that_of_the_reader_or_an_age(text: str, stamp: str) -> None:
    assert parse_since(text, NOW) == stamp


@pytest.mark.usefixtures("in_tokyo")
def test_a_time_before_all_times_is_a_usage_error(logged: Any) -> None:
    assert invoke("--since", "0001-01-01T00:00+09:00").exit_code == 2


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (("--rank", "0"), ["a", "d"]),
        (("--rank", "1-7"), ["b", "c error"]),
        (("--node", "n2"), ["b", "c error"]),
        (("--node", "n9"), []),
        (("--grep", "^[ad]$"), ["a", "d"]),
        (("--rank", "5", "--grep", "err"), ["c error"]),
    ],
)
def test_selection(logged: Any, words: tuple[str, ...], texts: list[str]) -> None:
    assert [line.partition("] ")[2] for line in invoke(*words).stdout.splitlines()] == texts


@pytest.mark.parametrize(
    "words", [("--grep", "("), ("--rank", "x"), ("--rank", "3-1"), ("--rank", ""), ("--rank", "8")]
)
def test_a_wrong_selection_is_a_usage_error(logged: Any, words: tuple[str, ...]) -> None:
    done = invoke(*words)
    assert done.exit_code == 2 and words[0] in done.stderr


def test_a_log_that_is_there_before_its_pid_record_gets_its_label_later(trial: Any) -> None:
    identity = trial.attempt.pid_file(5)
    kept = identity.read_text()
    identity.unlink()
    merged = MergedLogs(trial.attempt, LogFilter())
    trial.log(5, stamped(1, "early"))
    assert list(merged.lines()) == ["11-21 01:02:01.123 [rank 5] early"]
    identity.write_text(kept)
    trial.log(5, stamped(2, "late"))
    assert list(merged.lines()) == ["11-21 01:02:02.123 [n2 rank 5 dp0 pp1 tp1] late"]


def test_lines_without_a_time_follow_the_line_before_them(trial: Any) -> None:
    trial.log(0, stamped(1, "a"), "torn stamp\n", stamped(5, "e"))
    trial.log(1, stamped(2, "b"))
    texts = [line.partition("] ")[2] for line in invoke().stdout.splitlines()]
    assert texts == ["a", "torn stamp", "b", "e"]


def test_a_clock_that_was_set_back_loses_no_line(trial: Any) -> None:
    trial.log(0, stamped(5, "a"), stamped(1, "b"), stamped(6, "c"))
    trial.log(1, stamped(2, "x"))
    texts = [line.partition("] ")[2] for line in invoke().stdout.splitlines()]
    assert sorted(texts) == ["a", "b", "c", "x"] and texts.index("a") < texts.index("b") < texts.index("c")


def test_of_a_progress_bar_the_last_state_is_shown(trial: Any) -> None:
    trial.log(0, stamped(1, "10%\r50%\r100%"))
    assert invoke().stdout.endswith("] 100%\n")


def test_a_line_that_is_being_written_waits(trial: Any) -> None:
    trial.log(0, stamped(1, "a"), "2026-11-21T01:02:02.123456Z half")
    merged = MergedLogs(trial.attempt, LogFilter())
    assert [line.partition("] ")[2] for line in merged.lines()] == ["a"]
    trial.log(0, " and half\n")
    assert [line.partition("] ")[2] for line in merged.lines()] == ["half and half"]


def test_following_takes_in_ranks_as_they_appear(trial: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "FOLLOW_POLL_S", 0)
    script = iter([lambda: trial.log(0, stamped(1, "a")), lambda: trial.log(1, stamped(2, "b")), lambda: None])
    trial.attempt.job_output.write_text("bsl: start\n")

    def has_ended() -> bool:
        step = next(script, None)
        if step is not None:
            step()
        return step is None

    lines = list(MergedLogs(trial.attempt, LogFilter()).follow(has_ended))
    assert [line.partition("] ")[2] for line in lines] == ["a", "b"]


def test_before_any_rank_has_a_log_the_batch_output_stands_in(trial: Any) -> None:
    trial.attempt.job_output.write_text("srun: error: Unable to create step\n")
    assert invoke().stdout == f"[batch] {trial.attempt.job_output.read_text()}"
    assert invoke("--rank", "0").stdout == ""


def test_a_rank_without_a_record_still_has_its_number(trial: Any) -> None:
    trial.attempt.pid_file(3).unlink()
    trial.log(3, stamped(1, "a"))
    assert "[rank 3] a" in invoke().stdout


def test_bytes_that_are_no_text_are_shown_as_far_as_they_can(trial: Any) -> None:
    trial.attempt.log_file(0).write_bytes(b"2026-11-21T01:02:01.123456Z \xff ok\n")
    assert invoke().stdout.endswith("] \ufffd ok\n")


@given(st.sets(st.integers(0, 400), min_size=1))
def test_ranks_read_back(ranks: set[int]) -> None:
    assert parse_ranks(compress_ranks(ranks)) == ranks


def test_a_pattern_sees_the_text_alone(logged: Any) -> None:
    merged = MergedLogs(logged.attempt, LogFilter(pattern=re.compile("rank")))
    assert list(merged.lines()) == []


def test_logs_are_followed_while_slurm_is_silent(
    fake_slurm: Callable[..., Any], trial: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = fake_slurm("squeue")
    has_ended = end_detector(trial.attempt)
    later = itertools.count(time.monotonic() + 100, 100)
    monkeypatch.setattr(time, "monotonic", lambda: next(later))
    slurm.answer("squeue", stderr="slurm_load_jobs error: Unable to contact slurm controller\n", rc=1)
    assert not has_ended() and not has_ended()
    slurm.answer("squeue", stderr="slurm_load_jobs error: Invalid job id specified\n", rc=1)
    assert has_ended()


def test_the_last_lines_are_those_of_the_whole_log(trial: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is in a block that is read from the end: empty lines, lines without a time, half a line at the end."""
    monkeypatch.setattr(log_reader, "BLOCK_BYTES", 37)
    for rank in range(3):
        for second in range(rank, 40, 3):
            trial.log(rank, stamped(second, f"{rank} {second}"), *(["no time\n", "\n"] if second % 5 == 0 else []))
        trial.log(rank, "2026-11-21T01:02:59.123456Z half")
    whole = invoke().stdout.splitlines()
    assert len(whole) > 40
    for number in (1, 2, 7, 30, len(whole), len(whole) + 5):
        assert invoke("--tail", str(number)).stdout.splitlines() == whole[-number:]
    picked = [line for line in whole if re.search("[05]$", line)]
    assert invoke("--tail", "4", "--grep", "[05]$").stdout.splitlines() == picked[-4:]
    assert invoke("--tail", "2", "--rank", "1").stdout.splitlines() == [line for line in whole if "rank 1" in line][-2:]


def test_the_last_lines_of_a_log_without_times(trial: Any) -> None:
    trial.attempt.job_output.write_text("one\n\ntwo\nthree\nhalf")
    assert invoke("--tail", "3").stdout == "[batch] \n[batch] two\n[batch] three\n"
    trial.attempt.job_output.write_text("".join(f"{number}\n" for number in range(5000)))
    assert invoke("--tail", "2").stdout == "[batch] 4998\n[batch] 4999\n"


def test_following_the_last_lines_shows_only_what_is_new(logged: Any) -> None:
    merged = MergedLogs(logged.attempt, LogFilter())
    assert [line.partition("] ")[2] for line in merged.tail(1)] == ["d"]
    logged.log(5, stamped(5, "new"))
    logged.log(7, stamped(6, "newer"))
    assert [line.partition("] ")[2] for line in merged.lines()] == ["new", "newer"]


@pytest.mark.parametrize("words", [(), ("--tail", "9")])
def test_a_line_that_never_ends_is_cut(trial: Any, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    monkeypatch.setattr(log_reader, "LONGEST_LINE", 64)
    monkeypatch.setattr(log_reader, "BLOCK_BYTES", 32)
    trial.log(0, stamped(1, "a" * 500), stamped(2, "b"))
    texts = [line.partition("] ")[2] for line in invoke(*words).stdout.splitlines()]
    assert texts[-1] == "b" and all(len(text) <= 96 for text in texts)
    assert words or "".join(texts) == "a" * 500 + "b"


def test_a_line_of_gigabytes_is_shown_as_far_as_its_beginning(trial: Any) -> None:
    """A sparse file costs nobody anything."""
    log = trial.attempt.log_file(0)
    trial.log(0, stamped(1, "a"), "2026-11-21T01:02:02.123456Z b")
    with log.open("r+b") as stream:
        stream.truncate(30 << 30)
    merged = MergedLogs(trial.attempt, LogFilter())
    first, cut = merged.lines()
    assert first.endswith("] a") and "\0 [" in cut[-40:] and len(cut) < 70_000
    with log.open("ab") as stream:
        stream.write(b"c\n" + stamped(3, "d").encode())
    assert [line.partition("] ")[2] for line in merged.lines()] == ["d"]
    assert len(invoke().stdout) < 300_000
    with log.open("r+b") as stream:
        stream.truncate(30 << 30)
    assert all(" [" in line[-40:] for line in MergedLogs(trial.attempt, LogFilter()).tail(2))


def test_a_progress_bar_of_megabytes_is_not_cut(trial: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_reader, "LONGEST_LINE", 1000)
    monkeypatch.setattr(log_reader, "LONGEST_SHOWN", 64)
    trial.log(0, stamped(1, "\r".join(f"{number:%}" for number in range(1001))))
    assert invoke().stdout.splitlines()[-1].endswith("100000.000000%")


def test_an_older_attempt_is_shown_by_its_name(trial: Any) -> None:
    trial.log(0, stamped(1, "first"))
    trial.ended("crashed", 3)
    trial.add_attempt("0001.r1")
    trial.log(0, stamped(2, "second"))
    assert "second" in invoke().stdout and "first" in invoke("--attempt", "0001").stdout
    done = invoke("--attempt", "0002")
    assert done.exit_code == 2 and has_parts(done.stderr, "trial", "'0002'", "0001, 0001.r1")
    shown = json.loads(CliRunner().invoke(bsl, ["status", "trial", "--attempt", "0001", "--json"]).stdout)
    assert (shown["attempt"]["name"], shown["exit"]["reason"], shown["exit"]["exit_code"]) == ("0001", "crashed", 3)

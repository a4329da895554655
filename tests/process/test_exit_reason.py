"""Why an attempt ended, found from records like those that ranks leave."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.runs.layout import write_json
from bigsci_launch.runs.watching.ended import EndedBy, write_ended_by
from tests.support.texts import CheckText, has_parts

from .attempt_records import Attempt


def test_all_well(attempt: Attempt, check_text: CheckText) -> None:
    attempt.exits(*range(8))
    attempt.event(*range(8), kind="end", reason="finished")
    found = attempt.describe("--job-id", "42", "--restart-count", "1", code=0)
    assert (found["reason"], found["exit_code"], found["first_failure"]) == ("finished", 0, None)
    assert (found["job_id"], found["restart_count"], found["attempt"], found["started"]) == ("42", 1, "0001", 10.0)
    check_text(attempt.line)


@pytest.mark.parametrize("reason", ["signal", "stop_after_steps"])
def test_a_stop_before_the_last_step(attempt: Attempt, reason: str) -> None:
    attempt.exits(*range(8))
    attempt.event(*range(8), kind="end", reason=reason)
    assert attempt.describe(code=0)["reason"] == "stopped"


def test_a_program_without_events_stopped_when_asked(attempt: Attempt) -> None:
    attempt.exits(*range(8))
    assert attempt.describe("--stop-requested", code=0)["reason"] == "stopped"
    assert attempt.describe(code=0)["reason"] == "finished"


def test_a_killed_rank_comes_before_the_cascade_even_with_clocks_apart(attempt: Attempt) -> None:
    for rank in (0, 1, 2, 3, 4, 6, 7):
        attempt.fails(rank, "[gloo] Connection closed by peer [10.0.0.3]:5123", time=90.0 + rank)
    attempt.exits(5, code=None, signal="SIGKILL", time=99.0)
    found = attempt.describe(code=143)
    assert found["reason"] == "crashed"
    assert found["first_failure"] == {
        "rank": 5,
        "node": "n3",
        "coordinate": {"pp": 1, "tp": 1, "dp": 0},
        "signal": "SIGKILL",
        "code": None,
        "step": None,
        "error": None,
        "last_words": None,
        "time": 99.0,
    }
    assert found["failed_ranks"] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert (found["exit_code"], attempt.code) == (137, "137")
    assert "rank 5 (dp0 pp1 tp1) on n3: SIGKILL" in attempt.line


def test_the_earliest_of_two_exceptions_is_first(attempt: Attempt) -> None:
    attempt.fails(6, "CUDA out of memory", time=95.0, kind="OutOfMemoryError")
    attempt.fails(2, "loss is NaN", time=90.0, kind="FloatingPointError")
    attempt.exits(0, 1, 3, 4, 5, 7, code=None, signal="SIGTERM", terminated=99.0)
    found = attempt.describe(code=143)
    assert found["first_failure"]["rank"] == 2
    assert found["first_failure"]["error"] == "FloatingPointError: loss is NaN"
    assert found["first_failure"]["step"] == 7
    assert found["failed_ranks"] == [2, 6]


def test_bytes_that_are_no_text_do_not_reach_the_report(attempt: Attempt) -> None:
    attempt.dir.log_file(4).write_bytes(b"2026-11-21T01:02:03.5Z caf\xe9 \x00 \x1b[31mred\n")
    attempt.exits(4, code=3)
    assert attempt.describe(code=3)["first_failure"]["error"] == "caf\ufffd ? ?[31mred"


def test_a_program_without_error_records_is_quoted_from_its_log(attempt: Attempt) -> None:
    attempt.dir.log_file(4).write_text(
        "2026-11-21T01:02:03.000001Z Traceback\n2026-11-21T01:02:03.000002Z KeyError: 'x'\n\n"
    )
    attempt.exits(4, code=1)
    attempt.exits(0, 1, 2, 3, 5, 6, 7, code=None, signal="SIGTERM", terminated=99.0)
    found = attempt.describe(code=143)
    assert found["first_failure"]["error"] == "KeyError: 'x'"
    assert (found["exit_code"], attempt.code) == (1, "1")


def test_a_node_that_left_nothing_was_lost(attempt: Attempt) -> None:
    for rank in (0, 1):
        attempt.fails(rank, "Connection reset by peer", time=90.0)
    attempt.exits(2, 3, 6, 7, code=None, signal=None, terminated=91.0, time=91.0)
    attempt.event(4, 5, kind="heartbeat", phase="step")
    found = attempt.describe(code=143)
    assert found["reason"] == "node_failure"
    assert (found["first_failure"]["node"], found["first_failure"]["rank"]) == ("n3", 4)
    assert found["first_failure"]["time"] == 50.0
    assert has_parts(found["first_failure"]["error"], "2 ranks on n3")


def test_slurms_word_on_the_node_counts(attempt: Attempt) -> None:
    attempt.exits(*range(8), code=None, signal="SIGTERM", terminated=91.0)
    found = attempt.describe("--terminated", "91", "--slurm-reason", "NodeDown", code=143)
    assert (found["reason"], found["slurm_reason"]) == ("node_failure", "NodeDown")


def test_a_node_that_slurm_lost_is_named_before_the_end_is_seen(attempt: Attempt) -> None:
    found = attempt.describe("--terminated", "91", "--lost-nodes", "n2\nn9", "--slurm-restarts", "1", code=None)
    assert found["reason"] == "node_failure"
    assert found["first_failure"]["rank"] == 2 and has_parts(found["first_failure"]["error"], "Slurm", "node n2")


def test_a_rank_whose_term_came_before_its_runners_did_not_crash(attempt: Attempt) -> None:
    attempt.exits(*range(7), code=None, signal="SIGTERM", terminated=91.0)
    attempt.exits(7, code=None, signal="SIGTERM", time=90.9)
    assert attempt.describe("--terminated", "91", code=143)["reason"] == "cancelled"
    attempt.fails(3, "loss is NaN", time=90.95)
    assert attempt.describe(code=143)["first_failure"]["rank"] == 3


def test_a_launcher_that_was_killed_blames_no_rank(attempt: Attempt) -> None:
    attempt.exits(*range(8), code=None, signal="SIGTERM", terminated=90.0)
    found = attempt.describe(code=137)
    assert (found["reason"], found["exit_code"], found["first_failure"]) == ("crashed", 137, None)
    assert has_parts(*found["evidence"], 137)


def test_one_killed_runner_is_no_lost_node(attempt: Attempt) -> None:
    attempt.exits(0, 1, 2, 3, 5, 6, 7, code=None, signal="SIGTERM", terminated=91.0)
    found = attempt.describe(code=137)
    assert found["reason"] == "crashed"
    assert (found["first_failure"]["rank"], found["first_failure"]["node"]) == (4, "n3")
    assert "runner was killed" in found["first_failure"]["error"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ((), "cancelled"),
        (("--slurm-reason", "None"), "cancelled"),
        (("--slurm-reason", "TimeLimit"), "time_limit"),
        (("--slurm-restarts", "1"), "requeued"),
    ],
)
def test_termination_from_outside(attempt: Attempt, options: tuple[str, ...], reason: str) -> None:
    attempt.exits(*range(8), code=None, signal="SIGTERM", terminated=91.0)
    found = attempt.describe("--terminated", "91", *options, code=143)
    assert (found["reason"], found["first_failure"]) == (reason, None)
    assert found["slurm_reason"] != "None"


def test_a_crash_during_termination_is_the_terminations(attempt: Attempt) -> None:
    attempt.exits(*range(8), code=1, terminated=91.0, time=92.0)
    assert attempt.describe("--terminated", "91", code=1)["reason"] == "cancelled"


def test_a_provisional_record_has_no_exit_code(attempt: Attempt, check_text: CheckText) -> None:
    found = attempt.describe("--terminated", "91", "--slurm-reason", "TimeLimit", code=None)
    assert (found["reason"], found["exit_code"]) == ("time_limit", None)
    assert attempt.code == ""
    check_text(attempt.line)


def test_an_abort_after_the_end_is_no_failure(attempt: Attempt) -> None:
    attempt.exits(*range(7))
    attempt.exits(7, code=None, signal="SIGABRT", clean_end=True)
    attempt.event(*range(8), kind="end", reason="finished")
    assert attempt.describe(code=0)["reason"] == "finished"


def test_nothing_was_started(attempt: Attempt) -> None:
    for rank in range(8):
        attempt.dir.pid_file(rank).unlink()
    found = attempt.describe(code=1)
    assert (found["reason"], found["first_failure"]) == ("launch_failed", None)
    assert (found["num_started"], found["world_size"]) == (0, 8)


def test_torn_records_are_left_out(attempt: Attempt) -> None:
    attempt.exits(*range(8), code=None, signal="SIGTERM", terminated=91.0)
    attempt.dir.exit_file(3).write_text('{"rank": 3, ')
    attempt.dir.event_file(2).write_bytes(b'{"kind": "end", "rea')
    assert attempt.describe(code=137)["first_failure"]["rank"] == 3


def test_a_signal_keeps_the_last_words(attempt: Attempt) -> None:
    words = "Fatal Python error: Segmentation fault"
    attempt.logs(5, text=f"iteration 3\n{words}\n\nCurrent thread 0x7f (most recent)")
    attempt.exits(5, code=None, signal="SIGSEGV", time=99.0)
    attempt.exits(0, 1, 2, 3, 4, 6, 7, code=None, signal="SIGTERM", terminated=99.1)
    failure = attempt.describe(code=143)["first_failure"]
    assert (failure["signal"], failure["error"]) == ("SIGSEGV", None)
    assert failure["last_words"] == words and has_parts(attempt.line, "n3: SIGSEGV", words)


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (["/var/spool/slurmd/job00006/slurm_script: line 75: module: command not found"], "module: command not found"),
        (
            [
                "0: slurmstepd: error: execve(): python3: No such file or directory",
                "1: slurmstepd: error: execve(): python3: No such file or directory",
                "srun: error: n1: tasks 0-1: Exited with exit code 2",
                "srun: Terminating StepId=6.0",
            ],
            "slurmstepd: error: execve(): python3: No such file or directory",
        ),
        (["loading modules", "2026-11-23T01:00:00Z bsl: rendezvous at n1:10006"], "loading modules"),
        ([], None),
    ],
)
def test_a_failed_launch_quotes_its_cause(attempt: Attempt, lines: list[str], cause: str | None) -> None:
    for rank in range(8):
        attempt.dir.pid_file(rank).unlink()
    attempt.output(*lines)
    found = attempt.describe(code=127)
    assert (found["reason"], found["cause"], attempt.code) == ("launch_failed", cause, "127")
    assert has_parts(attempt.line, "launch_failed", 127, cause or "")


def test_the_output_of_an_earlier_start_of_the_job_is_left_out(tmp_path: Path) -> None:
    first, requeue = Attempt(tmp_path / "0001"), Attempt(tmp_path / "0001.r1")
    first.output("bash: line 1: module: command not found")
    requeue.output("bash: line 1: conda: command not found")
    for attempt, cause in ((first, "module: command not found"), (requeue, "conda: command not found")):
        for rank in range(8):
            attempt.dir.pid_file(rank).unlink()
        assert attempt.describe(code=1)["cause"] == cause


def test_several_nodes_that_left_nothing_are_not_called_lost(attempt: Attempt) -> None:
    attempt.exits(2, 3, code=None, signal="SIGTERM", terminated=91.0)
    found = attempt.describe(code=137)
    assert (found["reason"], found["first_failure"], attempt.code) == ("unknown", None, "137")
    assert has_parts(*found["evidence"], "ranks 0-1,4-7 on n1, n3, n4")
    attempt.fails(2, "loss is NaN", time=80.0)
    assert attempt.describe(code=137)["first_failure"]["rank"] == 2


def test_sruns_words_on_lost_nodes_count(attempt: Attempt) -> None:
    attempt.exits(2, 3, code=None, signal="SIGTERM", terminated=91.0)
    attempt.output("srun: error: Node failure on n[3-4]")
    found = attempt.describe(code=137)
    assert (found["reason"], found["first_failure"]["node"]) == ("node_failure", "n3")


def local(moment: float) -> str:
    return datetime.fromtimestamp(moment).strftime("%Y-%m-%dT%H:%M:%S")


def test_a_preemption_with_grace_time_lets_ranks_end_well(attempt: Attempt) -> None:
    attempt.exits(*range(8), terminated=91.0)
    assert attempt.describe("--preempted", local(90.0), code=0)["reason"] == "preempted"
    attempt.event(*range(8), kind="end", reason="signal")
    assert attempt.describe("--preempted", local(90.0), code=0)["reason"] == "preempted"
    assert attempt.describe("--preempted", "N/A", code=0)["reason"] == "stopped"
    assert attempt.describe(code=0)["reason"] == "stopped"
    attempt.event(*range(8), kind="end", reason="finished")
    assert attempt.describe("--preempted", local(90.0), code=0)["reason"] == "finished"


def test_a_preemption_without_grace_time(attempt: Attempt) -> None:
    attempt.exits(*range(8), code=None, signal="SIGTERM", terminated=91.0)
    options = ("--terminated", "91", "--slurm-restarts", "1")
    assert attempt.describe(*options, "--preempted", local(91.0), code=143)["reason"] == "preempted"
    assert attempt.describe(*options, "--preempted", "N/A", code=143)["reason"] == "requeued"
    attempt.output("slurmstepd: error: *** STEP 6.0 ON n1 CANCELLED AT 2026-11-23T03:06:04 DUE TO PREEMPTION ***")
    assert attempt.describe(*options, code=143)["reason"] == "preempted"


def test_a_preemption_blames_no_rank_and_hides_no_crash(attempt: Attempt) -> None:
    attempt.exits(*range(1, 8), terminated=91.0)
    attempt.exits(0, code=1, terminated=91.0, time=92.0)
    found = attempt.describe("--preempted", local(90.0), code=1)
    assert (found["reason"], found["first_failure"]) == ("preempted", None)
    attempt.fails(0, "loss is NaN", time=80.0)
    assert attempt.describe("--preempted", local(90.0), code=1)["reason"] == "crashed"


def test_the_preemption_of_an_earlier_start_says_nothing(attempt: Attempt) -> None:
    attempt.exits(*range(8), terminated=91.0)
    attempt.event(*range(8), kind="end", reason="signal")
    assert attempt.describe("--preempted", local(1.0), code=0)["reason"] == "stopped"


# ------------------------------------------------------------------------------------------- ended from outside


def ended_by(attempt: Attempt, act: str = "end_ranks", **fields: Any) -> EndedBy:
    why = "no step for 62 s: rank 5 sits in a lock"
    who = "agent" if act == "end_ranks" else "alice"
    given = {"act": act, "who": who, "why": why, "continues": act in ("end_ranks", "restart"), **fields}
    ended = EndedBy(**given)
    write_ended_by(attempt.dir, ended)
    return ended


def test_a_hang_that_a_watcher_ended_is_a_hang(attempt: Attempt) -> None:
    bundle = attempt.dir.path.parent / "bundle"
    suspect: dict[str, Any] = {"rank": 5, "node": "n3", "coordinate": {"dp": 1}, "pid": 1005, "why": "waits for a lock"}
    numbered = {"numbered_by": "pid file"}
    write_json(bundle / "verdict.json", {"verdict": {"suspects": [{**suspect, **numbered}]}})
    watcher = ended_by(attempt, bundle=str(bundle), nodes=("n3",))
    attempt.output("slurmstepd: error: *** STEP 6.0 ON n1 CANCELLED AT 2026-11-23T01:02:00 ***")
    attempt.exits(*range(8), code=None, signal=None, terminated=91.0)
    found = attempt.describe(code=143)
    assert (found["reason"], found["exit_code"], found["evidence"]) == ("hang", 143, [watcher.sentence])
    assert found["suspects"] == [{"rank": 5, "node": "n3", "coordinate": {"dp": 1}}]
    assert (found["first_failure"]["rank"], found["first_failure"]["error"]) == (5, suspect["why"])
    assert found["spy_bundle"] == str(bundle) and str(bundle) in attempt.line
    # Numbers that nobody knows accuse no rank.
    write_json(bundle / "verdict.json", {"verdict": {"suspects": [{**suspect, "numbered_by": "order of start"}]}})
    found = attempt.describe(code=143)
    assert (found["reason"], found["suspects"], found["first_failure"]) == ("hang", [], None)


def test_ranks_that_a_watcher_killed_are_no_lost_node_and_no_crash(attempt: Attempt) -> None:
    ended_by(attempt)
    attempt.exits(*range(4), code=None, signal="SIGKILL")
    attempt.exits(4, 5, code=0, terminated=91.0)
    assert attempt.describe(code=137)["reason"] == "hang"
    attempt.exits(*range(8), code=0, terminated=91.0)
    assert attempt.describe(code=0)["reason"] == "hang", "it had a handler for TERM"
    assert attempt.describe("--lost-nodes", "n2", code=137)["reason"] == "node_failure", "that is Slurm's word"


def test_what_the_ranks_left_goes_before_what_somebody_meant_to_do(attempt: Attempt, check_text: CheckText) -> None:
    attempt.fails(3, "loss is NaN", time=80.0)
    attempt.exits(0, 1, 2, 4, 5, 6, 7, code=None, signal="SIGTERM", terminated=81.0)
    ended_by(attempt)
    found = attempt.describe(code=1)
    assert (found["reason"], found["first_failure"]["rank"]) == ("crashed", 3)
    check_text(*found["evidence"])
    # The same error, after somebody had set out to end the ranks, is a consequence of it.
    attempt.fails(3, "loss is NaN", time=80.0)
    assert attempt.describe(code=1)["reason"] == "hang"


def test_a_hang_that_resolved_itself_is_none(attempt: Attempt) -> None:
    ended_by(attempt)
    attempt.exits(*range(8))
    attempt.event(*range(8), kind="end", reason="finished")
    found = attempt.describe(code=0)
    assert (found["reason"], found["evidence"]) == ("finished", [])
    attempt.event(*range(8), kind="end", reason="signal")
    assert attempt.describe(code=0)["reason"] == "stopped"
    attempt.exits(*range(8), code=None, signal="SIGTERM", terminated=91.0)
    assert attempt.describe("--terminated", "91", "--slurm-reason", "TimeLimit", code=143)["reason"] == "time_limit"
    assert attempt.describe("--preempted", local(90.0), code=143)["reason"] == "preempted"
    assert attempt.describe("--terminated", "91", code=143)["reason"] == "hang"


@pytest.mark.parametrize(
    ("act", "code", "reason", "words"),
    [
        ("exit", 0, "stopped", "to exit"),
        ("restart", 0, "stopped", "restart after step 120"),
        ("exit", 12, "cancelled", "to exit"),
        ("kill", 0, "cancelled", "to kill it"),
        ("kill", 137, "cancelled", "to kill it"),
    ],
)
def test_what_a_person_asked_for(attempt: Attempt, act: str, code: int, reason: str, words: str) -> None:
    ended_by(attempt, act, why="a new revision", step=120 if act == "restart" else None)
    attempt.exits(*range(8), code=code or None, signal="SIGUSR2" if code else None)
    found = attempt.describe(code=code)
    assert (found["reason"], found["exit_code"], found["first_failure"]) == (reason, code, None)
    assert has_parts(*found["evidence"], "alice", words, "a new revision")


def test_a_torn_record_of_who_ended_the_ranks_says_nothing(attempt: Attempt) -> None:
    attempt.exits(*range(8), code=None, signal="SIGTERM", terminated=91.0)
    attempt.dir.ended_by.write_text('{"act": "end_ra')
    assert attempt.describe("--terminated", "91", code=143)["reason"] == "cancelled"


def test_how_long_before_the_limit_ranks_were_told_is_not_by_the_wall_clock(
    attempt: Attempt, check_text: CheckText
) -> None:
    attempt.exits(*range(8), code=None, signal="SIGTERM", terminated=91.0)
    facts = ("--stop-requested", "--terminated", "99999", "--slurm-reason", "TimeLimit")
    found = attempt.describe(*facts, "--warned-before-s", "30", code=143)
    assert found["reason"] == "time_limit"
    check_text(*found["evidence"], *attempt.describe(*facts, code=143)["evidence"])

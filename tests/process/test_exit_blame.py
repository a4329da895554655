"""Who is responsible where every error is about others: ranks that left early, hung at their exit, or did not come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.texts import CheckText, has_parts

from .attempt_records import Attempt

ALL = range(8)
WATCHDOG = (
    "[E1121 01:02:03.1 ProcessGroupNCCL.cpp:616] [PG ID 2 PG GUID 4(DP) Rank 1] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=178, OpType=ALLREDUCE, NumelIn=4, NumelOut=4, Timeout(ms)=600000) ran for 600027 "
    "milliseconds before timing out."
)
ABORTED = "terminate called after throwing an instance of 'c10::DistBackendError'\n" + "frame #0: c10::Error\n" * 99
GLOO = "RuntimeError: [unbound_buffer.cc:78] Timed out waiting 10000ms for recv operation to complete"
STORE = "torch.distributed.DistStoreError: wait timeout after 600000ms, keys: /default_pg/0//cuda//0"
FIRST_LEFT = "srun: First task exited 60s ago"


def others(*ranks: int) -> list[int]:
    return [rank for rank in ALL if rank not in ranks]


def first(found: dict[str, Any]) -> tuple[int, str]:
    return found["first_failure"]["rank"], found["first_failure"]["node"]


# ------------------------------------------------------------------------------------------- left early


def test_a_rank_that_does_not_listen_to_term_did_not_hang_at_its_exit(attempt: Attempt) -> None:
    """srun says that the first left some seconds ago, of ranks that failed too."""
    attempt.logs(*others(5), text=f"{WATCHDOG}\n{ABORTED}")
    attempt.exits(*others(5), code=None, signal="SIGABRT")
    attempt.exits(5, code=None, time=101.0, terminated=101.0)
    running = ("srun: StepId=6.0 task 5: running", "srun: StepId=6.0 tasks 0-4,6-7: exited abnormally")
    attempt.output("srun: First task exited 5s ago", *running)
    found = attempt.describe(code=134)
    assert (found["reason"], first(found)) == ("hang", (5, "n3"))


def test_a_node_that_died_runs_to_srun_while_others_lose_their_connection(attempt: Attempt) -> None:
    for rank in others(4, 5):
        attempt.fails(rank, "Connection closed by peer [10.0.0.3]", time=80.0, lost_peer=True)
    running = ("srun: StepId=6.0 tasks 4-5: running", "srun: StepId=6.0 tasks 0-3,6-7: exited abnormally")
    attempt.output("srun: First task exited 5s ago", *running)
    found = attempt.describe(code=1)
    assert (found["reason"], first(found)) == ("node_failure", (4, "n3"))
    attempt.fails(2, "loss is NaN", time=79.0, kind="ValueError")
    found = attempt.describe(code=1)
    assert (found["reason"], first(found)) == ("crashed", (2, "n2")), "a failure of its own comes first"


@pytest.mark.parametrize("prefix", ["StepId=", "step:"])
def test_srun_says_who_left_early(attempt: Attempt, prefix: str) -> None:
    attempt.exits(3)
    attempt.output(FIRST_LEFT, f"srun: {prefix}6.0 tasks 0-2,4-7: running", f"srun: {prefix}6.0 task 3: exited")
    found = attempt.describe(code=137)
    assert (found["reason"], first(found), found["failed_ranks"]) == ("left_early", (3, "n2"), [3])
    assert has_parts(found["first_failure"]["error"], "exit code 0", "ranks 0-2,4-7", "60 s")
    assert attempt.code == "137"
    assert has_parts(attempt.line, "left_early", "137", "rank 3 (dp1 pp0 tp1) on n2: ")


def test_the_first_of_several_that_left_early(attempt: Attempt) -> None:
    attempt.exits(3, time=80.0)
    attempt.exits(6, time=70.0)
    attempt.output(FIRST_LEFT, "srun: StepId=6.0 tasks 0-2,4-5,7: running", "srun: StepId=6.0 tasks 3,6: exited")
    found = attempt.describe(code=137)
    assert (found["reason"], first(found), found["failed_ranks"]) == ("left_early", (6, "n4"), [3, 6])
    assert has_parts(*found["evidence"], "ranks 3,6", "exit code 0")


def test_srun_says_who_hung_at_its_exit(attempt: Attempt, check_text: CheckText) -> None:
    attempt.exits(*others(5))
    attempt.event(*ALL, kind="end", reason="finished")
    attempt.output(FIRST_LEFT, "srun: StepId=6.0 task 5: running", "srun: StepId=6.0 tasks 0-4,6-7: exited")
    found = attempt.describe(code=137)
    assert (found["reason"], first(found), found["failed_ranks"]) == ("hung_at_exit", (5, "n3"), [5])
    check_text(attempt.line)


def test_all_but_one_may_hang_at_their_exit(attempt: Attempt) -> None:
    attempt.exits(3)
    attempt.event(*ALL, kind="end", reason="finished")
    attempt.output(FIRST_LEFT, "srun: StepId=6.0 tasks 0-2,4-7: running", "srun: StepId=6.0 task 3: exited")
    assert attempt.describe(code=137)["reason"] == "hung_at_exit"


def test_without_events_the_majority_is_taken_to_be_right(attempt: Attempt, check_text: CheckText) -> None:
    attempt.exits(*others(5))
    attempt.output(FIRST_LEFT, "srun: StepId=6.0 task 5: running", "srun: StepId=6.0 tasks 0-4,6-7: exited")
    found = attempt.describe(code=137)
    assert (found["reason"], first(found)) == ("hung_at_exit", (5, "n3"))
    check_text(attempt.line)


def test_with_events_a_majority_without_an_end_left_early(attempt: Attempt) -> None:
    attempt.exits(*others(5))
    attempt.event(*ALL, kind="heartbeat", phase="step")
    attempt.output(FIRST_LEFT, "srun: StepId=6.0 task 5: running", "srun: StepId=6.0 tasks 0-4,6-7: exited")
    assert attempt.describe(code=137)["reason"] == "left_early"


def test_the_local_launcher_says_it_too(attempt: Attempt) -> None:
    attempt.exits(3)
    attempt.exits(*others(3), code=None, signal="SIGTERM", terminated=170.0)
    attempt.output(
        "2026-11-23T01:00:00Z bsl: ranks [0, 1, 2, 4, 5, 6, 7] still run 60 s after the first rank ended: ending them"
    )
    found = attempt.describe(code=1)
    assert (found["reason"], first(found)) == ("left_early", (3, "n2"))


def test_a_rank_that_left_comes_before_those_that_lost_their_connection_to_it(attempt: Attempt) -> None:
    for rank in others(3):
        attempt.fails(rank, "[gloo] Connection reset by peer", time=90.0 + rank / 100)
    attempt.event(*ALL, kind="heartbeat", phase="step")
    attempt.exits(3, time=90.3)  # its interpreter took a moment to end
    found = attempt.describe(code=1)
    assert (found["reason"], first(found), found["failed_ranks"]) == ("left_early", (3, "n2"), list(ALL))
    assert has_parts(found["first_failure"]["error"], "ranks 0-2,4-7")
    assert (found["first_failure"]["code"], attempt.code) == (0, "1")


def test_a_rank_whose_training_had_ended_did_not_leave_early(attempt: Attempt) -> None:
    for rank in others(3):
        attempt.fails(rank, "[gloo] Connection reset by peer", time=90.0 + rank)
    attempt.exits(3, time=80.0)
    attempt.event(3, kind="end", reason="finished")
    found = attempt.describe(code=1)
    assert (found["reason"], found["first_failure"]) == ("crashed", None)


def test_nobody_is_named_if_all_only_lost_a_connection(attempt: Attempt) -> None:
    for rank in others(3):
        attempt.fails(rank, "[gloo] Connection reset by peer", time=90.0 + rank)
    attempt.exits(3, signal="SIGTERM", time=99.0, terminated=98.9)
    found = attempt.describe(code=1)
    assert (found["reason"], found["first_failure"], attempt.code) == ("crashed", None, "1")
    assert has_parts(*found["evidence"], "ranks 0-2,4-7")


def test_a_rank_that_takes_long_to_die_is_found_by_its_error(attempt: Attempt) -> None:
    for rank in others(3):
        attempt.fails(rank, "[gloo] Connection reset by peer", time=90.0 + rank / 10)
    attempt.exits(3, signal="SIGTERM", time=99.0, terminated=98.9)
    attempt.logs(3, text="iteration 3\nTraceback (most recent call last):\nMemoryError: CUDA out of memory", time=89.0)
    found = attempt.describe(code=1)
    assert (found["reason"], first(found)) == ("crashed", (3, "n2"))
    assert found["first_failure"]["error"] == "MemoryError: CUDA out of memory"


@pytest.mark.parametrize(
    "text",
    [
        "Traceback (most recent call last):\nMemoryError: caught, tried again\niteration 4",
        "Traceback (most recent call last):\nRuntimeError: Connection closed by peer",
        "Error: the dashboard does not answer",
    ],
    ids=["it printed on", "about others", "no traceback"],
)
def test_an_error_that_was_survived_blames_nobody(attempt: Attempt, text: str) -> None:
    for rank in others(3):
        attempt.fails(rank, "[gloo] Connection reset by peer", time=90.0)
    attempt.exits(3, signal="SIGTERM", time=99.0, terminated=98.9)
    attempt.logs(3, text=text, time=89.0)
    assert attempt.describe(code=1)["first_failure"] is None


def test_an_error_after_the_others_had_failed_is_not_their_cause(attempt: Attempt) -> None:
    for rank in others(3):
        attempt.fails(rank, "[gloo] Connection reset by peer", time=90.0)
    attempt.exits(3, signal="SIGTERM", time=99.0, terminated=98.9)
    attempt.logs(3, text="Traceback (most recent call last):\nKeyError: late", time=95.0)
    assert attempt.describe(code=1)["first_failure"] is None


CANCELLED = "0: slurmstepd-n1: error: *** STEP 9.0 ON n1 CANCELLED AT 2026-11-23T04:53:27 ***"


def test_a_step_that_somebody_cancelled_has_not_crashed(attempt: Attempt) -> None:
    attempt.exits(*ALL, signal="SIGTERM", time=99.0, terminated=98.9)
    attempt.output(CANCELLED, "srun: error: n1: tasks 0-1: Killed")
    found = attempt.describe(code=137)
    assert (found["reason"], found["first_failure"]) == ("cancelled", None)


def test_a_step_that_srun_ended_after_a_rank_was_not_cancelled_by_anybody(attempt: Attempt) -> None:
    attempt.exits(*ALL, signal="SIGTERM", time=99.0, terminated=98.9)
    attempt.output("srun: error: n1: task 0: Killed", "srun: Terminating StepId=9.0", CANCELLED)
    assert attempt.describe(code=137)["reason"] == "crashed"


def test_a_failure_of_its_own_comes_before_one_that_left(attempt: Attempt) -> None:
    attempt.exits(3, time=80.0)
    attempt.fails(6, "loss is NaN", time=85.0)
    for rank in others(3, 6):
        attempt.fails(rank, "[gloo] Connection reset by peer", time=90.0)
    assert first(attempt.describe(code=1)) == (6, "n4")


# ------------------------------------------------------------------------------------------- hang


def nccl_hang(attempt: Attempt, aborted: list[int], complained: list[int], hung: list[int]) -> None:
    attempt.logs(*aborted, *complained, text=f"{WATCHDOG}\n{ABORTED}")
    attempt.exits(*aborted, code=None, signal="SIGABRT", time=90.0)
    attempt.exits(*complained, *hung, code=None, signal="SIGTERM", terminated=91.0)


def test_who_did_not_come_to_a_collective_is_the_suspect(attempt: Attempt) -> None:
    nccl_hang(attempt, [0, 3, 6, 7], [1, 2, 4], [5])
    attempt.logs(5, text="loading the next batch")
    found = attempt.describe(code=143)
    assert (found["reason"], first(found)) == ("hang", (5, "n3"))
    assert [suspect["rank"] for suspect in found["suspects"]] == [5]
    assert (found["failed_ranks"], attempt.code) == ([0, 3, 6, 7], "134")
    assert found["collectives"] == [
        {
            "backend": "nccl",
            "group": "PG ID 2 PG GUID 4(DP)",
            "operation": "ALLREDUCE",
            "sequence": 178,
            "timeout_ms": 600000,
            "ranks": [0, 1, 2, 3, 4, 6, 7],
        }
    ]
    assert has_parts(attempt.line, "ALLREDUCE, SeqNum=178", "PG ID 2 PG GUID 4(DP)", "ranks 0-4,6-7")


def test_who_hung_is_unknown_if_few_complained(attempt: Attempt) -> None:
    nccl_hang(attempt, [0, 3], [], [1, 2, 4, 5, 6, 7])
    found = attempt.describe(code=143)
    assert (found["reason"], found["first_failure"], found["suspects"]) == ("hang", None, [])
    assert has_parts(attempt.line, "ranks 1-2,4-7")


def test_who_hung_is_unknown_if_few_complained_on_the_only_node(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path / "0001", ranks_per_node=8)
    nccl_hang(attempt, [0, 3], [], [1, 2, 4, 5, 6, 7])
    assert attempt.describe(code=143)["suspects"] == []


def test_who_hung_is_unknown_if_those_that_did_not_complain_are_on_several_nodes(attempt: Attempt) -> None:
    nccl_hang(attempt, [0, 3, 6, 7], [1, 4], [2, 5])
    assert attempt.describe(code=143)["first_failure"] is None


def test_a_whole_node_may_hang(attempt: Attempt) -> None:
    nccl_hang(attempt, [0, 3, 6, 7], [1, 2], [4, 5])
    found = attempt.describe(code=143)
    assert first(found) == (4, "n3")
    assert [suspect["rank"] for suspect in found["suspects"]] == [4, 5]


def test_all_complained(attempt: Attempt) -> None:
    nccl_hang(attempt, [0, 3, 6, 7], [1, 2, 4, 5], [])
    found = attempt.describe(code=143)
    assert (found["reason"], found["first_failure"]) == ("hang", None)
    assert "all ranks reported a timeout" in attempt.line


def test_what_a_rank_says_after_it_was_told_to_end_clears_nobody(attempt: Attempt) -> None:
    nccl_hang(attempt, [0, 3, 6, 7], [1, 2, 4], [5])
    attempt.logs(5, text="RuntimeError: Connection reset by peer", time=92.0)
    assert first(attempt.describe(code=143)) == (5, "n3")


def test_a_rank_that_others_told_about_the_time_out_did_not_complain_itself(attempt: Attempt) -> None:
    nccl_hang(attempt, [0, 3, 6, 7], [1, 2, 4], [])
    attempt.logs(5, text="[PG 0 Rank 5] Received a dump signal due to a collective timeout from rank 0 and we will try")
    attempt.exits(5, code=None, signal="SIGABRT", time=90.5)
    found = attempt.describe(code=134)
    assert (found["reason"], first(found)) == ("hang", (5, "n3"))


def test_gloo_times_out_in_one_rank_and_the_others_lose_their_connection(attempt: Attempt) -> None:
    attempt.fails(0, GLOO.partition(": ")[2], time=89.0)
    for rank in others(0, 5):
        attempt.fails(rank, "[pair.cc:553] Connection closed by peer [10.0.0.1]:5123", time=90.0)
    attempt.exits(5, code=None, signal="SIGTERM", terminated=91.0)
    found = attempt.describe(code=143)
    assert (found["reason"], first(found), attempt.code) == ("hang", (5, "n3"), "1")
    assert [(each["backend"], each["operation"], each["ranks"]) for each in found["collectives"]] == [
        ("gloo", "recv", [0])
    ]


@pytest.mark.parametrize(("said", "operation"), [(GLOO, "recv"), (STORE, "wait for a key of the store")])
def test_ranks_time_out_in_programs_without_error_records(said: str, operation: str, attempt: Attempt) -> None:
    attempt.logs(*others(5), text=f"Traceback (most recent call last):\n{said}")
    attempt.exits(*others(5), code=1, time=90.0)
    attempt.exits(5, code=None, signal="SIGTERM", terminated=91.0)
    found = attempt.describe(code=143)
    assert (found["reason"], first(found)) == ("hang", (5, "n3"))
    assert {each["operation"] for each in found["collectives"]} == {operation}


def test_a_rank_with_a_failure_of_its_own_comes_before_a_time_out(attempt: Attempt) -> None:
    nccl_hang(attempt, [0, 3, 6, 7], [1, 2, 4], [])
    attempt.exits(5, code=None, signal="SIGKILL", time=95.0)
    found = attempt.describe(code=143)
    assert (found["reason"], first(found), attempt.code) == ("crashed", (5, "n3"), "137")


def test_a_rank_that_left_comes_before_a_time_out(attempt: Attempt) -> None:
    nccl_hang(attempt, [0, 3, 6, 7], [1, 2, 4], [])
    attempt.exits(5, time=60.0)
    assert attempt.describe(code=143)["reason"] == "left_early"


def test_stacks_of_the_hang_are_linked(attempt: Attempt) -> None:
    nccl_hang(attempt, [0, 3, 6, 7], [1, 2, 4], [5])
    bundle = attempt.dir.path.parents[1] / "spy" / "2026-11-23"
    bundle.mkdir(parents=True)
    assert attempt.describe(code=143)["spy_bundle"] == str(bundle)
    assert has_parts(attempt.line, bundle)


# ------------------------------------------------------------------------------------------- clocks


def two_failures(attempt: Attempt, *, ahead_s: float, start_late_s: float = 0.0) -> None:
    """Rank 2 fails first; rank 4 on n3 fails 5 s later, by a clock that is ahead by `ahead_s`."""
    attempt.starts(4, 5, time=10.0 + ahead_s + start_late_s)
    attempt.fails(2, "loss is NaN", time=85.0)
    attempt.fails(4, "out of memory", time=90.0 + ahead_s)
    attempt.exits(0, 1, 3, 6, 7, code=None, signal="SIGTERM", terminated=91.0)
    attempt.exits(5, code=None, signal="SIGTERM", terminated=91.0 + ahead_s, time=92.0 + ahead_s)


@pytest.mark.parametrize("ahead_s", [-20.0, 20.0])
def test_clocks_that_differ_do_not_change_who_was_first(attempt: Attempt, ahead_s: float) -> None:
    two_failures(attempt, ahead_s=ahead_s)
    found = attempt.describe(code=1)
    assert found["first_failure"]["rank"] == 2
    assert found["clocks"] == [{"node": "n3", "ahead_s": ahead_s, "corrected": True}]
    assert has_parts(attempt.line, f"n3 {ahead_s:+.1f} s")


def test_a_clock_that_was_set_back_while_ranks_ran_does_not_change_who_was_first(attempt: Attempt) -> None:
    """Rank 2 fails at second 61; rank 4 on n3 fails 3 s later, after its clock was set back by 60 s."""
    attempt.fails(2, "the first", time=61.0)
    attempt.exits(*others(2, 4, 5), signal="SIGTERM", time=66.0, terminated=65.5)
    attempt.fails(4, "later", time=4.0)
    attempt.exits(5, signal="SIGTERM", time=6.0, terminated=5.5)
    found = attempt.describe(code=1)
    assert first(found) == (2, "n2")
    assert found["clocks"] == [{"node": "n3", "ahead_s": -60.0, "corrected": True}]


def test_a_node_that_starts_late_has_no_other_clock(attempt: Attempt) -> None:
    two_failures(attempt, ahead_s=0.0, start_late_s=30.0)
    found = attempt.describe(code=1)
    assert (found["first_failure"]["rank"], found["clocks"]) == (2, [])


def test_a_difference_that_only_the_start_shows_is_said_and_not_corrected(
    attempt: Attempt, check_text: CheckText
) -> None:
    two_failures(attempt, ahead_s=20.0)
    attempt.fails(5, "out of memory", time=111.0)
    found = attempt.describe(code=1)
    assert found["clocks"] == [{"node": "n3", "ahead_s": 20.0, "corrected": False}]
    in_any_order = attempt.line
    attempt.fails(4, "out of memory", time=100.0)
    assert attempt.describe(code=1)["first_failure"]["rank"] == 2
    check_text(in_any_order, attempt.line)


def test_a_rank_that_started_before_its_script_has_a_clock_that_is_behind(attempt: Attempt) -> None:
    two_failures(attempt, ahead_s=-20.0)
    attempt.fails(5, "out of memory", time=71.0)
    found = attempt.describe(code=1)
    assert found["clocks"] == [{"node": "n3", "ahead_s": -20.0, "corrected": True}]
    assert found["first_failure"]["rank"] == 2
    assert found["first_failure"]["time"] == 85.0


def test_clocks_that_agree_are_not_mentioned(attempt: Attempt) -> None:
    two_failures(attempt, ahead_s=1.5)
    assert (attempt.describe(code=1)["clocks"], attempt.line.count("\n")) == ([], 1)


# ------------------------------------------------------------------------------------------- stopped by a guard

APART = "step 7: data-parallel copies: weight on rank 4: differs from the copy on rank 0"


@pytest.mark.parametrize("earliest", [1, 4])
def test_the_rank_that_a_guard_accuses_failed_first(attempt: Attempt, earliest: int) -> None:
    attempt.is_stopped_by_a_guard(APART, accused=[4], suspects=[4], first=earliest)
    found = attempt.describe(code=1)
    assert (found["reason"], *first(found)) == ("crashed", 4, "n3")
    assert (found["first_failure"]["step"], found["first_failure"]["code"]) == (7, 1)
    assert found["first_failure"]["error"].endswith(APART)
    assert (found["failed_ranks"], found["suspects"], attempt.code) == ([*ALL], [], "1")


def test_an_accused_rank_that_was_killed_before_its_record_failed_first(attempt: Attempt) -> None:
    attempt.is_stopped_by_a_guard(APART, accused=[4], suspects=[4])
    attempt.dir.error_file(4).unlink()
    attempt.exits(4, code=None, signal="SIGTERM", terminated=51.0, time=51.1)
    found = attempt.describe(code=1)
    assert first(found) == (4, "n3")
    assert found["first_failure"]["error"].endswith(APART)


def test_a_guard_that_accuses_none_leaves_the_first_failure_unknown(attempt: Attempt) -> None:
    attempt.is_stopped_by_a_guard("step 7: data-parallel copies: weight on ranks 0,4", accused=[], suspects=[0, 4])
    found = attempt.describe(code=1)
    assert (found["reason"], found["first_failure"], attempt.code) == ("crashed", None, "1")
    assert [each["rank"] for each in found["suspects"]] == [0, 4]
    assert "data-parallel copies" in found["cause"]
    assert "accuses none" in found["evidence"][0]


def test_ranks_that_a_guard_accuses_alike_are_all_named(attempt: Attempt) -> None:
    attempt.is_stopped_by_a_guard("step 7: learning rate: group on ranks 2,6", accused=[2, 6], suspects=[2, 6])
    found = attempt.describe(code=1)
    assert first(found) == (2, "n2")
    assert [each["rank"] for each in found["suspects"]] == [2, 6]


def test_what_failed_before_a_guard_spoke_is_the_first_failure(attempt: Attempt) -> None:
    attempt.is_stopped_by_a_guard(APART, accused=[4], suspects=[4])
    attempt.fails(3, "a tensor of the wrong shape", time=40.0)
    assert first(attempt.describe(code=1)) == (3, "n2")

"""Words of other programs in the logs of ranks and in job.out, and what they make of the end of an attempt."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from bigsci_launch.file_names import launcher_name
from bigsci_launch.runs.layout import read_json, write_json
from tests.support.texts import has_parts

from .attempt_records import Attempt

ALL = range(8)
STUCK = (
    "[rank{0}]:[E704 13:48:58.2 ProcessGroupNCCL.cpp:1746] [PG ID 0 PG GUID 0(default_pg) Rank {0}] ProcessGroupNCCL's "
    "watchdog got stuck for 480 seconds without making progress in monitoring enqueued collectives.\n"
    "[rank{0}]:[F704 13:56:58.2 ProcessGroupNCCL.cpp:1557] [PG ID 0 PG GUID 0(default_pg) Rank {0}] Terminating the "
    "process after attempting to dump debug info, due to ProcessGroupNCCL watchdog hang."
)
STORE = (
    "RuntimeError: Timed out initializing process group in store based barrier on rank: {0}, for key: "
    "store_based_barrier_key:1 (world_size=8, worker_count=7, timeout=0:30:00)"
)
TABLE = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
=======================================================
train.py FAILED
-------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2024-07-26_10:59:45
  host      : n1
  rank      : 10 (local_rank: 2)
  exitcode  : -6 (pid: 214033)
  error_file: <N/A>
  traceback : Signal 6 (SIGABRT) received by PID 214033
======================================================="""
WORKER = """\
Traceback (most recent call last):
  File "dataloader.py", line 1131, in _try_get_data
RuntimeError: DataLoader worker (pid 2345) is killed by signal: Killed.

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "train.py", line 88, in <module>
RuntimeError: DataLoader worker (pid(s) 2345) exited unexpectedly"""


def test_the_fastest_to_abort_is_no_culprit_if_all_watchdogs_were_stuck(attempt: Attempt) -> None:
    for rank in ALL:
        attempt.logs(rank, text=STUCK.format(rank))
        attempt.exits(rank, code=None, signal="SIGABRT", time=100.0 - rank)
    found = attempt.describe(code=134)
    assert (found["reason"], found["first_failure"], found["suspects"]) == ("hang", None, [])


def test_a_monitored_barrier_names_who_did_not_come(attempt: Attempt) -> None:
    text = "RuntimeError: [Rank 0]: Rank 5 failed to pass monitoredBarrier in 300000 ms\n Original exception:\n"
    attempt.logs(0, text=f"{text}[unbound_buffer.cc:81] Timed out waiting 300000ms for recv operation to complete")
    attempt.exits(0, code=1)
    attempt.exits(*ALL[1:], code=None, signal="SIGTERM", time=101.0, terminated=100.5)
    found = attempt.describe(code=1)
    assert (found["reason"], found["first_failure"]["rank"], found["failed_ranks"]) == ("hang", 5, [0])
    assert has_parts(found["first_failure"]["error"], "monitored barrier", "rank 0")


def test_who_did_not_come_to_the_store_hung_at_the_rendezvous(attempt: Attempt) -> None:
    for rank in ALL[:7]:
        attempt.logs(rank, text=STORE.format(rank))
        attempt.exits(rank, code=1)
    attempt.exits(7, code=None, signal="SIGTERM", time=101.0, terminated=100.5)
    found = attempt.describe(code=1)
    assert (found["reason"], found["first_failure"]["rank"]) == ("hang", 7)
    assert found["collectives"][0]["backend"] == "store"
    assert has_parts(found["first_failure"]["error"], "rendezvous", "ranks 0-6")


def test_the_table_of_torchrun_is_the_reason_and_its_rules_are_not(attempt: Attempt) -> None:
    attempt.logs(1, text=TABLE)
    attempt.exits(1, code=1)
    attempt.exits(0, *ALL[2:], code=None, signal="SIGTERM", time=101.0, terminated=100.5)
    found = attempt.describe(code=1)
    assert (found["reason"], found["first_failure"]["rank"]) == ("crashed", 1)
    assert has_parts(found["first_failure"]["error"], "torchrun", "rank 10 (local rank 2) on n1", "SIGABRT")


def test_the_first_exception_of_a_chain_is_the_reason(attempt: Attempt) -> None:
    attempt.logs(2, text=WORKER)
    attempt.logs(0, text="[rank0]: torch.distributed.DistBackendError: store->get got error: Connection reset by peer")
    attempt.exits(2, code=1, time=100.0)
    attempt.exits(0, code=1, time=99.0)
    attempt.exits(1, *ALL[3:], code=None, signal="SIGTERM", time=101.0, terminated=100.5)
    found = attempt.describe(code=1)
    assert (found["reason"], found["first_failure"]["rank"]) == ("crashed", 2)
    assert has_parts(found["first_failure"]["error"], "signal: Killed", "most likely", "memory")


def test_a_rank_whose_device_failed_is_no_victim_although_nccl_took_it_down(attempt: Attempt) -> None:
    error = (
        "[Rank 4] NCCL watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered"
    )
    attempt.logs(4, text=f"{error}\n[Rank 4] To avoid data inconsistency, we are taking the entire process down.")
    attempt.exits(4, code=None, signal="SIGABRT", time=99.0)
    attempt.logs(0, text="RuntimeError: NCCL communicator was aborted on rank 0.")
    attempt.exits(0, code=1, time=98.0)
    attempt.exits(1, 2, 3, 5, 6, 7, code=None, signal="SIGTERM", time=101.0, terminated=100.5)
    found = attempt.describe(code=134)
    assert (found["reason"], found["first_failure"]["rank"]) == ("crashed", 4)


def test_a_rule_is_never_a_reason(attempt: Attempt) -> None:
    attempt.logs(3, text="cannot read the corpus\n=========\n---")
    attempt.exits(3, code=2)
    assert attempt.describe(code=2)["first_failure"]["error"] == "cannot read the corpus"


OOM = ("slurmstepd: error: Detected 3 oom_kill events in StepId=44.0.", "srun: error: n1: tasks 1-3: Out Of Memory")


def killed(attempt: Attempt) -> None:
    attempt.exits(1, 2, 3, code=None, signal="SIGKILL", time=99.0)
    attempt.exits(0, *ALL[4:], code=None, signal="SIGTERM", time=101.0, terminated=100.5)


def test_slurm_proves_that_memory_ran_out(attempt: Attempt) -> None:
    killed(attempt)
    assert attempt.describe(code=137)["reason"] == "crashed"
    attempt.output(*OOM)
    found = attempt.describe(code=137)
    assert (found["reason"], found["first_failure"], found["failed_ranks"]) == ("out_of_memory", None, [1, 2, 3])
    assert has_parts(found["cause"], "tasks 1-3 on n1")
    assert (found["exit_code"], attempt.code) == (137, "137")


def test_one_task_without_memory_is_the_first_failure(attempt: Attempt) -> None:
    attempt.exits(5, code=None, signal="SIGKILL", time=99.0)
    attempt.output("srun: error: n3: task 5: Out Of Memory")
    found = attempt.describe(code=137)
    assert (found["reason"], found["first_failure"]["rank"]) == ("out_of_memory", 5)


def test_an_error_before_a_kill_is_the_first_failure(attempt: Attempt) -> None:
    killed(attempt)
    attempt.fails(6, "loss is NaN", time=50.0, kind="ValueError")
    attempt.output(*OOM)
    found = attempt.describe(code=1)
    assert (found["reason"], found["first_failure"]["rank"]) == ("crashed", 6)


CANCELLED = "slurmstepd: error: *** JOB 608 ON n1 CANCELLED AT 2022-08-12T02:06:12 DUE TO {} ***"


@pytest.mark.parametrize(("words", "reason"), [("JOB REQUEUE", "requeued"), ("PREEMPTION", "preempted")])
def test_slurms_words_count_where_squeue_was_not_asked(attempt: Attempt, words: str, reason: str) -> None:
    attempt.exits(0, 1, code=None, signal="SIGTERM", time=99.0)
    attempt.exits(2, 3, code=1, time=100.0)
    attempt.output(CANCELLED.format(words))
    found = attempt.describe(code=1)
    assert (found["reason"], found["first_failure"]) == (reason, None)


def test_failures_after_the_time_limit_follow_from_it(attempt: Attempt) -> None:
    attempt.exits(*ALL, code=1, time=datetime(2022, 8, 12, 2, 6, 13).timestamp())
    attempt.output(CANCELLED.format("TIME LIMIT"))
    found = attempt.describe(code=1)
    assert (found["reason"], found["first_failure"]) == ("time_limit", None)
    attempt.exits(3, code=1, time=datetime(2022, 8, 12, 1, 0, 0).timestamp())
    found = attempt.describe(code=1)
    assert (found["reason"], found["first_failure"]["rank"]) == ("crashed", 3)


UNKILLABLE = (
    "slurmstepd: error: *** JOB 608 STEPD TERMINATED ON n9 AT 2022-08-12T02:09:12 DUE TO JOB NOT "
    "ENDING WITH SIGNALS ***"
)


def test_processes_that_no_signal_ends_are_named_by_their_node(attempt: Attempt) -> None:
    attempt.exits(*ALL, code=None, signal="SIGTERM", time=99.0)
    attempt.output(UNKILLABLE)
    found = attempt.describe(code=1)
    assert (found["reason"], found["first_failure"]["node"]) == ("node_failure", "n9")
    attempt.output(CANCELLED.format("TIME LIMIT"), UNKILLABLE)
    found = attempt.describe(code=1)
    assert found["reason"] == "time_limit"
    assert has_parts(found["evidence"][0], "n9", "SIGKILL")


def told(attempt: Attempt, words: str) -> dict[str, Any]:
    attempt.exits(*ALL, code=None, signal="SIGTERM", time=101.0, terminated=100.0)
    attempt.output(CANCELLED.format(words))
    found: dict[str, Any] = attempt.describe("--terminated", "100.0", code=143)
    return found


@pytest.mark.parametrize(("words", "reason"), [("TIME LIMIT", "time_limit"), ("JOB REQUEUE", "requeued")])
def test_slurms_words_say_why_the_script_was_told_to_end(attempt: Attempt, words: str, reason: str) -> None:
    assert told(attempt, words)["reason"] == reason


def test_a_lost_node_without_a_rank_of_the_record_is_named(attempt: Attempt) -> None:
    attempt.exits(*ALL, code=None, signal="SIGTERM", time=99.0)
    attempt.output("srun: error: Node failure on n9", CANCELLED.format("NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS"))
    found = attempt.describe(code=1)
    assert (found["reason"], found["first_failure"]["node"], found["first_failure"]["rank"]) == (
        "node_failure",
        "n9",
        None,
    )


def launch(attempt: Attempt, ranks_per_task: int) -> None:
    """Have launchers start the ranks of the attempt."""
    for rank in ALL:
        record = read_json(attempt.dir.pid_file(rank))
        write_json(attempt.dir.pid_file(rank), {**record, "launcher": rank // ranks_per_task})
    for number in range(8 // ranks_per_task):
        write_json(attempt.dir.pids / f"{launcher_name(number)}.json", {"launcher": number, "node": f"n{number + 1}"})


def test_a_task_of_srun_is_the_ranks_that_its_launcher_has_started(attempt: Attempt) -> None:
    launch(attempt, 2)
    attempt.exits(*ALL, code=None, signal="SIGTERM", terminated=60.0)
    attempt.exits(5, code=None, signal="SIGKILL", time=50.0)
    attempt.output(
        "slurmstepd: error: Detected 1 oom_kill event in StepId=44.0.", "srun: error: n3: task 2: Out Of Memory"
    )
    found = attempt.describe(code=137)
    assert (found["reason"], found["first_failure"]["rank"], found["exit_code"]) == ("out_of_memory", 5, 137)


def test_ranks_of_a_launcher_that_were_killed_at_once(attempt: Attempt) -> None:
    launch(attempt, 4)
    attempt.exits(*range(4), code=None, signal="SIGTERM", terminated=60.0)
    attempt.output(
        "slurmstepd: error: Detected 4 oom_kill events in StepId=44.0.", "srun: error: n2: task 1: Out Of Memory"
    )
    found = attempt.describe(code=137)
    assert (found["reason"], found["first_failure"]) == ("out_of_memory", None)
    assert has_parts(" ".join(found["evidence"]), "ranks 4-7")

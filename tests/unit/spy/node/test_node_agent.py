"""The agent's pure parts: parsing text of /proc and Slurm, and finding the ranks."""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Process = dict[str, Any]


def process(ppid: int, *, start: int = 1, exe: str = "/usr/bin/python3.11", comm: str = "", **env: str) -> Process:
    return {"ppid": ppid, "start_ticks": start, "exe": exe, "comm": comm or exe.rpartition("/")[2], "env": env}


BASH = "/usr/bin/bash"


def test_stat_of_a_process_with_a_hostile_name(agent: ModuleType) -> None:
    text = "12 (a) R (b) S 7 12 12 0 -1 0 0 0 0 0 150 50 0 0 20 0 3 0 4242 0 0"
    found = agent.node_processes.parse_stat(text)
    assert (found["comm"], found["state"], found["ppid"]) == ("a) R (b", "S", 7)
    assert (found["cpu_ticks"], found["threads"], found["start_ticks"]) == (200, 3, 4242)


def test_status_tells_of_a_pending_kill(agent: ModuleType) -> None:
    text = "Name:\tx\nTracerPid:\t5\nSigPnd:\t0000000000000000\nShdPnd:\t0000000000000100\nCoreDumping:\t1\n"
    found = agent.node_processes.parse_status(text + "voluntary_ctxt_switches:\t3\nnonvoluntary_ctxt_switches:\t4\n")
    assert found == {
        "voluntary": 3, "involuntary": 4, "tracer_pid": 5, "core_dumping": True, "kill_pending": True,
    }  # fmt: skip


def test_rows_of_listpids(agent: ModuleType) -> None:
    text = """PID      JOBID    STEPID   LOCALID GLOBALID
34       1        0        0       0
35       1        0        1       1
37       1        0        -       -
17       1        batch    0       0
-1       1        extern   0       0
"""
    assert agent.node_scheduler.parse_listpids(text) == [
        (34, "0", 0), (35, "0", 1), (37, "0", None), (17, "batch", 0),
    ]  # fmt: skip


V2 = "0::/system.slice/slurmstepd.scope/{job}/step_2/user/task_0"
V1 = "5:memory:/slurm/uid_1000/{job}/step_2/task_0\n4:name=systemd:/system.slice/slurmd.service"


@pytest.mark.parametrize(("job", "is_own"), [("job_7", False), ("job_7", True), ("s8D4KRTAVGW00", True)])
def test_the_folder_of_a_job_holds_its_steps_whatever_its_name(agent: ModuleType, job: str, is_own: bool) -> None:
    folders = agent.node_scheduler.job_folders
    assert folders(V2.format(job=job), "7", is_own=is_own) == [f"/sys/fs/cgroup/system.slice/slurmstepd.scope/{job}"]
    assert folders(V1.format(job=job), "7", is_own=is_own) == [f"/sys/fs/cgroup/memory/slurm/uid_1000/{job}"]


def test_the_folder_of_another_job_is_not_taken(agent: ModuleType) -> None:
    assert agent.node_scheduler.job_folders(V2.format(job="job_77"), "7", is_own=False) == []


def ranks(agent: ModuleType, known: dict[int, Process], tasks: dict[int, tuple[str, int | None]]) -> dict[int, int]:
    found = agent.node_ranks.assign_ranks(known, agent.node_ranks.spread_tasks(known, tasks))
    return {rank["rank"]: rank["pid"] for rank in found}


def test_one_task_per_rank_below_a_shell(agent: ModuleType) -> None:
    known = {10: process(1, exe=BASH), 11: process(10), 12: process(11), 20: process(1, exe=BASH), 21: process(20)}
    tasks = {10: ("0", 4), 11: ("0", None), 12: ("0", None), 20: ("0", 5), 21: ("0", None)}
    assert ranks(agent, known, tasks) == {4: 11, 5: 21}


def test_one_torchrun_per_node_is_a_launcher_and_no_rank(agent: ModuleType) -> None:
    known = {
        10: process(1),
        11: process(10, RANK="8", WORLD_SIZE="16"),
        12: process(10, RANK="9", WORLD_SIZE="16"),
        13: process(12, RANK="9", WORLD_SIZE="16", start=9),
    }
    tasks = {10: ("0", 1), 11: ("0", None), 12: ("0", None), 13: ("0", None)}
    assert ranks(agent, known, tasks) == {8: 11, 9: 12}


def test_the_batch_script_is_no_rank_unless_there_is_no_step(agent: ModuleType) -> None:
    known = {5: process(1, exe=BASH), 6: process(5), 10: process(1)}
    assert ranks(agent, known, {5: ("batch", 0), 6: ("batch", None), 10: ("0", 3)}) == {3: 10}
    assert ranks(agent, {5: known[5], 6: known[6]}, {5: ("batch", 0), 6: ("batch", None)}) == {0: 6}


def test_a_rank_whose_environment_gives_no_answer_keeps_its_task_id(agent: ModuleType) -> None:
    known = {10: process(1, exe="", comm="python")}
    assert ranks(agent, known, {10: ("0", 7)}) == {7: 10}


def test_a_rank_that_was_renamed_is_known_by_its_program(agent: ModuleType) -> None:
    known = {10: process(1, exe=BASH, RANK="2"), 11: process(10, comm="pt_main_thread", exe="", RANK="2")}
    assert ranks(agent, known, {}) == {2: 11}


def test_unnumbered_children_are_counted_in_order_of_their_start(agent: ModuleType) -> None:
    known = {10: process(1), 13: process(10, start=5), 12: process(10, start=6), 14: process(12, start=7)}
    found = agent.node_ranks.count_ranks(10, known)
    assert [(rank["rank"], rank["pid"]) for rank in found] == [(0, 13), (1, 12)]


def test_recorded_collectives_are_stored_without_repetition(agent: ModuleType) -> None:
    entry = {
        "process_group": ["1", "tp"], "profiling_name": "gloo:all_reduce", "input_sizes": [[8]],
        "input_dtypes": ["Float"], "is_p2p": False, "state": "scheduled",
    }  # fmt: skip
    entries = [
        {**entry, "record_id": number, "collective_seq_id": number + 1, "retired": number < 6} for number in (5, 4, 6)
    ]
    assert agent.node_recorder.compact_records(entries) == {
        "first_record": 4,
        "tokens": [("1", "tp", "all_reduce", "[[8]]", "['Float']")],
        "stream": [0, 0, 0],
        "last_sequence": {"1": 7},
        "open": [2],
    }


def test_py_spy_errors_fit_on_a_line(agent: ModuleType) -> None:
    text = "warning: x\nError: Failed to open process 7\nReason: Permission Denied\n"
    explain = agent.node_stacks.explain_py_spy
    assert explain(text) == "py-spy: " + text.removeprefix("warning: x\n").strip().replace("\n", "; ")
    denied = "Permission Denied: Try running again with elevated permissions by going 'sudo env \"PATH=$PATH\" !!'"
    assert explain(denied) == "py-spy: Permission Denied"
    assert explain("") == "py-spy printed nothing"


def test_a_rank_says_how_many_its_launcher_started(agent: ModuleType) -> None:
    known = {11: process(1, RANK="8", WORLD_SIZE="16", LOCAL_WORLD_SIZE="2")}
    (found,) = agent.node_ranks.assign_ranks(known, {})
    assert (found["world_size"], found["local_world_size"]) == (16, 2)


def test_the_way_from_a_shell_to_this_program_holds_no_rank(agent: ModuleType) -> None:
    """`bsl spy --pid $$` is below that shell, too."""
    above = {2: 1, 5: 2, 6: 5, 7: 6, 9: 2}
    assert agent.node_ranks.chain_to_root(7, above) == {7, 6, 5, 2, 1}


def test_looks_while_settling(agent: ModuleType) -> None:
    for settle_s, about in ((60, [2, 4, 8, 16, 32, 60]), (8, [2, 4, 8]), (3, [3]), (0, [])):
        found = agent.moments(settle_s)
        assert len(found) == len(about)
        assert all(0.9 * want <= at <= 1.1 * want for at, want in zip(found, about, strict=True))
        assert found[-1:] == about[-1:], "the last look is at the end"


def dump_of(line: int, active: bool = True) -> str:
    return (
        f'[{{"os_thread_id": 7, "active": {str(active).lower()}, "owns_gil": false, "frames": [{{"line": {line}}}]}}]'
    )


def test_which_ranks_run_on_the_spot(agent: ModuleType) -> None:
    def runs(*samples: Process) -> bool:
        return bool(agent.runs_on_the_spot({"samples": list(samples)}))

    assert runs({"dump": dump_of(5)}, {"dump": dump_of(5, active=False)})
    assert not runs({"dump": dump_of(5)}, {"dump": dump_of(6)}), "it moved"
    assert not runs({"dump": dump_of(5)}, {"same_stack": True}), "it did not run"
    assert not runs({"why": "py-spy: no such process"}, {"why": "py-spy: no such process"}), "more looks show nothing"


@pytest.mark.parametrize(
    ("thread", "ran_ns", "works"),
    [("7", 1, True), ("8", 1000, False), ("8", 500_000_000, True)],
    ids=["it has frames", "a watchdog", "a native thread that computes"],
)
def test_a_native_thread_that_looks_around_is_not_at_work(
    agent: ModuleType, thread: str, ran_ns: int, works: bool
) -> None:
    times = {"7": 5, "8": 5}
    before = {"mono": 1.0, "dump": dump_of(5), "thread_times": times}
    after = {"mono": 2.0, "dump": dump_of(5), "thread_times": {**times, thread: 5 + ran_ns}}
    assert agent.runs_on_the_spot({"samples": [before, after]}) is works


@pytest.mark.parametrize(
    ("before", "wait", "threads", "has_run"),
    [
        ({"do_epoll_wait": [8]}, "do_epoll_wait", "8", False),
        ({"do_epoll_wait": [8]}, "futex_wait", "8", True),
        ({"futex_wait": [8]}, "do_epoll_wait", "8", True),
        ({"do_epoll_wait": [7, 8]}, "do_epoll_wait", "78", True),
    ],
    ids=["a loop", "it left its loop", "it was in none", "one with frames"],
)
def test_a_loop_of_native_code_has_no_stack_to_read_again(
    agent: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    before: dict[str, list[int]],
    wait: str,
    threads: str,
    has_run: bool,
) -> None:
    monkeypatch.setattr(agent, "read_text", lambda path: wait)
    rank = {"pid": 7, "samples": [{"dump": dump_of(5), "thread_waits": before}]}
    after = {name: 5 + (name in threads) for name in "78"}
    assert agent.has_run(rank, {"7": 5, "8": 5}, after) is has_run


def test_readers_get_more_time_on_a_busy_node(agent: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for load in (0.0, 16.0, 1000.0):
        monkeypatch.setattr(agent.os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        found.append(agent.patience(2))
    assert found == [1.0, 2.0, agent.MOST_PATIENCE]


def test_a_dump_that_repeats_is_sent_once(agent: ModuleType) -> None:
    ranks = [{"samples": [{"dump": "a"}, {"dump": "a"}, {"same_stack": True}, {"dump": "a"}, {"dump": "b"}]}]
    agent.drop_repetition(ranks)
    assert ranks[0]["samples"] == [{"dump": "a"}, *[{"same_stack": True}] * 3, {"dump": "b"}]


def test_status_that_lacks_lines_is_not_known(agent: ModuleType) -> None:
    found = agent.node_processes.parse_status("Name:\tx\n")
    assert (found["voluntary"], found["involuntary"], found["tracer_pid"]) == (None, None, None)


def test_a_kernel_that_counts_no_times_says_nothing(agent: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent.node_processes, "read_text", lambda path, limit=0: "0 0 0\n")
    assert agent.node_processes.thread_times(os.getpid()) == ({}, None)


def test_an_age_that_contradicts_the_samples_is_not_known(agent: ModuleType) -> None:
    samples = [{"mono": float(at), "thread_times": {"7": ran, "8": 1}} for at, ran in ((0, 1), (5, 2), (9, 2))]
    assert agent.node_motion.longest_idle("7", samples, 10.0) == 10.0, "it ran after the sample at 0 s"
    assert agent.node_motion.longest_idle("8", samples, 10.0) == float("inf")
    samples[2]["thread_times"] = {"7": 3}
    assert agent.node_motion.longest_idle("7", samples, 10.0) == 5.0


def test_bytes_of_a_connection(agent: ModuleType) -> None:
    info = bytearray(232)
    struct.pack_into("=QQ", info, 120, 1000, 2000)
    for at, value in ((68, 250), (100, 3), (136, 40)):
        struct.pack_into("=I", info, at, value)

    def message(info: bytes) -> bytes:
        head = bytes(56) + struct.pack("=IIII", 30, 5, 0, 4711)
        other = struct.pack("=HHI", 5, 8, 0)
        return head + other + struct.pack("=HH", len(info) + 4, 2) + info

    assert agent.node_sockets.parse_connection(message(bytes(info))) == ("4711", 1005, 1970, 3, 40, 250)
    for cut in (info[:104], b""):
        with pytest.raises(OSError, match="does not count"):
            agent.node_sockets.parse_connection(message(bytes(cut)))


def test_a_process_that_runs_a_deleted_python_says_so(agent: ModuleType, tmp_path: Path) -> None:
    library = tmp_path / "libpython3.12.so.1.0"
    library.write_bytes(bytes(mmap.PAGESIZE))
    with library.open("r+b") as stream, mmap.mmap(stream.fileno(), 0):
        assert agent.node_stacks.deleted_python(os.getpid()) == ""
        library.unlink()
        assert agent.node_stacks.deleted_python(os.getpid()) == f"; it runs {library} (deleted)"


def test_threads_of_the_own_namespace_keep_their_numbers(agent: ModuleType) -> None:
    assert agent.node_stacks.node_numbers(os.getpid()) == {}
    assert agent.node_stacks.node_numbers(1 << 22) == {}

"""What blocks a rank that others wait for: its class, and how the claim names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bigsci_launch.spy.evidence.ranks import read_evidence
from bigsci_launch.spy.judge.rules.process import Stall, explain_stall
from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.taxonomy import HangClass
from tests.support.texts import has_parts

from ...conftest import make_evidence, rank_of

Explain = Callable[..., Stall]
LIB = "/usr/lib/python3.11"
TAIL = "get_batch@/src/train.py:9 < main@/src/train.py:1"
LOADER = f"_try_get_data@/venv/torch/utils/data/dataloader.py:1 < {TAIL}"
QUEUE = f"wait@{LIB}/threading.py:327 < get@{LIB}/queue.py:171 < next_batch@/src/data.py:5 < {TAIL}"
LOCK = f"save@/src/checkpoint.py:98 < {TAIL}"


@pytest.fixture
def explain() -> Explain:
    """Rank 1 stalls. `threads`: stacks of further threads by name; `sample`: further keys of every sample."""

    def make(stack: str | None, *, threads: dict[str, str] | None = None, collection: Any = None, **more: Any) -> Stall:
        rank = rank_of(1, stack, **more)
        for index, (name, text) in enumerate((threads or {}).items()):
            other = rank_of(9, text)["samples"][0]["stack"]["threads"][0]
            for sample in rank["samples"]:
                sample["stack"]["threads"].append({**other, "tid": 500 + index, "name": name})
        evidence = make_evidence([rank_of(0, TAIL), rank], **(collection or {}))
        return explain_stall(evidence.ranks[1])

    return make


@pytest.mark.parametrize(
    ("wchan", "state", "hang_class"),
    [
        ("locks_lock_inode_wait", "S", HangClass.FILE_LOCK_HELD),
        ("anon_pipe_write", "S", HangClass.OUTPUT_PIPE_FULL),
        ("request_wait_answer", "S", HangClass.DEVICE_SILENT),
        ("nvidia_ioctl", "S", HangClass.DEVICE_SILENT),
        ("uverbs_ioctl", "D", HangClass.DEVICE_SILENT),
        ("fuse_lock_inode", "D", HangClass.KERNEL_SLEEP),
        ("rpc_wait_bit_killable", "D", HangClass.FILE_SERVER_LOST),
        ("folio_wait_bit_common", "D", HangClass.PAGE_FAULT_NEVER_ENDS),
        ("percpu_rwsem_wait", "D", HangClass.KERNEL_SLEEP),
        ("wait_woken", "S", HangClass.NETWORK_CALL_UNANSWERED),
        ("n_tty_read", "S", HangClass.BREAKPOINT_FORGOTTEN),
        ("do_wait", "S", HangClass.CHILD_STUCK),
        ("hrtimer_nanosleep", "S", HangClass.BLOCKED_IN_C),
        ("ep_poll", "S", HangClass.BLOCKED_IN_C),
    ],
)
def test_the_kernel_function_tells(explain: Explain, wchan: str, state: str, hang_class: HangClass) -> None:
    stall = explain(LOCK, wchan=wchan, state=state)
    assert stall.hang_class == hang_class
    assert "save (checkpoint.py:98)" in stall.words


def test_a_lock_of_the_memory_map(explain: Explain) -> None:
    """No stack can be read, and even `ps` would block."""
    stall = explain(None, wchan="__vma_start_write", state="D")
    assert stall.hang_class == HangClass.MEMORY_MAP_LOCKED
    assert "never ps" in stall.next
    assert explain(None, wchan="percpu_rwsem_wait", state="D").hang_class == HangClass.KERNEL_SLEEP


def test_a_core_that_is_being_written(explain: Explain) -> None:
    assert (
        explain(LOCK, state="D", wchan="percpu_rwsem_wait", sample={"core_dumping": True}).hang_class
        == HangClass.CORE_BEING_WRITTEN
    )


@pytest.mark.parametrize(
    ("signal", "hang_class"),
    [
        ("SIGSEGV", HangClass.RANK_CRASHED),
        ("SIGABRT", HangClass.RANK_CRASHED),
        ("SIGKILL", HangClass.RANK_KILLED),
        (None, HangClass.RANK_EXITED),
    ],
)
def test_how_it_ended(explain: Explain, signal: str | None, hang_class: HangClass) -> None:
    record = {"rank": 1, "code": None if signal else 1, "signal": signal, "time": 1.0}
    assert explain(None, state="gone", collection={"exits": [record]}).hang_class == hang_class


@pytest.mark.parametrize(
    ("child", "hang_class"),
    [
        ({"state": "T", "wchan": "do_signal_stop"}, HangClass.DATA_LOADER_STUCK),
        ({"state": "S", "wchan": "futex_do_wait"}, HangClass.DATA_LOADER_STUCK),
        ({"state": "Z", "wchan": "0"}, HangClass.DATA_LOADER_STUCK),
        ({"state": "S", "wchan": "anon_pipe_read"}, HangClass.DATA_LOADER_STUCK),
    ],
)
def test_a_worker_of_a_data_loader_is_blamed_by_pid(
    explain: Explain, child: dict[str, str], hang_class: HangClass
) -> None:
    children = [{"pid": 4711, "comm": "pt_data_worker", "cpu_ticks": 1, **child}]
    stall = explain(LOADER, wchan="poll_schedule_timeout", sample={"children": children})
    assert stall.hang_class == hang_class
    assert ("4711 (pt_data_worker" in stall.words) == (child["wchan"] != "anon_pipe_read"), "one that waits for work"


def test_the_place_of_the_child_is_told(explain: Explain) -> None:
    stack = rank_of(1, "read_sample@/src/data.py:40")["samples"][0]["stack"]
    stack["threads"][0]["tid"] = 4711
    children = [{"pid": 4711, "comm": "pt_data_worker", "state": "S", "wchan": "futex_do_wait", "stack": stack}]
    stall = explain(LOADER, wchan="poll_schedule_timeout", sample={"children": children})
    assert "which is in read_sample (data.py:40)" in stall.words
    assert stall.missing == ""


def test_a_worker_that_ran_meanwhile_is_not_stuck(explain: Explain) -> None:
    children = [{"pid": 4711, "comm": "pt_data_worker", "state": "S", "wchan": "futex_do_wait", "cpu_ticks": 1}]
    sample = {"children": children, "child_ticks": {}}
    assert "4711" in explain(LOADER, wchan="poll_schedule_timeout", sample=sample).words
    rank = rank_of(1, LOADER, wchan="poll_schedule_timeout", sample={"children": children})
    rank["samples"][1] = {**rank["samples"][1], "children": [{**children[0], "cpu_ticks": 3}]}
    assert "4711" not in explain_stall(read_evidence({}, [{"node": "n0", "ranks": [rank]}]).ranks[1]).words


def test_what_a_worker_reads_and_the_command_that_shows_it(explain: Explain) -> None:
    """Of two workers, the one that reads a sample; the other waits to be asked for one."""
    fetching = (
        "fetch@/venv/torch/utils/data/_utils/fetch.py:52 < _worker_loop@/venv/torch/utils/data/_utils/worker.py:3"
    )
    children = []
    for pid, stack in ((4710, "get@/usr/lib/python3.11/queue.py:1"), (4711, f"load@/src/data.py:7 < {fetching}")):
        document = rank_of(1, stack)["samples"][0]["stack"]
        document["threads"][0]["tid"] = pid
        child = {"pid": pid, "comm": "pt_data_worker", "state": "S", "wchan": "anon_pipe_read", "stack": document}
        children.append({**child, "cpu_ticks": 1})
    stall = explain(LOADER, wchan="poll_schedule_timeout", sample={"children": children})
    assert has_parts(stall.words, "4711", "load (data.py:7)") and "4710" not in stall.words
    assert stall.next.startswith("py-spy dump --subprocesses --pid ")


def test_a_stopped_child_for_which_it_does_not_wait_is_not_the_reason(explain: Explain) -> None:
    children = [{"pid": 4711, "comm": "cat", "state": "T", "wchan": "do_signal_stop"}]
    assert explain(LOCK, wchan="hrtimer_nanosleep", sample={"children": children}).hang_class == HangClass.BLOCKED_IN_C
    assert explain(LOCK, wchan="do_wait", sample={"children": children}).hang_class == HangClass.CHILD_STUCK


def test_a_queue_that_a_thread_should_fill(explain: Explain) -> None:
    stall = explain(QUEUE, threads={"pin_memory": "pin@/src/data.py:30"})
    assert stall.hang_class == HangClass.BATCH_THREAD_STUCK
    assert has_parts(stall.words, "next_batch (data.py:5)", "thread pin_memory", "pin (data.py:30)")


@pytest.mark.parametrize(
    ("partner_waits", "hang_class"),
    [
        ("futex_do_wait", HangClass.THREAD_DEADLOCK),
        ("hrtimer_nanosleep", HangClass.BLOCKED_IN_C),
        ("", HangClass.BLOCKED_IN_C),
    ],
)
def test_two_threads_with_crossed_locks(explain: Explain, partner_waits: str, hang_class: HangClass) -> None:
    """Only if the kernel says that both wait for a lock."""
    waits = {partner_waits: [500]} if partner_waits else {}
    stall = explain(LOCK, threads={"async-ckpt": "write@/src/checkpoint.py:104"}, sample={"thread_waits": waits})
    assert stall.hang_class == hang_class


@pytest.mark.parametrize(
    "name", ["save_on_signal", "_handle_sigterm", "on_sigusr1", "Trainer.signal_handler", "handler"]
)
def test_a_lock_in_a_signal_handler(explain: Explain, name: str) -> None:
    assert explain(f"{name}@/src/train.py:275 < {TAIL}").hang_class == HangClass.SIGNAL_HANDLER_LOCKED
    assert explain(f"{name}@/src/train.py:275 < {TAIL}", wchan="hrtimer_nanosleep").hang_class == HangClass.BLOCKED_IN_C


@pytest.mark.parametrize("name", ["design", "sign_in", "assignment", "signals_per_rank", "handlers"])
def test_a_name_that_only_looks_like_one(explain: Explain, name: str) -> None:
    assert explain(f"{name}@/src/train.py:275 < {TAIL}").hang_class == HangClass.BLOCKED_IN_C


def test_the_interpreter_ends_and_a_thread_does_not(explain: Explain) -> None:
    threads = {"uploader": "upload@/src/store.py:8"}
    error = {"rank": 1, "type": "RuntimeError", "message": "out of memory", "time": 1.0}
    stall = explain(f"_shutdown@{LIB}/threading.py:1590", threads=threads, collection={"errors": [error]})
    assert stall.hang_class == HangClass.EXIT_WAITS_FOR_THREAD
    assert has_parts(stall.words, "RuntimeError: out of memory", "thread uploader", "upload (store.py:8)")
    assert not stall.missing
    executor = explain(
        f"join@{LIB}/threading.py:1 < _python_exit@{LIB}/concurrent/futures/thread.py:31", threads=threads
    )
    assert executor.hang_class == HangClass.EXIT_WAITS_FOR_THREAD and executor.missing, "nothing says why it exits"


@pytest.mark.parametrize(("wchan", "with_thread", "hang_class"), [
    ("futex_do_wait", True, HangClass.GIL_DEADLOCK),
    ("futex_do_wait", False, HangClass.BLOCKED_WITH_GIL),
    ("hrtimer_nanosleep", True, HangClass.BLOCKED_WITH_GIL),
])  # fmt: skip
def test_the_gil_is_held_by_a_thread_that_sleeps(wchan: str, with_thread: bool, hang_class: HangClass) -> None:
    rank = rank_of(1, LOCK, wchan=wchan)
    for sample in rank["samples"]:
        thread = sample["stack"]["threads"][0]
        thread["owns_gil"] = True
        if with_thread:
            sample["stack"]["threads"].append({**thread, "tid": 500, "name": "needs-gil", "owns_gil": False})
    assert explain_stall(make_evidence([rank_of(0, TAIL), rank]).ranks[1]).hang_class == hang_class


def test_a_thread_without_frames_tells_nothing() -> None:
    """py-spy also lists threads that have not run any Python yet, or that are between two frames."""
    rank = rank_of(1, LOCK)
    for sample in rank["samples"]:
        thread = sample["stack"]["threads"][0]
        thread["owns_gil"] = True
        sample["stack"]["threads"].append({**thread, "tid": 500, "name": "new", "owns_gil": False, "frames": []})
    assert explain_stall(make_evidence([rank_of(0, TAIL), rank]).ranks[1]).hang_class == HangClass.BLOCKED_WITH_GIL
    for sample in rank["samples"]:
        sample["stack"]["threads"] = [{**thread, "frames": []} for thread in sample["stack"]["threads"]]
    assert explain_stall(make_evidence([rank_of(0, TAIL), rank]).ranks[1]).hang_class in (
        HangClass.BLOCKED_IN_C,
        HangClass.BLOCKED_WITH_GIL,
    )


def test_a_storm_of_signals(explain: Explain) -> None:
    rank = rank_of(1, LOCK, wchan="hrtimer_nanosleep")
    rank["samples"][0]["voluntary"], rank["samples"][1]["voluntary"] = 700, 1700
    stall = explain_stall(make_evidence([rank_of(0, TAIL), rank]).ranks[1])
    assert stall.hang_class == HangClass.SIGNAL_STORM
    assert "1000 times" in stall.words


@pytest.mark.parametrize(
    ("stack", "hang_class"),
    [
        (LOCK, HangClass.STORE_KEY_MISSING),
        (f"recv_into@{LIB}/socket.py:7 < {TAIL}", HangClass.NETWORK_CALL_UNANSWERED),
        (f"read@{LIB}/ssl.py:7", HangClass.NETWORK_CALL_UNANSWERED),
    ],
)
def test_a_request_without_an_answer(explain: Explain, stack: str, hang_class: HangClass) -> None:
    stall = explain(stack, wchan="poll_schedule_timeout.constprop.0", sample={"system_call": {"number": 7}})
    assert stall.hang_class == hang_class


def test_the_reader_of_a_pipe_and_the_server_of_a_call_are_named(explain: Explain) -> None:
    ends = [{"pid": 17, "comm": "tee", "state": "T"}]
    call = {"number": 1, "name": "write", "fd": 1, "target": "pipe:[4711]", "other_ends": ends}
    words = explain(LOCK, wchan="anon_pipe_write", sample={"system_call": call}).words
    assert has_parts(words, "write on fd 1", "pipe:[4711]", "17 (tee, stopped)")
    server = {"number": 45, "name": "recvfrom", "fd": 9, "target": "socket:[1]", "socket": {"remote": "10.0.0.9:443"}}
    words = explain(LOCK, wchan="wait_woken", sample={"system_call": server}).words
    assert has_parts(words, "recvfrom on fd 9", "10.0.0.9:443")


def test_a_rank_that_may_not_be_read_is_told_of_and_not_accused() -> None:
    """A victim that cannot be read looks exactly the same."""
    others = [rank_of(rank, f"all_reduce@c10d:10 < {TAIL}") for rank in (0, 2, 3)]
    hidden = rank_of(1, None, sample={"why": "py-spy: Permission Denied"})
    conclusion = judge(make_evidence([*others, hidden], topology="dp=4"))
    assert (conclusion.state.value, conclusion.hang_class, conclusion.suspects) == (
        "hang",
        HangClass.RANK_UNREADABLE,
        (),
    )
    assert has_parts(conclusion.claim, "3 ranks", "rank 1", "Permission Denied")

from __future__ import annotations

from dataclasses import replace

import pytest

from bigsci_launch.spy.evidence.stacks import (
    Frame,
    ThreadStack,
    decisive_thread,
    is_wrapper,
    parse_threads,
    with_native,
)

C10D = "/venv/torch/distributed/distributed_c10d.py"
STDLIB = "/usr/lib/python3.11/threading.py"


def thread(tid: int, *frames: tuple[str, str], name: str = "t") -> ThreadStack:
    return ThreadStack(tid, name, False, False, tuple(Frame(function, file, 1) for function, file in frames))


def test_wrappers_are_not_named() -> None:
    found = thread(1, ("all_reduce", C10D), ("wrapper", "/venv/torch/distributed/c10d_logger.py"), ("step", "/a.py"))
    assert [frame.function for frame in found.named_frames] == ["all_reduce", "step"]
    assert is_wrapper(Frame("run_module", "<frozen runpy>", 3))
    assert not is_wrapper(Frame("load", "/home/me/mycontextlib.py", 3))


def test_a_stack_of_wrappers_alone_keeps_them() -> None:
    assert len(thread(1, ("wrapper", "/venv/torch/distributed/c10d_logger.py")).named_frames) == 1


def test_operation_and_site() -> None:
    found = thread(1, ("all_reduce", C10D), ("reduce_loss", "/src/train.py"), ("step", "/src/train.py"))
    assert found.operation == "all_reduce"
    assert str(found.site) == "reduce_loss (train.py:1)"


def test_a_function_of_the_same_name_elsewhere_is_no_operation() -> None:
    assert thread(1, ("all_reduce", "/src/mine.py")).operation is None


def test_names_with_their_class_are_known_too() -> None:
    assert thread(1, ("ProcessGroup.all_reduce", C10D)).operation == "all_reduce"


def test_the_thread_in_a_collective_decides_over_an_idle_main_thread() -> None:
    main = thread(7, ("join", STDLIB), ("backward", "/src/train.py"), name="MainThread")
    autograd = thread(8, ("all_gather", C10D), ("hook", "/src/zero.py"), name="autograd-0")
    assert decisive_thread([main, autograd], pid=7) is autograd


def test_an_idle_main_thread_gives_way_to_the_thread_that_works() -> None:
    main = thread(7, ("join", STDLIB), name="MainThread")
    idle = thread(8, ("wait", STDLIB))
    working = thread(9, ("load", "/src/data.py"))
    assert decisive_thread([main, idle, working], pid=7) is working
    assert decisive_thread([main, idle], pid=7) is main


IN_BACKWARD = (("_engine_run_backward", "/venv/torch/autograd/graph.py"), ("step", "/src/train.py"))


@pytest.mark.parametrize(
    ("hook", "decides"),
    [
        (replace(thread(9, ("offload", "/src/hooks.py")), name=None), True),
        (thread(9, ("offload", "/src/hooks.py"), name="pt_autograd_0"), True),
        (thread(9, ("offload", "/src/hooks.py"), name="uploader"), False),
        (replace(thread(9, ("upload", "/src/log.py"), ("_bootstrap", STDLIB)), name=None), False),
        (replace(thread(9, ("wait", STDLIB), ("get", "/src/log.py")), name=None), False),
    ],
)
def test_of_a_backward_pass_the_thread_decides_that_calls_python_again(hook: ThreadStack, decides: bool) -> None:
    main = thread(7, *IN_BACKWARD, name="MainThread")
    assert (decisive_thread([main, hook], pid=7) is hook) == decides
    assert decisive_thread([thread(7, ("load", "/src/data.py"), name="MainThread"), hook], pid=7) is not hook


def test_the_main_thread_decides_otherwise() -> None:
    background = thread(6, ("flush", "/src/log.py"))
    main = thread(7, ("load", "/src/data.py"), name="MainThread")
    assert decisive_thread([background, main], pid=7) is main
    assert decisive_thread([], pid=7) is None


def test_thread_labels_do_not_differ_from_rank_to_rank() -> None:
    assert thread(1, name="autograd-3").label == thread(1, name="autograd-11").label == "autograd"
    assert parse_threads([{"tid": 1, "name": None, "frames": []}], 1)[0].label == "MainThread"


def test_a_main_thread_without_a_number_is_that_of_the_process() -> None:
    """py-spy does not know the numbers of threads of Python 3.8 to 3.10."""
    names = ("MainThread", "worker")
    threads = parse_threads([{"tid": None, "name": name, "frames": []} for name in names], 4711)
    assert [thread.tid for thread in threads] == [4711, 0]


BACKWARD = ("backward", "/venv/torch/autograd/graph.py")
BARRIER = ("barrier", C10D)


def native(python: tuple[str, str], *frames: str, tid: int | None = 7) -> ThreadStack:
    """The thread of `python` with native frames that were read at the same line."""
    shown = [*frames, f"{python[0]} ({python[1].rpartition('/')[2]}:1)", "main (train.py:9)"]
    dump = [{"tid": tid, "name": "MainThread", "frames": shown}]
    return with_native([thread(7, python, name="MainThread")], dump, 7)[0]


def test_native_frames_show_what_backward_waits_for() -> None:
    found = native(BACKWARD, "pthread_cond_wait (libc.so.6)", "c10d::Reducer::finalize_backward (libtorch_cpu.so)")
    assert (found.operation, found.outer_operation) == ("all_reduce", "all_reduce")
    assert native(BACKWARD, "c10d::Work::wait (libtorch_cpu.so)", tid=None).operation == "Work.wait"


def test_the_outermost_native_communication_is_what_the_program_called() -> None:
    found = native(
        ("step", "/src/a.py"), "PMPI_Recv (libmpi.so.40.30.4)", "allreduce (mpi4py/MPI.openmpi.cpython-311.so)"
    )
    assert found.operation == "all_reduce"


def test_a_python_frame_says_more_than_what_is_below_it() -> None:
    assert native(BARRIER, "c10d::Work::wait (libtorch_cpu.so)").operation == "barrier"


def test_native_frames_of_another_moment_are_not_used() -> None:
    """The thread has moved on between the look at its Python frames and that at the native ones."""
    dump = [{"tid": 7, "name": "MainThread", "frames": ["c10d::Work::wait (libtorch_cpu.so)", "step (a.py:2)"]}]
    assert with_native([thread(7, BACKWARD)], dump, 7)[0].native == ()
    cut = [{"tid": 7, "name": "MainThread", "frames": ["c10d::Work::wait (libtorch_cpu.so)"]}]
    assert with_native([thread(7, BACKWARD)], cut, 7)[0].native == ()


def test_native_frames_count_in_no_comparison() -> None:
    assert native(BACKWARD, "c10d::Work::wait (libtorch_cpu.so)") == thread(7, BACKWARD, name="MainThread")


def test_a_wait_of_the_c_library_alone_is_no_communication() -> None:
    lock, called = ("take", "/src/a.py"), "PyCFuncPtr_call (_ctypes.cpython-311-x86_64-linux-gnu.so)"
    assert native(lock, "pthread_mutex_lock (libc.so.6)", "ffi_call (libffi.so.8.1.2)", called).is_plainly_local
    assert not native(lock, "pthread_mutex_lock (libc.so.6)", "wait (libxla.so)", called).is_plainly_local
    assert not native(lock, "pthread_cond_wait (libc.so.6)").is_plainly_local, "the frames between are missing"
    assert not thread(7, lock).is_plainly_local

"""What a sample does not say is not known: it is never 0, empty, or what was known before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from bigsci_launch.spy.evidence.bundle import Bundle
from bigsci_launch.spy.evidence.samples import Sample

Document = dict[str, Any]
FULL: Document = {
    "mono": 1.0, "state": "S", "wchan": "futex_do_wait", "cpu_ticks": 7, "voluntary": 3, "involuntary": 4,
    "tracer_pid": 0, "run_delay_ns": 5, "major_faults": 6, "children": [], "thread_waits": {"do_epoll_wait": [12]},
    "io": {"rchar": 10, "wchar": 20}, "file_bytes": 30, "system_call": {"number": 202, "call": "futex"},
    "socket_bytes": {"sent": 40, "received": 50},
}  # fmt: skip
COUNTS = (
    "cpu_ticks", "switches", "tracer_pid", "run_delay_ns", "major_faults", "read_bytes", "written_bytes", "file_bytes",
    "socket_sent", "socket_received",
)  # fmt: skip
Parse = Callable[[Sequence[Document]], tuple[Sample, ...]]


@pytest.fixture
def parse() -> Parse:
    def samples_of(documents: Sequence[Document]) -> tuple[Sample, ...]:
        rank = {"rank": 0, "pid": 11, "samples": list(documents)}
        return Bundle({}, ({"node": "n0", "ranks": [rank]},)).evidence().ranks[0].samples

    return samples_of


def test_a_full_sample(parse: Parse) -> None:
    (sample,) = parse([{**FULL, "thread_idle_s": {"11": 12.5}}])
    assert [getattr(sample, name) for name in COUNTS] == [7, 7, 0, 5, 6, 10, 20, 30, 40, 50]
    assert (sample.wchan, sample.call_number, sample.children) == ("futex_do_wait", 202, ())
    assert sample.thread_waits == {"12": "do_epoll_wait"}
    assert sample.thread_idle_s == {"11": 12.5}


def test_a_sample_of_which_only_the_time_is_known(parse: Parse) -> None:
    (sample,) = parse([{"mono": 0.0, "state": "?"}])
    names = (*COUNTS, "wchan", "call_number", "children", "thread_waits", "thread_idle_s", "threads")
    assert {name: getattr(sample, name) for name in names} == dict.fromkeys(names)


@pytest.mark.parametrize("name", ["cpu_ticks", "tracer_pid", "run_delay_ns", "major_faults", "file_bytes"])
def test_each_count_may_be_missing_alone(parse: Parse, name: str) -> None:
    for document in ({key: value for key, value in FULL.items() if key != name}, {**FULL, name: None}):
        (sample,) = parse([document])
        assert [each for each in COUNTS if getattr(sample, each) is None] == [name]


@pytest.mark.parametrize("hidden", ["0", "", None])
def test_a_hidden_kernel_function(parse: Parse, hidden: str | None) -> None:
    (sample,) = parse([{**FULL, "wchan": hidden}])
    assert sample.wchan is None


def test_a_process_that_did_not_run_is_as_it_was(parse: Parse) -> None:
    later = {"mono": 2.0, "state": "S", "wchan": "futex_do_wait", "same_stack": True}
    _, sample = parse([FULL, later])
    assert (sample.read_bytes, sample.written_bytes, sample.file_bytes) == (10, 20, 30)
    assert (sample.socket_sent, sample.socket_received, sample.call_number) == (40, 50, 202)
    assert (sample.children, sample.thread_waits) == ((), {"12": "do_epoll_wait"})


def test_a_process_whose_reader_gave_no_answer_is_not_as_it_was(parse: Parse) -> None:
    later = {"mono": 2.0, "state": "S", "unread": {"kernel": "no answer in 1 s"}}
    _, sample = parse([FULL, later])
    names = ("read_bytes", "written_bytes", "file_bytes", "socket_sent", "children", "thread_waits", "call_number")
    assert {name: getattr(sample, name) for name in names} == dict.fromkeys(names)

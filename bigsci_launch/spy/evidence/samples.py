"""Looks at one process, as values: what /proc and the stacks showed at one moment. What is not known is None."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from bigsci_launch.spy.evidence.known_code import DATA_FETCHING_FILES
from bigsci_launch.spy.evidence.stacks import Frame, ThreadStack, decisive_thread, parse_threads, with_native

GONE_STATES = ("gone", "Z", "X")
SLEEP = "select_of_no_files"
"""The name of such a wait in diagnostics/known/kernel.yaml: the kernel names a function for any select."""


@dataclass(frozen=True, slots=True)
class Child:
    """A process below a rank, such as a data-loader worker. `state` is the kernel's letter; `cpu_ticks` so far.

    `thread` is the one that decides, if its stack could be read; `idle_s` for how many seconds it has not run.
    """

    pid: int
    comm: str
    state: str
    wchan: str
    cpu_ticks: int | None = None
    thread: ThreadStack | None = None
    idle_s: float | None = None

    @property
    def place(self) -> str:
        """Where the process is, or nothing."""
        return str(self.thread.site) if self.thread and self.thread.site else ""

    @property
    def reading(self) -> str:
        """Where a worker of a data loader is while it reads a sample: its innermost call, and what the loader called.

        Nothing if it is no such worker, or waits to be asked for one.
        """
        frames = list(takewhile(lambda frame: not _fetches(frame), self.thread.own_frames if self.thread else ()))
        if self.thread is None or not frames or len(frames) == len(self.thread.own_frames):
            return ""
        inner, outer = self.place, str(frames[-1])
        return outer if inner == outer else f"{inner}, called from {outer}"


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a process. `mono` is the node's monotonic clock, seconds; `cpu_ticks` its CPU time so far.

    Files of other tools may give the order of their looks and not the time: then `mono` is None. What is not known is
    None, never 0 or empty; only `thread_times`, {thread id: nanoseconds on a core}, is empty then. `state` is the
    kernel's letter for the main thread, `gone`, or `?`; `wchan` the kernel function that it sleeps in (None, too,
    while it runs). `threads` is None if the stacks could not be read, and `why` is the reason. `sequences` are the
    recorder's newest numbers per group. `call_number` is the system call that the main thread waits in. All counts
    are totals so far: `read_bytes` and `written_bytes` of read and write calls, on files and connections alike,
    `major_faults` of pages fetched from mapped files, `run_delay_ns` that threads were ready to run but had no core.
    `tracer_pid` is 0 without a debugger. `thread_waits` is what other threads wait in, {thread id: kernel function};
    what a thread that is missing there does is not known.
    """

    mono: float | None
    state: str
    wchan: str | None
    cpu_ticks: int | None
    switches: int | None
    tracer_pid: int | None
    kill_pending: bool
    core_dumping: bool
    thread_times: Mapping[str, int]
    run_delay_ns: int | None
    thread_waits: Mapping[str, str] | None
    system_call: str
    call_number: int | None
    children: tuple[Child, ...] | None
    read_bytes: int | None
    written_bytes: int | None
    major_faults: int | None
    threads: tuple[ThreadStack, ...] | None
    why: str | None
    sequences: Mapping[str, int] | None
    call_name: str = ""
    """The name of that system call, if known."""
    thread_idle_s: Mapping[str, float] | None = None
    """Seconds since each thread last ran, good to 2 s or 5 %; only in the last sample. {thread id: seconds}"""
    socket_sent: int | None = None
    """Bytes that the process has given to its established TCP connections so far, and taken from them. It falls when a
    connection ends. Only those moved by `write` and `read`, not by `send` and `recv`, are in `written_bytes` too."""
    socket_received: int | None = None
    file_bytes: int | None = None
    """Sum of the positions in the files open for writing: it changes as they grow, but not with all ways to write."""


def parse_sample(document: Mapping[str, Any], previous: Sample | None, pid: int) -> Sample:
    """Parse a sample as the node agent writes it; `previous` is the one before, which it may refer to."""
    stack = document.get("stack")
    threads = parse_threads(stack["threads"], pid) if stack else None
    if document.get("same_stack") and previous is not None:
        threads = previous.threads
    still = previous if is_still(document) else None
    call = document.get("system_call") or {}
    moved = document.get("io") or ({"rchar": still.read_bytes, "wchar": still.written_bytes} if still else {})
    return Sample(
        mono=None if document["mono"] is None else float(document["mono"]),
        state=str(document["state"]),
        wchan=still.wchan if still and still.wchan == SLEEP else _wait_of(document.get("wchan"), call),
        cpu_ticks=_known_count(document, "cpu_ticks"),
        switches=_known_switches(document),
        tracer_pid=_known_count(document, "tracer_pid"),
        kill_pending=bool(document.get("kill_pending")),
        core_dumping=bool(document.get("core_dumping")),
        thread_times=document.get("thread_times") or {},
        run_delay_ns=_known_count(document, "run_delay_ns"),
        thread_waits=still.thread_waits if still else _parse_thread_waits(document),
        system_call=still.system_call if still else _describe_call(call),
        call_number=still.call_number if still else call.get("number"),
        children=_parse_children(document, still),
        read_bytes=_known_count(moved, "rchar"),
        written_bytes=_known_count(moved, "wchar"),
        major_faults=_known_count(document, "major_faults"),
        threads=threads,
        why=document.get("why"),
        sequences=(document.get("recorder") or {}).get("last_sequence"),
        call_name=still.call_name if still else str(call.get("call") or ""),
        **_parse_motion(document, still),
    )


def parse_samples(documents: Sequence[Mapping[str, Any]], pid: int) -> tuple[Sample, ...]:
    """Parse the samples of a rank. Native frames, which only the last look reads, hold for every look in which the
    thread was at the same line."""
    samples: list[Sample] = []
    for document in documents:
        samples.append(parse_sample(document, samples[-1] if samples else None, pid))
    native = documents[-1].get("native") if documents else None
    if not native:
        return tuple(samples)
    return tuple(
        replace(sample, threads=tuple(with_native(sample.threads, native, pid))) if sample.threads else sample
        for sample in samples
    )


def is_still(document: Mapping[str, Any]) -> bool:
    """Whether a later sample was not read in full because nothing ran: what it lacks is as it was before."""
    was_read = "children" in document or "kernel" in (document.get("unread") or {})
    return not was_read and document["state"] not in GONE_STATES


def _known_count(document: Mapping[str, Any], name: str) -> int | None:
    return None if document.get(name) is None else int(document[name])


def _wait_of(wchan: object, call: Mapping[str, Any]) -> str | None:
    """The kernel function of the main thread's wait. Until Python 3.10, `time.sleep` is a select of no files."""
    return SLEEP if call.get("num_files") == 0 else _known_function(wchan)


def _known_function(wchan: object) -> str | None:
    """The kernel function of a wait; the kernel writes 0 for a process that runs, and where it hides the function."""
    return str(wchan) if wchan and wchan != "0" else None


def _known_switches(document: Mapping[str, Any]) -> int | None:
    found = [count for name in ("voluntary", "involuntary") if (count := _known_count(document, name)) is not None]
    return sum(found) if found else None


def _parse_motion(document: Mapping[str, Any], still: Sample | None) -> dict[str, Any]:
    """Return what shows time and motion; the bytes of a process that did not run are those of the sample before."""
    sockets = document.get("socket_bytes")
    if sockets is None and still is not None:
        sockets = {"sent": still.socket_sent, "received": still.socket_received}
    files = _known_count(document, "file_bytes")
    return {
        "thread_idle_s": document.get("thread_idle_s"),
        "socket_sent": _known_count(sockets or {}, "sent"),
        "socket_received": _known_count(sockets or {}, "received"),
        "file_bytes": still.file_bytes if files is None and still is not None else files,
    }


def _parse_children(document: Mapping[str, Any], still: Sample | None) -> tuple[Child, ...] | None:
    """The children in this sample; if not read again, those of the previous sample with newer CPU times."""
    if still is not None and still.children is not None:
        ticks, idle = document.get("child_ticks") or {}, document.get("child_idle_s") or {}
        return tuple(
            replace(child, cpu_ticks=ticks.get(str(child.pid), child.cpu_ticks), idle_s=idle.get(str(child.pid)))
            for child in still.children
        )
    if document.get("children") is None:
        return None
    return tuple(
        Child(
            pid=int(child["pid"]),
            comm=str(child.get("comm") or ""),
            state=str(child["state"]),
            wchan=str(child.get("wchan") or ""),
            cpu_ticks=child.get("cpu_ticks"),
            thread=_thread_of_child(child),
            idle_s=(document.get("child_idle_s") or {}).get(str(child["pid"])),
        )
        for child in document["children"]
    )


def _thread_of_child(child: Mapping[str, Any]) -> ThreadStack | None:
    threads = parse_threads((child.get("stack") or {}).get("threads") or [], int(child["pid"]))
    fetching = (thread for thread in threads if any(map(_fetches, thread.own_frames)))
    return next(fetching, None) or decisive_thread(threads, int(child["pid"]))


def _fetches(frame: Frame) -> bool:
    return frame.file.endswith(DATA_FETCHING_FILES)


def _parse_thread_waits(document: Mapping[str, Any]) -> dict[str, str] | None:
    """{thread id: kernel function}; the agent writes the threads of each function together."""
    if not {"thread_waits", "blocked_threads"} & set(document):
        return None
    together = {
        str(thread): wait for wait, threads in (document.get("thread_waits") or {}).items() for thread in threads
    }
    stopped = {str(each["tid"]): str(each.get("wchan") or "") for each in document.get("blocked_threads") or []}
    return {**together, **stopped}


def _describe_call(call: Mapping[str, Any] | None) -> str:
    """`write on fd 1 (pipe:[4711], whose other end process 17 (tee, stopped) holds)`, or nothing."""
    if not call or not call.get("name"):
        return ""
    about = [str(call["target"])] if call.get("target") else []
    if remote := (call.get("socket") or {}).get("remote"):
        about = [f"a connection to {remote}"]
    ends = [_describe_end(end) for end in call.get("other_ends") or []]
    about += [f"whose other end {' and '.join(ends)} holds"] if ends else []
    return f"{call['name']} on fd {call['fd']}" + (f" ({', '.join(about)})" if about else "")


def _describe_end(end: Mapping[str, Any]) -> str:
    state = {"T": ", stopped", "D": ", asleep in the kernel", "Z": ", ended"}.get(str(end.get("state")), "")
    return f"process {end['pid']} ({end.get('comm')}{state})"

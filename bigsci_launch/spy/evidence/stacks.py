"""Stacks as values: frames, threads, which frames name the work, and which thread of a process decides.

Frames are ordered innermost first, as py-spy prints them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from bigsci_launch.spy.evidence.known_code import (
    bare_name,
    is_backward_engine,
    is_file,
    is_idle_call,
    is_installed,
    is_local_library,
    is_python_library,
    is_shared_lock,
    is_start_of_child,
    is_wrapper_file,
    may_communicate,
    operation_of,
)

MAIN = "MainThread"
NAMES_OF_NATIVE = ("Dummy-", "autograd")
"""What is in the names of threads of native code, where Python or the kernel gives them one."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One call: function, path of its file, current line.

    `arguments` are integers that a communication was called with (`src`, `dst`, `tag`), if they could be read. They
    differ from rank to rank, so frames are compared without them.
    """

    function: str
    file: str
    line: int
    arguments: tuple[tuple[str, int], ...] = field(default=(), compare=False)

    @property
    def short_file(self) -> str:
        return self.file.rpartition("/")[2]

    @property
    def place(self) -> str:
        """`train.py:915`; `libnccl.so.2` where no line is known."""
        return f"{self.short_file}:{self.line}" if self.line else self.short_file

    def __str__(self) -> str:
        return f"{bare_name(self.function)} ({self.place})"


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """The frames of one thread at one moment.

    `tid` is the kernel's number; that of the main thread is the pid. It is 0 if it is not known, as in old Pythons.
    """

    tid: int
    name: str | None
    owns_gil: bool
    active: bool
    frames: tuple[Frame, ...]
    native: tuple[Frame, ...] = field(default=(), compare=False)
    """The frames of C and C++ below the innermost one of Python, innermost first, if `--native` could read them. They
    do not count in comparisons, because not every look reads them."""

    @property
    def named_frames(self) -> tuple[Frame, ...]:
        """The frames without wrappers; all frames if nothing would be left."""
        return tuple(frame for frame in self.frames if not is_wrapper(frame)) or self.frames

    @property
    def communication(self) -> Frame | None:
        """The call that communicates: the innermost one of Python, else the outermost native one (mpi4py's `allreduce`
        sends messages); None if no frame shows one."""
        of_python = (frame for frame in self.frames if operation_of(frame.function, frame.file))
        return next(of_python, self._native_communication)

    @property
    def _native_communication(self) -> Frame | None:
        found = [frame for frame in self.native if operation_of(frame.function, frame.file)]
        return found[-1] if found else None

    @property
    def operation(self) -> str | None:
        """The collective or point-to-point call that the thread is in, such as `all_reduce`, or None."""
        frame = self.communication
        return operation_of(frame.function, frame.file) if frame else None

    @property
    def is_plainly_local(self) -> bool:
        """Whether the native frames show no library that could communicate between ranks, and none is missing.

        What Python calls is in Python itself or in an extension. If the outermost native frame is in neither, the
        frames between were lost.
        """
        if not self.native:
            return False
        return is_python_library(self.native[-1].file) and all(is_local_library(x.file) for x in self.native)

    @property
    def outer_operation(self) -> str | None:
        """The outermost communication that the thread is in: `all_gather_object` calls `all_gather`."""
        names = [name for frame in self.frames if (name := operation_of(frame.function, frame.file))]
        return names[-1] if names else self.operation

    def argument(self, *names: str) -> int | None:
        """Return the first of `names` among the numbers that the innermost communication was called with."""
        given = dict(self.communication.arguments) if self.communication else {}
        return next((given[name] for name in names if name in given), None)

    @property
    def site(self) -> Frame | None:
        """The innermost frame that is neither a wrapper nor the communication library: where the work is."""
        frames = [frame for frame in self.named_frames if operation_of(frame.function, frame.file) is None]
        return frames[0] if frames else (self.named_frames[0] if self.frames else None)

    @property
    def native_call(self) -> Frame | None:
        """The innermost call, wrappers left out, if native code below it may communicate without a frame; else None."""
        for frame in self.frames:
            if may_communicate(frame.function, frame.file):
                return frame
            if not is_wrapper(frame):
                return None
        return None

    @property
    def is_in_own_code(self) -> bool:
        """Whether the innermost call is made by the program itself: what libraries begin in C++ is below others."""
        return bool(self.frames) and not is_installed(self.frames[0].file)

    @property
    def waits_for_backward(self) -> bool:
        """Whether the innermost frame waits for a backward pass, which runs in threads of native code."""
        return bool(self.frames) and is_backward_engine(self.frames[0].function, self.frames[0].file)

    @property
    def is_native_born(self) -> bool:
        """Whether native code has started the thread, as autograd does: Python gave it neither a name nor a start."""
        is_named = self.name is not None and not any(part in self.name for part in NAMES_OF_NATIVE)
        return bool(self.frames) and not is_named and not is_file(self.frames[-1].file, "threading.py")

    @property
    def waits_for_shared_lock(self) -> bool:
        """Whether the innermost frame waits for something that another rank may hold."""
        return bool(self.frames) and is_shared_lock(self.frames[0].function, self.frames[0].file)

    @property
    def own_frames(self) -> tuple[Frame, ...]:
        """The frames without those that a forked process has from its parent."""
        starts = (index for index, frame in enumerate(self.frames) if is_start_of_child(frame.function, frame.file))
        return self.frames[: next(starts, len(self.frames)) + 1]

    @property
    def label(self) -> str:
        """The thread's name without a number that differs from rank to rank."""
        return (self.name or "MainThread").rstrip("0123456789-_ ") or "MainThread"


def with_native(threads: Sequence[ThreadStack], document: Sequence[Mapping[str, Any]], pid: int) -> list[ThreadStack]:
    """Return `threads` with the native frames of `bsl spy --native`, which are text: `c10d::Work::wait (libtorch.so)`.

    They were read a little later. A thread whose innermost Python frame is another one by then gets none.
    """
    found = {
        _tid_of(thread, pid, is_only=len(document) == 1): [_split(text) for text in thread["frames"]]
        for thread in document
    }
    return [replace(thread, native=_below(thread, found.get(thread.tid, ()))) for thread in threads]


def _split(text: str) -> tuple[str, str, int]:
    """`backward (torch/_tensor.py:625)` -> function, file, line; 0 if there is no line."""
    function, _, place = text.removesuffix(")").rpartition(" (")
    file, _, line = place.rpartition(":")
    return (function, file, int(line)) if file and line.isdigit() else (function, place, 0)


def _below(thread: ThreadStack, frames: Sequence[tuple[str, str, int]]) -> tuple[Frame, ...]:
    native = tuple(takewhile(lambda frame: not (frame[1].endswith(".py") or frame[1].startswith("<")), frames))
    caller = frames[len(native)] if len(native) < len(frames) else None
    innermost = thread.frames[0] if thread.frames else None
    if caller is None or innermost is None or (caller[0], caller[2]) != (innermost.function, innermost.line):
        return ()
    return tuple(Frame(function, _with_folder(file), 0) for function, file, _ in native)


def _tid_of(thread: Mapping[str, Any], pid: int, *, is_only: bool) -> int:
    return int(thread["tid"] or (pid if is_only or thread.get("name") == MAIN else 0))


def parse_threads(documents: Sequence[Mapping[str, Any]], pid: int) -> tuple[ThreadStack, ...]:
    """Parse threads as the node agent writes them. py-spy does not know their numbers before Python 3.11, and their
    names only where `threading` is imported: a thread that is alone is the main one."""
    return tuple(
        ThreadStack(
            tid=_tid_of(thread, pid, is_only=len(documents) == 1),
            name=thread.get("name"),
            owns_gil=bool(thread.get("owns_gil")),
            active=bool(thread.get("active")),
            frames=tuple(_parse_frame(frame) for frame in thread["frames"]),
        )
        for thread in documents
    )


def _parse_frame(document: Mapping[str, Any]) -> Frame:
    arguments = tuple((name, int(value)) for name, value in (document.get("arguments") or {}).items())
    return Frame(document["function"], _with_folder(document["file"]), int(document["line"]), arguments)


def _with_folder(file: str) -> str:
    """py-spy's text shortens `/usr/lib/python3.11/queue.py` to `queue.py`, but known frames end in `/queue.py`."""
    return file if "/" in file or file.startswith("<") else f"./{file}"


def is_wrapper(frame: Frame) -> bool:
    """Whether the frame only passes a call on, as plumbing of torch, DeepSpeed and the interpreter does."""
    return is_wrapper_file(frame.file)


def decisive_thread(threads: Sequence[ThreadStack], pid: int) -> ThreadStack | None:
    """Return the thread that shows what the process waits for.

    That is a thread inside a collective, preferably the main thread. Otherwise it is the main thread, unless that only
    waits for another thread of the process: then it is the first thread that does not wait in that way, and of a
    backward pass the one that calls Python again.
    """
    with_frames = [thread for thread in threads if thread.frames]
    main = next((thread for thread in with_frames if thread.tid == pid), with_frames[0] if with_frames else None)
    if main is None:
        return None
    in_order = [main, *(thread for thread in with_frames if thread is not main)]
    communicating = next((thread for thread in in_order if thread.operation), None)
    if communicating is not None:
        return communicating
    if is_idle(main):
        return next((thread for thread in in_order if not is_idle(thread)), main)
    if main.waits_for_backward:
        return next((thread for thread in in_order[1:] if thread.is_native_born and not is_idle(thread)), main)
    return main


def is_idle(thread: ThreadStack) -> bool:
    """Whether the thread only waits for other threads: its innermost frames are the standard library's waiting code.

    A thread without frames counts as idle: nothing is known about it.
    """
    if not thread.frames:
        return True
    innermost = thread.frames[0]
    return is_idle_call(innermost.function, innermost.file)

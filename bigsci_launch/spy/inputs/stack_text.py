"""Reads stacks in text: of py-spy, faulthandler, gdb and pystack, for any number of processes one after the other.

An excerpt without lines that begin a process works too: each main thread starts one. A process that the text names and
shows no stack of is one that could not be read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bigsci_launch.spy.evidence.known_code import operation_of
from bigsci_launch.spy.inputs.layout import WIDE, Passage, passages_of
from bigsci_launch.spy.inputs.looks import named_rank, node_of
from bigsci_launch.spy.inputs.origins import TextOrigin, origin_of_label
from bigsci_launch.spy.inputs.reading import Found, NotThis, Reading
from bigsci_launch.spy.inputs.roles import definite_role, local_rank_of, without_helpers
from bigsci_launch.spy.inputs.stack_lines import (
    MAIN,
    DumpLine,
    FrameLine,
    OriginLine,
    ProcessLine,
    StackLine,
    ThreadLine,
    Tool,
    parse_line,
)
from bigsci_launch.units import format_bytes

SOURCE = "stacks in text"
MOST_REASONS = 3
MOST_BYTES = 1 << 24
"""Of one file: the stacks of thousands of processes."""
MARKS = (b"hread", b"#", b"Process ", b"Error: ", b"PID", b"pid", b"ank")
"""One of these is in any text of stacks, unless its characters are wide."""
PY_SPY_FAILED = (b"Error: Failed to ", b"Error: Permission Denied", b"Error: Timed out")
OF_PROGRAMS = ("<module>", "_run_module_as_main")
ORDINALS = ("th", "st", "nd", "rd")


@dataclass
class _Thread:
    """What has been read of one thread so far, in the order of the text."""

    line: ThreadLine
    calls: list[FrameLine] = field(default_factory=list)

    def takes(self, call: FrameLine) -> bool:
        """Whether a call is one of this thread: values of variables are indented deeper than the calls of py-spy."""
        if call.tool is not self.line.tool:
            return call.tool is Tool.FAULTHANDLER and self.line.tool is Tool.GDB
        return call.tool is not Tool.PY_SPY or not self.calls or call.indent == self.calls[0].indent

    @property
    def is_main(self) -> bool:
        """Whether the outermost call is that of a program: faulthandler writes such a thread last."""
        return bool(self.calls) and self.calls[-1].function in OF_PROGRAMS

    def document(self) -> dict[str, Any]:
        """Return the thread as a bundle has it, innermost call first. Native calls count if they communicate, and all
        of those outside such a one; if there is nothing else, all that have a name."""
        in_order = self.calls[::-1] if self.line.tool is Tool.PYSTACK else self.calls
        outermost = max((at for at, call in enumerate(in_order) if not call.line and _communicates(call)), default=-1)
        chosen = [call for at, call in enumerate(in_order) if call.line or at == outermost]
        if self.line.tool is Tool.GDB and not any(call.line for call in in_order):
            chosen = [call for call in in_order[max(outermost, 0) :] if call.function != "??"]
        return {
            "tid": self.line.tid,
            "name": self.line.name,
            "active": self.line.is_active,
            "owns_gil": self.line.owns_gil,
            "frames": [{"function": call.function, "file": call.file, "line": call.line} for call in chosen],
        }


def _communicates(call: FrameLine) -> bool:
    return operation_of(call.function, call.file) is not None


@dataclass
class _Process:
    """What has been read of one process so far."""

    origin: TextOrigin
    pid: int | None = None
    command: str = ""
    is_named: bool = False
    """Whether a line of its own begins it."""
    parent: int | None = None
    threads: list[_Thread] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    dumps_again: bool = False

    @property
    def has_calls(self) -> bool:
        return any(thread.calls for thread in self.threads)

    def documents(self) -> list[dict[str, Any]]:
        """Return the threads, the main one first where its place shows it."""
        threads = list(self.threads)
        tool = threads[0].line.tool if threads else None
        if tool is Tool.FAULTHANDLER:
            threads.reverse()  # it writes the oldest thread, the main one, last
        elif tool is Tool.GDB:
            threads.sort(key=lambda thread: thread.line.number)
        elif tool is Tool.PYSTACK:
            threads.sort(key=lambda thread: (thread.line.tid != self.pid, thread.line.tid))
        found = [thread.document() for thread in threads]
        if found and tool is not Tool.PY_SPY:
            found[0]["name"] = MAIN
            found[0]["tid"] = self.main_tid or found[0]["tid"]
        return found

    @property
    def main_tid(self) -> int | None:
        """The process id, as far as the threads show it."""
        if self.pid is not None:
            return self.pid
        tool = self.threads[0].line.tool if self.threads else None
        if tool is Tool.PYSTACK:
            return min(thread.line.tid for thread in self.threads)
        if tool is Tool.GDB:
            return next((each.line.tid for each in self.threads if each.line.number == 1), None)
        return None


class _StackReader:
    """Puts lines together to processes."""

    def __init__(self, origin: TextOrigin, has_headers: bool) -> None:
        self._around = origin
        self._has_headers = has_headers
        self.processes = [_Process(origin)]
        self.problems: list[str] = []
        self._in_exception = False

    @property
    def _now(self) -> _Process:
        return self.processes[-1]

    def take(self, line: StackLine) -> None:
        if isinstance(line, ProcessLine):
            self._take_process(line)
        elif isinstance(line, OriginLine):
            origin = line.origin.within(self._around)
            self.processes.append(
                _Process(origin, origin.pid, is_named=origin.pid is not None or origin.rank is not None)
            )
        elif isinstance(line, ThreadLine):
            self._take_thread(line)
        elif isinstance(line, FrameLine):
            self._take_call(line)
        elif isinstance(line, DumpLine):
            self._now.dumps_again, self._in_exception = bool(self._now.threads), line.is_exception
        elif self._now.is_named and not self._now.threads:
            self._now.reasons.append(line.words)
        elif line.is_error:
            self.problems.append(line.words)

    def _take_process(self, line: ProcessLine) -> None:
        now = self._now
        if line.parent:
            now.parent = line.pid
            return
        if now.threads or now.reasons or now.command or (now.pid is not None and now.pid != line.pid):
            self._begin(now.origin)
        self._now.pid, self._now.command, self._now.is_named = line.pid, line.command, True

    def _take_thread(self, line: ThreadLine) -> None:
        now = self._now
        if self._begins_process(line):
            if line.tool is Tool.FAULTHANDLER and any(each.line.tid == line.tid for each in now.threads):
                now.threads.clear()  # the same process, later
            else:
                self._begin(now.origin)
        now, self._in_exception = self._now, False
        now.dumps_again = False
        now.threads.append(_Thread(line))
        is_main = line.tool is Tool.PY_SPY and line.name == MAIN
        if is_main and now.pid is None and line.is_kernels:
            now.pid = line.tid

    def _begins_process(self, line: ThreadLine) -> bool:
        """Whether a thread is one of a process that no line has begun."""
        now = self._now
        if not now.threads:
            return False
        if line.tool is Tool.PY_SPY:
            return line.name == MAIN and not self._has_headers and any(each.line.name == MAIN for each in now.threads)
        if line.tool is Tool.FAULTHANDLER:
            return now.dumps_again or now.threads[-1].is_main
        return any(each.line.tid == line.tid or each.line.number == line.number > 0 for each in now.threads)

    def _take_call(self, call: FrameLine) -> None:
        now = self._now
        if call.tool is Tool.GDB and call.number == 0 and (not now.threads or now.threads[-1].calls):
            self._take_thread(ThreadLine(Tool.GDB, 0, MAIN, number=1))
        threads = self._now.threads
        if threads and not self._in_exception and threads[-1].takes(call):
            threads[-1].calls.append(call)

    def _begin(self, origin: TextOrigin) -> None:
        self.processes.append(_Process(replace(origin, pid=None)))


def read_stack_text(path: Path, data: bytes) -> Found:
    """Read the processes in a text.

    Raises:
        NotThis: it shows no call of any of the tools, and no process that could not be read.
    """
    if not data.startswith(WIDE) and not any(mark in data for mark in MARKS):
        raise NotThis  # before its lines are taken apart: it may be long
    readers = [_read(passage) for passage in passages_of(_end_of(data))]
    read = [process for reader in readers for process in reader.processes]
    problems = tuple(f"py-spy: {words}" for reader in readers for words in reader.problems)
    if len(data) > MOST_BYTES:
        problems = (f"{path.name}: only its last {format_bytes(MOST_BYTES)} were read", *problems)
    rank = named_rank(path)
    if not any(process.has_calls or process.reasons for process in read):
        if rank is None or not problems or not data.lstrip().startswith(PY_SPY_FAILED):
            raise NotThis
        return Found((Reading(SOURCE, node_of(path), rank, why=problems[0]),))
    is_task = all(len(_of_ranks(reader.processes)) <= 1 for reader in readers)
    readings = [_reading(process, path, position, is_task) for position, process in enumerate(read, 1)]
    return replace(without_helpers(with_rank_of_file(rank, readings)), problems=problems)


def _end_of(data: bytes) -> bytes:
    """The last lines of a long text, as of a log that ends with stacks."""
    return data if len(data) <= MOST_BYTES else data[-MOST_BYTES:].partition(b"\n")[2]


def _read(passage: Passage) -> _StackReader:
    """Return the reader after the lines of a passage, with the processes that show anything."""
    origin = TextOrigin()
    for label in passage.labels:
        origin = origin_of_label(label).within(origin)
    lines = [parsed for line in passage.lines if line and (parsed := parse_line(line)) is not None]
    reader = _StackReader(origin, any(isinstance(line, ProcessLine) for line in lines))
    for line in lines:
        reader.take(line)
    reader.processes = [each for each in reader.processes if each.has_calls or each.reasons or each.command]
    return reader


def _of_ranks(processes: Iterable[_Process]) -> set[int | None]:
    return {each.pid for each in processes if definite_role(each.command, each.documents()) is None}


def _reading(process: _Process, path: Path, position: int, is_task: bool) -> Reading:
    origin, threads = process.origin, process.documents() if process.has_calls else None
    rank = origin.task if origin.rank is None and is_task else origin.rank
    node = origin.node or (f"task-{origin.task}" if origin.task is not None and not is_task else "") or node_of(path)
    why = None if threads else _why(process, path, position)
    local = origin.local_rank if origin.local_rank is not None else local_rank_of(process.command)
    return Reading(
        SOURCE, node, rank, local, process.main_tid, threads, why=why, command=process.command, parent=process.parent
    )


def _why(process: _Process, path: Path, position: int) -> str:
    """Return why a process could not be read, and where it is in the file."""
    words = "; ".join(dict.fromkeys(process.reasons[:MOST_REASONS])) or "the text shows no stack of it"
    ordinal = ORDINALS[position % 10] if position % 10 < len(ORDINALS) and position % 100 not in (11, 12, 13) else "th"
    return f"{words}; it is the {position}{ordinal} process in {path.name}"


def with_rank_of_file(rank: int | None, readings: list[Reading]) -> list[Reading]:
    """Give the rank in the name of the file to its process, if there is only one that may be a rank.

    A log may hold several dumps: where nothing tells their processes apart, the newest one counts.
    """
    ranks = [each for each in readings if definite_role(each.command, each.threads or ()) is None]
    if rank is None or not ranks or any(each.rank is not None for each in ranks):
        return readings
    if all(each.pid is None for each in ranks):
        return [replace(each, rank=rank) for each in readings if each is ranks[-1]]
    same = len({each.pid for each in ranks}) == 1
    return [replace(each, rank=rank) if same and each in ranks else each for each in readings]

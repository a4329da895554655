"""One line of stacks in text, as any of the common tools writes it: what it begins, or which call it is.

Process 835990: python -u pretrain_gpt.py --local_rank=3                       py-spy dump, ray stack
Thread 835990 (active): "MainThread"
    train (megatron/training.py:915)
Thread 0x00007f4aa36d9000 (most recent call first):                            faulthandler, torch's debug server
  File "megatron/training.py", line 915 in train
Thread 1 (Thread 0x7f4aa36d9000 (LWP 835990) "python"):                        gdb, cuda-gdb
#7  0x00007f8791454a5b in PMPI_Bcast () from /usr/lib64/libmpi.so.12
Traceback for thread 835990 (python) [Has the GIL] (most recent call last):    pystack
    (Python) File "megatron/training.py", line 915, in train
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from bigsci_launch.spy.inputs.origins import TextOrigin, origin_of

MAIN = "MainThread"


class Tool(Enum):
    """Who wrote a stack, which decides in which order the threads and the calls are."""

    PY_SPY = "py-spy"
    FAULTHANDLER = "faulthandler"
    GDB = "gdb"
    PYSTACK = "pystack"


@dataclass(frozen=True, slots=True)
class ProcessLine:
    """The beginning of a process. `parent` is True for the line that names its parent instead."""

    pid: int
    command: str = ""
    parent: bool = False


@dataclass(frozen=True, slots=True)
class OriginLine:
    """A separator or heading: what follows is from there."""

    origin: TextOrigin


@dataclass(frozen=True, slots=True)
class ThreadLine:
    """The beginning of a thread. `number` is its number in gdb, where the main thread is 1; else 0.

    `tid` is the number of Python, an address, unless `is_kernels`.
    """

    tool: Tool
    tid: int
    name: str | None = None
    is_active: bool = False
    owns_gil: bool = False
    number: int = 0
    is_kernels: bool = False


@dataclass(frozen=True, slots=True)
class FrameLine:
    """A call. `line` is 0 for one of native code, whose `file` is a library; `number` is its place in gdb's list."""

    tool: Tool
    indent: int
    function: str
    file: str
    line: int
    number: int = -1


@dataclass(frozen=True, slots=True)
class ReasonLine:
    """Why a process could not be read. `is_error`: py-spy says so in a line of its own."""

    words: str
    is_error: bool = False


@dataclass(frozen=True, slots=True)
class DumpLine:
    """What faulthandler writes before a new dump; `is_exception`: an exception follows, which is no stack."""

    is_exception: bool = False


StackLine = ProcessLine | OriginLine | ThreadLine | FrameLine | ReasonLine | DumpLine

PROCESS = re.compile(r" *(?:(Parent) [Pp]rocess|Process) (\d{1,9}): ?(.*)$")
ATTACHED = re.compile(r" *Attaching to (?:program: .{0,300}, )?process (\d{1,9})$")
RAY = re.compile(r" *Stack dump for \S+ +(\d{1,9})\b")
SEPARATOR = re.compile(r" *(?:[=#*~+-]{2,}|==>) *([^\s=#*~+].{0,200}?) *(?:[=#*~+-]{2,}|<==)?$")
HEADING = re.compile(r" *((?:Rank|rank|RANK|pid|PID|Pid) {0,1}[:=#]? {0,1}\d{1,9}(?:: *https?://\S{1,200}|:)?)$")
PY_SPY_THREAD = re.compile(r' *Thread (0x[0-9A-Fa-f]{1,16}|\d{1,20}) \(([a-z+]{1,40})\)(?:: "(.*)")?$')
FAULTHANDLER_THREAD = re.compile(
    r" *(?:Current thread|Thread) 0x([0-9a-f]{1,16})(?: \[(.*)\])? \(most recent call first\):$"
)
GDB_THREAD = re.compile(r" *Thread (\d{1,7}) \((?:Thread 0x[0-9a-fA-F]{1,16} )?\(?LWP (\d{1,9})\)?(.*)$")
PYSTACK_THREAD = re.compile(r" *Traceback for thread (\d{1,9}) \([^()]{0,200}\) \[(.*)\] \(most recent call last\):$")
PY_BT = re.compile(r" *Traceback \(most recent call first\):$")
EXCEPTION = re.compile(r".{0,200}Traceback \(most recent call last\):$")
NEW_DUMP = re.compile(r" *(?:Fatal Python error: |Timeout \(\d+:\d\d:\d\d)")
FILE_FRAME = re.compile(r'( *)(\(Python\) |\(C\) )?File "(.*)", line (\d{1,9}|\?\?\?),? in (.+)$')
GDB_FRAME = re.compile(r" *#(\d{1,5}) +(?:0x[0-9a-fA-F]{1,16} in )?(\S.*)$")
GDB_PYTHON = re.compile(r"for file (.{1,500}), line (\d{1,9}), in (\S{1,200})")
CLONE = re.compile(r"(?:\.(?:isra|part|constprop|cold|lto_priv)\b.*|@.*)$")
REASON = re.compile(r" *(Error|Reason): (.*)$|.*\b(EPERM|Operation not permitted|in D state|uninterruptible sleep)\b")
NO_LIBRARY = "<native>"


def parse_line(line: str) -> StackLine | None:
    """Return what a line is, or None if it is none of these."""
    if words := PROCESS.match(line):
        return ProcessLine(int(words[2]), words[3], parent=words[1] is not None)
    if words := ATTACHED.match(line) or RAY.match(line):
        return ProcessLine(int(words[1]))
    return _parse_thread(line) or _parse_origin(line) or _parse_frame(line) or _parse_reason(line)


def _parse_thread(line: str) -> ThreadLine | DumpLine | None:
    if "hread " not in line and "rror: " not in line and "imeout (" not in line and "raceback (" not in line:
        return None
    if words := GDB_THREAD.match(line):
        number = int(words[1])
        return ThreadLine(
            Tool.GDB, int(words[2]), MAIN if number == 1 else words[3].strip(' "):') or None, number=number
        )
    if words := PY_SPY_THREAD.match(line):
        state = words[2]
        return ThreadLine(
            Tool.PY_SPY, int(words[1], 0), words[3], "active" in state, "gil" in state, 0, words[1].isdigit()
        )
    if words := FAULTHANDLER_THREAD.match(line):
        return ThreadLine(Tool.FAULTHANDLER, int(words[1], 16), words[2])
    if words := PYSTACK_THREAD.match(line):
        return ThreadLine(Tool.PYSTACK, int(words[1]), owns_gil="Has the GIL" in words[2])
    if PY_BT.match(line):
        return ThreadLine(Tool.FAULTHANDLER, 0)
    if EXCEPTION.match(line):
        return DumpLine(is_exception=True)
    return DumpLine() if NEW_DUMP.match(line) else None


def _parse_frame(line: str) -> FrameLine | None:
    if words := GDB_FRAME.match(line):
        return _parse_gdb(int(words[1]), words[2])
    if 'File "' in line and (words := FILE_FRAME.match(line)):
        tool = Tool.PYSTACK if words[2] else Tool.FAULTHANDLER
        number = int(words[4]) if words[4].isdigit() else 0
        if words[2] and words[2].startswith("(C)"):
            function, _, library = words[5].removesuffix(")").partition(" (")
            return FrameLine(tool, len(words[1]), function, library or NO_LIBRARY, 0)
        return FrameLine(tool, len(words[1]), words[5], words[3], number)
    head, opened, place = line.removesuffix(")").rpartition(" (")
    if not opened or not line.endswith(")") or not place or not head.strip():
        return None
    file, _, number_text = place.rpartition(":")
    indent = len(head) - len(head.lstrip(" "))
    if file and number_text.isdigit():
        return FrameLine(Tool.PY_SPY, indent, head.strip(), file, int(number_text[:9]))
    return FrameLine(Tool.PY_SPY, indent, head.strip(), place, 0)


def _parse_gdb(number: int, rest: str) -> FrameLine:
    """`PMPI_Bcast (..) from /usr/lib64/libmpi.so.12`, `foo (x=1) at foo.c:12`, or a frame of Python."""
    if words := GDB_PYTHON.search(rest):
        return FrameLine(Tool.GDB, 0, words[3], words[1], int(words[2]), number)
    call, _, library = rest.rpartition(" from ")
    if not call:
        call, library = rest, NO_LIBRARY
    name = call.replace("(anonymous namespace)::", "").partition("(")[0].partition("<<<")[0].strip()
    return FrameLine(Tool.GDB, 0, CLONE.sub("", name) or "??", library, 0, number)


def _parse_origin(line: str) -> OriginLine | None:
    words = SEPARATOR.match(line) or HEADING.match(line)
    origin = origin_of(words[1]) if words else TextOrigin()
    return OriginLine(origin) if origin.is_known else None


def _parse_reason(line: str) -> ReasonLine | None:
    words = REASON.match(line) if "E" in line or "R" in line or "in" in line or "per" in line else None
    return ReasonLine((words[2] or line).strip(), words[1] == "Error") if words else None

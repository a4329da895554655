"""Traces the calls of the packages that `trace.json` names, in the process that imports this. Python 3.8 or newer.

BSL_TRACE names that file, in `requests/` of an attempt; BSL_RING_DIR the folder of the node in which the trace is kept,
as `PID.calls`. The file may change while the program runs: `bsl trace on` and `off` write it, and the thread of the
ring looks for it. Whatever goes wrong here must not reach the program: it runs on without a trace, and one line on
stderr has the reason.
"""

from __future__ import annotations

import atexit
import os
import threading

import ring_hook
import safe_files
from calls_build import load_native
from calls_file import KINDS, STEP, CallsFile
from calls_ways import HAS_MONITORING, Monitoring, NativeProfile, PythonProfile

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from types import CodeType, FrameType, ModuleType
    from typing import Any

UNKNOWN = ~KINDS & 0xFFFFFFFF
"""Number of a function for whose name there was no room."""

OTHERS = "calls are missing where the program has set a profile function of its own"


class Trace:
    """One request: which packages, and from when on. `from_step` and `from_call` may be None: from now on."""

    def __init__(self, packages: list[str], from_step: int | None, from_call: str | None) -> None:
        self.packages = tuple(packages)
        self._prefixes = tuple(f"{package}." for package in packages)
        self._from_step, self._from_call = from_step, from_call
        self._is_waiting = from_call is not None
        self._file: CallsFile | None = None
        self._why_python = ""
        self._lock = threading.RLock()
        self._is_over = self._has_others = False
        self._step = -1
        self._way: Any = None
        if from_step is None:
            self.begin()

    def begin(self) -> None:
        """Ask Python for the calls."""
        native: ModuleType | None = None
        try:
            native = load_native(os.environ["BSL_RING_DIR"])
        except (OSError, RuntimeError, ImportError) as error:
            self._why_python = str(error)
        if HAS_MONITORING:
            self._way = Monitoring(native, self.number_of, self.make_lane)
        elif native is not None:
            self._way = NativeProfile(native, self.number_of, self.make_lane)
        else:
            self._way = PythonProfile(self.number_of, self.make_lane)
        self._note_others(self._way.begin())

    def number_of(self, code: CodeType, frame: FrameType | None) -> int:
        """Return the number of a function; 0 if it is not traced."""
        module = str(frame.f_globals.get("__name__")) if frame is not None else "?"
        function = getattr(code, "co_qualname", code.co_name)
        if self._is_waiting:
            if self._from_call not in (f"{module}:{function}", f"{module}:{code.co_name}"):
                return 0
            self._is_waiting = False
            self._way.renumber()
        if self._is_over or not (module in self.packages or module.startswith(self._prefixes)):
            return 0
        opened = self._open()
        if opened is None:
            return 0
        return opened.name(f"{module}.{function} {code.co_filename}:{code.co_firstlineno}") or UNKNOWN

    def make_lane(self) -> Any:
        """Return the memory of a new lane for this thread; None if there is none."""
        opened = self._open()
        return opened.lane() if opened is not None else None

    def _open(self) -> CallsFile | None:
        with self._lock:
            if self._file is None and not self._is_over:
                try:
                    self._file = self._make_file()
                except (OSError, ValueError) as error:
                    self._is_over = True
                    ring_hook.say(f"no calls are traced: {error}")
            return self._file

    def _make_file(self) -> CallsFile:
        path = os.path.join(os.environ["BSL_RING_DIR"], f"{os.getpid()}.calls")
        if os.path.exists(path):
            os.unlink(path)  # of an earlier trace, or of a process that had this number before
        why = f" ({self._why_python})" if self._why_python else ""
        return CallsFile(
            path,
            packages=", ".join(self.packages),
            how=f"{self._way.how}{why}" + (f"; {OTHERS}" if self._has_others else ""),
            rank=ring_hook.number("RANK"),
            world_size=ring_hook.number("WORLD_SIZE"),
            start_ticks=ring_hook.start_ticks(),
        )

    def reach(self, step: int) -> None:
        """The program is in this step now."""
        if self._is_over or step == self._step:
            return
        self._step = step
        if self._way is None:
            if self._from_step is None or step < self._from_step:
                return
            self.begin()
        if not self._is_waiting and self._open() is not None:
            self._way.mark(STEP | step)
            self.check()

    def check(self) -> None:
        """Say so if this thread is no longer traced, because the program has set a profile function of its own."""
        if self._way is not None and not self._is_over and not self._way.is_ours():
            self._note_others(1)

    def renew(self) -> None:
        """Include threads that have started since."""
        if self._way is not None and not self._is_over:
            self._note_others(self._way.renew())

    def _note_others(self, num_threads: int) -> None:
        if num_threads and not self._has_others:
            self._has_others = True
            if self._file is not None:
                self._file.say(f"{self._way.how}; {OTHERS}")
            ring_hook.say(OTHERS)

    def end(self) -> None:
        """Stop tracing. The file stays until the program ends."""
        self._is_over = True
        if self._way is not None:
            self._way.end()
        if self._file is not None:
            self._file.say(f"{self._way.how}, until bsl trace off")

    def forget(self) -> None:
        """Keep a file of its own from here on."""
        self._lock = threading.RLock()
        self._file = None
        if self._way is not None:
            self._way.forget()
            self._way.renumber()

    @property
    def path(self) -> str | None:
        return self._file.path if self._file is not None else None


_state: dict[str, Any] = {"trace": None, "seen": None}


def follow() -> None:
    """Follow `trace.json`, if it has changed."""
    path = os.environ.get("BSL_TRACE", "")
    try:
        now = os.stat(path)
        seen = (now.st_ino, now.st_mtime_ns)
        if seen != _state["seen"]:
            _state["seen"] = seen
            obey(safe_files.read_json(path))
    except FileNotFoundError:
        return
    except Exception as error:
        ring_hook.say(f"{path}: {error}")


def obey(request: dict[str, Any]) -> None:
    """End the trace that is on, and begin the one that is wanted."""
    before: Trace | None = _state["trace"]
    if before is not None:
        _state["trace"] = None
        before.end()
        keep_copy(before)
    if request["include"]:
        _state["trace"] = Trace(request["include"], request.get("from_step"), request.get("from_call"))


def keep_copy(trace: Trace) -> None:
    """Copy a trace that was switched off into the attempt, where `bsl trace export` reads it at once."""
    rank = ring_hook.number("RANK")
    if trace.path is None or rank < 0:
        return
    import shutil
    import tempfile

    folder = os.path.join(os.path.dirname(os.path.dirname(os.environ["BSL_TRACE"])), "rings")
    copy = os.path.join(folder, f"rank-{rank:04d}.calls")
    try:
        os.makedirs(folder, exist_ok=True)
        handle, part = tempfile.mkstemp(prefix=f".rank-{rank:04d}.calls.", dir=folder)
        with safe_files.open_stream(trace.path) as source, os.fdopen(handle, "wb") as stream:
            shutil.copyfileobj(source, stream)
            os.fchmod(handle, 0o644)
        os.replace(part, copy)
    except OSError as error:
        ring_hook.say(f"{copy}: {error}")


def reach(step: int) -> None:
    trace: Trace | None = _state["trace"]
    if trace is not None:
        trace.reach(step)


def renew() -> None:
    trace: Trace | None = _state["trace"]
    if trace is not None:
        trace.renew()


def check() -> None:
    trace: Trace | None = _state["trace"]
    if trace is not None:
        trace.check()


def forget() -> None:
    """This is a forked child: it must not write into the memory of its parent."""
    trace: Trace | None = _state["trace"]
    if trace is not None:
        trace.forget()


atexit.register(check)

"""The ways to see the calls of a program: a profile function, or sys.monitoring; each in C or in Python.

A way asks the trace once for each code object what its number is (0: it is not traced), and writes an event when a call
of it begins and when it ends. Standard library, Python 3.8 or newer.
"""

from __future__ import annotations

import sys
import threading
from _thread import get_ident
from time import time_ns

from calls_file import COUNT, COUNT_AT, ENTER, EVENT, LANE, LEAVE, NUM_EVENTS

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType, ModuleType
    from typing import Any

    NumberOf = Callable[[CodeType, FrameType], int]
    MakeLane = Callable[[], Any]

HAS_MONITORING = sys.version_info >= (3, 12)
TOOL_IDS = (3, 4, 2)
"""Of sys.monitoring, the free ones first: 2 is meant for profilers, and the program may run one."""


MAX_CODES = 1 << 17
FIRST_EVENT_AT = LANE.size
PACK_EVENT, PACK_COUNT = EVENT.pack_into, COUNT.pack_into


class Lane:
    """The events of one thread. Without memory (the file has no room) they are not kept."""

    __slots__ = ("count", "memory")

    def __init__(self, memory: Any) -> None:
        self.memory, self.count = memory, 0

    def write(self, what: int) -> None:
        memory, count = self.memory, self.count
        if memory is not None:
            PACK_EVENT(memory, FIRST_EVENT_AT + count % NUM_EVENTS * 16, time_ns(), what, count & 0xFFFFFFFF)
            self.count = count = count + 1
            PACK_COUNT(memory, COUNT_AT, count)


class Lanes:
    """The lanes of all threads, for the ways that are written in Python."""

    def __init__(self, make_lane: MakeLane) -> None:
        self._make = make_lane
        self.by_thread: dict[int, Lane] = {}

    def own(self) -> Lane:
        try:
            return self.by_thread[get_ident()]
        except KeyError:
            found = self.by_thread[get_ident()] = Lane(self._make())
            return found

    def forget(self) -> None:
        self.by_thread.clear()


class Numbers(dict):  # type: ignore[type-arg]  # Python 3.8 has no dict[...]
    """The numbers of code objects by their ids, which is much faster than by themselves."""

    def __init__(self, number_of: NumberOf) -> None:
        super().__init__()
        self._number_of = number_of
        self._codes: list[CodeType] = []

    def ask(self, code: CodeType, frame: FrameType) -> int:
        number = self._number_of(code, frame)
        if len(self._codes) == MAX_CODES:  # of a program that makes functions without end
            self.forget()
        self._codes.append(code)  # its id must not become that of another one
        self[id(code)] = number
        return number

    def forget(self) -> None:
        self.clear()
        self._codes.clear()


class NativeProfile:
    """A profile function in C, of all threads (before Python 3.9: of those that begin it)."""

    def __init__(self, native: ModuleType, number_of: NumberOf, make_lane: MakeLane) -> None:
        self.how = "a profile function in C"
        self._native = native
        native.set_up(number_of, make_lane, None)
        native.renumber()

    def begin(self) -> int:
        """Return how many threads have a profile function of their own, which is left alone."""
        if sys.version_info < (3, 9):
            in_main_thread(lambda: self._native.begin_profile(False))
            return 0
        threading.setprofile(self._first)
        return int(self._native.begin_profile(True))

    def renew(self) -> int:
        """Include threads that C++ has started since."""
        return int(self._native.begin_profile(True)) if sys.version_info >= (3, 9) else 0

    def _first(self, _frame: FrameType, _event: str, _argument: Any) -> None:
        sys.setprofile(None)
        self._native.begin_profile(False)

    def end(self) -> None:
        threading.setprofile(None)
        self._native.end_profile()

    def is_ours(self) -> bool:
        return bool(self._native.is_profiling())

    def mark(self, what: int) -> None:
        self._native.mark(what)

    def renumber(self) -> None:
        self._native.renumber()

    def forget(self) -> None:
        self._native.renumber()


class PythonProfile:
    """A profile function in Python, of the main thread and of threads that start later."""

    def __init__(self, number_of: NumberOf, make_lane: MakeLane) -> None:
        self.how = "a profile function in Python"
        self._make_lane = make_lane
        self._numbers = Numbers(number_of)
        self._is_on = False
        self._others = 0

    def begin(self) -> int:
        self._is_on = True
        threading.setprofile(self._first)
        in_main_thread(self._begin_here)
        return self._others

    def renew(self) -> int:
        """Threads that run can only be traced by themselves."""
        return 0

    def _begin_here(self) -> None:
        if sys.getprofile() is None:
            sys.setprofile(self._recorder())
        else:
            self._others += 1

    def _first(self, frame: FrameType, event: str, argument: Any) -> None:
        recorder = self._recorder()
        sys.setprofile(recorder)
        recorder(frame, event, argument)

    def _recorder(self) -> Callable[[FrameType, str, Any], None]:
        """Return the profile function of this thread; its attribute `mark` writes another kind of event.

        What it needs are its own variables, and it calls nothing that it can do itself: it runs twice for each call.
        """
        number_of, ident, now, pack, tell = self._numbers.get, id, time_ns, PACK_EVENT, PACK_COUNT
        memory: Any = None
        count = -1

        def record(frame: FrameType, event: str, _argument: Any) -> None:
            nonlocal count
            if event == "call":
                kind = ENTER
            elif event == "return":
                kind = LEAVE
            else:
                return
            number = number_of(ident(frame.f_code))
            if number is None:
                number = self._ask(frame.f_code, frame)
            if number:
                if count < 0:
                    open_lane()
                if memory is not None:
                    pack(memory, FIRST_EVENT_AT + count % NUM_EVENTS * 16, now(), number | kind, count & 0xFFFFFFFF)
                    count += 1
                    tell(memory, COUNT_AT, count)

        def mark(what: int) -> None:
            nonlocal count
            if count < 0:
                open_lane()
            if memory is not None:
                pack(memory, FIRST_EVENT_AT + count % NUM_EVENTS * 16, now(), what, count & 0xFFFFFFFF)
                count += 1
                tell(memory, COUNT_AT, count)

        def open_lane() -> None:
            nonlocal memory, count
            memory, count = self._make_lane(), 0

        record.mark = mark  # type: ignore[attr-defined]
        return record

    def _ask(self, code: CodeType, frame: FrameType) -> int:
        if not self._is_on:
            sys.setprofile(None)
            return 0
        return self._numbers.ask(code, frame)

    def end(self) -> None:
        """Other threads end when they come to a function that has no number yet."""
        self._is_on = False
        threading.setprofile(None)
        self.renumber()
        in_main_thread(lambda: sys.setprofile(None) if self.is_ours() else None)

    def is_ours(self) -> bool:
        return getattr(sys.getprofile(), "__module__", "") == __name__

    def mark(self, what: int) -> None:
        if self.is_ours():
            sys.getprofile().mark(what)  # type: ignore[union-attr]

    def renumber(self) -> None:
        self._numbers.forget()

    def forget(self) -> None:
        if self.is_ours():
            sys.setprofile(self._recorder())


class Monitoring:
    """Callbacks of sys.monitoring, in C or in Python: they are called for all threads, and a function that is not
    traced calls them once."""

    def __init__(self, native: ModuleType | None, number_of: NumberOf, make_lane: MakeLane) -> None:
        self._native, self._lanes = native, Lanes(make_lane)
        self._numbers = Numbers(number_of)
        monitoring = self._monitoring = sys.monitoring  # type: ignore[attr-defined]
        free = [each for each in TOOL_IDS if monitoring.get_tool(each) is None]
        if not free:
            raise RuntimeError("other tools have taken sys.monitoring")
        self._tool = free[0]
        if native is not None:
            native.set_up(number_of, make_lane, monitoring.DISABLE)
            native.renumber()
        self.how = f"sys.monitoring in {'Python' if native is None else 'C'}"

    def begin(self) -> int:
        monitoring, native = self._monitoring, self._native
        monitoring.use_tool_id(self._tool, "bsl")
        if native is not None:
            enter, leave, throw, unwind = native.enter, native.leave, native.enter_by_throw, native.unwind
        else:
            enter, leave = self._callback(ENTER), self._callback(LEAVE)
            throw, unwind = self._enter_by_throw, self._unwind
        events = monitoring.events
        callbacks = {
            events.PY_START: enter, events.PY_RESUME: enter, events.PY_THROW: throw,
            events.PY_RETURN: leave, events.PY_YIELD: leave, events.PY_UNWIND: unwind,
        }  # fmt: skip
        for event, callback in callbacks.items():
            monitoring.register_callback(self._tool, event, callback)
        monitoring.set_events(self._tool, sum(callbacks))
        monitoring.restart_events()
        return 0

    def renew(self) -> int:
        """All threads are traced already."""
        return 0

    def _callback(self, kind: int) -> Callable[..., Any]:
        """Return what is called for each begin or end of a traced function, and once for another one."""
        number_of, lanes, disable = self._numbers.get, self._lanes.by_thread, self._monitoring.DISABLE
        thread, ident, now, pack, tell = get_ident, id, time_ns, PACK_EVENT, PACK_COUNT

        def event(code: CodeType, _offset: int, _value: Any = None) -> Any:
            number = number_of(ident(code))
            if number is None:
                number = self._numbers.ask(code, sys._getframe(1))
            if not number:
                return disable
            lane = lanes.get(thread()) or self._lanes.own()
            if lane.memory is not None:  # as in Lane.write, which would cost a fifth of this function
                count = lane.count
                pack(lane.memory, FIRST_EVENT_AT + count % NUM_EVENTS * 16, now(), number | kind, count & 0xFFFFFFFF)
                lane.count = count = count + 1
                tell(lane.memory, COUNT_AT, count)
            return None

        return event

    def _enter_by_throw(self, code: CodeType, _offset: int, _error: BaseException) -> None:
        self._write_known(code, ENTER)

    def _unwind(self, code: CodeType, _offset: int, _error: BaseException) -> None:
        self._write_known(code, LEAVE)

    def _write_known(self, code: CodeType, kind: int) -> None:
        """Write an event of a function that has a number: it is not switched off for others."""
        number = self._numbers.get(id(code))
        if number:
            self._lanes.own().write(number | kind)

    def end(self) -> None:
        self._monitoring.set_events(self._tool, 0)
        self._monitoring.free_tool_id(self._tool)

    def is_ours(self) -> bool:
        return True

    def mark(self, what: int) -> None:
        if self._native is not None:
            self._native.mark(what)
        else:
            self._lanes.own().write(what)

    def renumber(self) -> None:
        self._numbers.forget()
        if self._native is not None:
            self._native.renumber()
        self._monitoring.restart_events()

    def forget(self) -> None:
        self._lanes.forget()
        if self._native is not None:
            self._native.renumber()


def in_main_thread(action: Callable[[], Any]) -> None:
    """Run `action` in the main thread: at once, or when it next runs Python code."""
    if threading.current_thread() is threading.main_thread():
        action()
        return
    import ctypes

    def call(_nothing: Any) -> int:
        action()
        return 0

    wrapped = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(call)
    _pending.append(wrapped)  # it must live until it is called
    ctypes.pythonapi.Py_AddPendingCall(wrapped, None)


_pending: list[Any] = []

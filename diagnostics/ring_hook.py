"""Opens the ring of this process at its first recorded call, and keeps its heartbeat. Standard library, Python 3.8.

`BSL_RING_DIR` names the folder of the node's rings; without it nothing is recorded. A ring is named after the process,
`PID.ring`, and its header says which rank that is. Whatever goes wrong here must not reach the program: it runs on
without a ring, and one line on stderr says why.

A thread writes the heartbeat: it stands still in a process whose threads cannot run, such as one that holds the GIL in
C. faulthandler's timer is not used: in a child that was forked while it ran, Python waits for it for ever.
"""

from __future__ import annotations

import os
import sys
import threading
from _thread import get_ident

from ring_file import Ring

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from typing import Any

    from ring_file import Lane

BEAT_S = 10.0
HERE = os.path.dirname(os.path.abspath(__file__))

_lock = threading.RLock()
_lanes: dict[int, Lane | None] = {}
_state: dict[str, Any] = {"ring": None, "is_off": False, "is_marked": False}


def ring() -> Ring | None:
    """Return the ring of this process, which the first call opens; None if there can be none."""
    found = _state["ring"]
    if found is None and not _state["is_off"]:
        with _lock:
            if _state["ring"] is None and not _state["is_off"]:
                _state["ring"] = _open()
                _state["is_off"] = _state["ring"] is None
            return _state["ring"]  # type: ignore[no-any-return]
    return found  # type: ignore[no-any-return]


def opened() -> Ring | None:
    """Return the ring of this process, or None if it has none yet."""
    return _state["ring"]  # type: ignore[no-any-return]


def lane() -> Lane | None:
    """Return the lane of this thread; None if it has none."""
    thread = get_ident()
    try:
        return _lanes[thread]
    except KeyError:
        here = ring()
        found = _lanes[thread] = here.lane() if here is not None else None
        return found


def mark(step: int, phase: str) -> None:
    """Write which step the process is in, and what it does in it."""
    here = ring()
    if here is not None:
        _state["is_marked"] = True
        here.mark(step, phase)
        reach(step)


def reach(step: int) -> None:
    """Tell a call trace which step the program is in."""
    trace = sys.modules.get("calls_trace")
    if trace is not None:
        trace.reach(step)


def follow_trace() -> None:
    """Begin or end a call trace if `trace.json` wants it; without that file nothing of it is imported."""
    trace = sys.modules.get("calls_trace")
    if trace is None:
        if not os.path.exists(os.environ.get("BSL_TRACE", "")):
            return
        sys.path.append(HERE)
        try:
            import calls_trace as trace  # type: ignore[no-redef]
        finally:
            sys.path.remove(HERE)
    trace.follow()
    trace.renew()


def is_marked() -> bool:
    """Whether the program marks its steps itself."""
    return bool(_state["is_marked"])


def _open() -> Ring | None:
    folder = os.environ.get("BSL_RING_DIR")
    if not folder:
        return None
    path = os.path.join(folder, f"{os.getpid()}.ring")
    try:
        if os.path.exists(path):
            os.unlink(path)  # of a process that had this number before
        made = Ring(path, rank=number("RANK"), world_size=number("WORLD_SIZE"), start_ticks=start_ticks())
        threading.Thread(target=_beat, args=(made,), name="bsl-ring", daemon=True).start()
    except (OSError, ValueError, RuntimeError) as error:
        say(f"no ring of the last calls is kept: {path}: {error}")
        return None
    return made


def say(text: str) -> None:
    try:
        os.write(2, f"bsl: {text}\n".encode("utf-8", "replace"))
    except OSError:
        pass


def number(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else -1


def start_ticks() -> int:
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as stream:
            return int(stream.read().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def _beat(here: Ring) -> None:
    pause = threading.Event()
    while _state["ring"] in (None, here):
        here.beat()
        follow_trace()
        pause.wait(BEAT_S)


def _after_fork() -> None:
    """A child has none of its parent's threads, and must not write into its parent's ring."""
    global _lock
    _lock = threading.RLock()
    _lanes.clear()
    _state.update(ring=None, is_off=False)
    trace = sys.modules.get("calls_trace")
    if trace is not None:
        trace.forget()


os.register_at_fork(after_in_child=_after_fork)

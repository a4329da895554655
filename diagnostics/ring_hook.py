"""Opens the ring of this process at its first recorded call, and keeps its heartbeat. Standard library, Python 3.8.

`BSL_RING_DIR` names the folder of the node's rings; without it nothing is recorded. A ring is named after the process,
`PID.ring`, and its header has the rank. Whatever goes wrong here must not reach the program: it runs on
without a ring, and one line on stderr has the reason.

A thread writes the heartbeat: it stands still in a process whose threads cannot run, such as one that holds the GIL in
C. The runner of the rank sees that, and sends this thread, and no other, a signal: its handler, faulthandler's, is in C
and writes the stacks of all threads to `PID.stacks`. faulthandler's timer is not used. It would write them as well when
a process resumes that was stopped, while its threads run, which ends some with SIGSEGV; in a child that was forked
while it ran, Python waits for it for ever; and there is one only, which may be the program's.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from _thread import get_ident

from ring_file import FACTS, NONE, Ring

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from ring_file import Lane

HEARTBEAT_S = 10.0
HERE = os.path.dirname(os.path.abspath(__file__))
# As in rank_stacks.py. By the name, the runner finds the thread among those of the process.
HEARTBEAT_THREAD = "bsl-ring"
STACKS_SIGNAL = signal.SIGRTMAX - 5

_lock = threading.RLock()
_lanes: dict[int, Lane | None] = {}
_state: dict[str, Any] = {"ring": None, "is_off": False, "is_marked": False, "stacks": None}


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


def has_lane() -> bool:
    """Whether this thread has written a call."""
    return _lanes.get(get_ident()) is not None


def mark(step: int, phase: str) -> None:
    """Write which step the process is in, and what it does in it."""
    here = ring()
    if here is not None:
        _state["is_marked"] = True
        here.mark(step, phase)
        own = lane() if phase else None
        if own is not None:
            own.leave(own.enter(FACTS.pack(here.name("phase"), 0, 0, here.name(phase), NONE, NONE)))
        reach(step)


def place(topology: str) -> None:
    """Write where each rank is into the ring of this process, now or when it begins."""
    os.environ["BSL_TOPOLOGY"] = topology
    found = opened()
    if found is not None:
        found.place(topology)


def each_batch(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches of a program that has no `DataLoader`; write how long it takes to get each of them."""
    while True:
        here, own = ring(), lane()
        begun = None
        if here is not None and own is not None:
            begun = own, own.enter(FACTS.pack(here.name("next batch"), 0, 0, 0, NONE, NONE))
        try:
            batch = next(batches)
        except StopIteration:
            return
        finally:
            if begun is not None:
                begun[0].leave(begun[1])
        yield batch


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
            import calls_trace as trace
        finally:
            sys.path.remove(HERE)
    assert trace is not None
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
        made = Ring(
            path,
            rank=number("RANK"),
            world_size=number("WORLD_SIZE"),
            start_ticks=start_ticks(),
            topology=os.environ.get("BSL_TOPOLOGY", ""),
            mode=0o640,
        )
        threading.Thread(target=_heartbeat, args=(made,), name=HEARTBEAT_THREAD, daemon=True).start()
        if os.environ.get("BSL_TRACE"):
            threading.Thread(target=_follow, args=(made,), name="bsl-trace", daemon=True).start()
    except (OSError, ValueError, RuntimeError) as error:
        say(f"no ring of the last calls is kept: {path}: {error}")
        return None
    return made


def say(text: str) -> None:
    try:
        os.write(2, f"bsl: {' '.join(text.splitlines())}\n".encode("utf-8", "replace"))
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


def _heartbeat(here: Ring) -> None:
    pause = threading.Event()
    stacks = _offer_stacks(here.path)
    while _state["ring"] in (None, here):
        here.beat()
        stacks = _forget_stacks(stacks)
        pause.wait(HEARTBEAT_S)


def _follow(here: Ring) -> None:
    """Look for requests to trace calls, which are on the shared file system: the heartbeat must not wait for that."""
    pause = threading.Event()
    while _state["ring"] in (None, here):
        try:
            follow_trace()
        except Exception as error:
            say(f"calls are not traced: {error!r}")
            return
        pause.wait(HEARTBEAT_S)


def _offer_stacks(ring_path: str) -> tuple[int, tuple[int, int]] | None:
    """Have a signal to this thread write all stacks; return the file, open, and what it is. None if that cannot be."""
    try:
        if _is_caught(STACKS_SIGNAL):
            return None  # it is the program's
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW
        descriptor = os.open(os.path.splitext(ring_path)[0] + ".stacks", flags, 0o640)
        faulthandler.register(STACKS_SIGNAL, file=descriptor, all_threads=True)
        _state["stacks"] = descriptor
        with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w", encoding="utf-8") as name:
            name.write(HEARTBEAT_THREAD)
        return descriptor, _identity(descriptor)
    except (OSError, ValueError, RuntimeError):
        return None


def _forget_stacks(stacks: tuple[int, tuple[int, int]] | None) -> tuple[int, tuple[int, int]] | None:
    """Empty the file: the stacks in it are of a time when this thread could not run, and now it does."""
    if stacks is None:
        return None
    try:
        descriptor, identity = stacks
        if _identity(descriptor) == identity:
            if os.fstat(descriptor).st_size:
                os.ftruncate(descriptor, 0)
            return stacks
    except OSError:
        pass
    faulthandler.unregister(STACKS_SIGNAL)  # the program has closed the file, and its number may be another one's
    _state["stacks"] = None
    return None


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _is_caught(number: int) -> bool:
    """Whether the process has a handler for a signal, also one that Python does not know of."""
    with open("/proc/self/status", encoding="utf-8", errors="replace") as stream:
        caught = next(line for line in stream if line.startswith("SigCgt:")).split()[1]
    return bool(int(caught, 16) >> (number - 1) & 1)


def _after_fork() -> None:
    """A child has none of its parent's threads, and must not write into its parent's ring."""
    global _lock
    _lock = threading.RLock()
    _lanes.clear()
    if _state["stacks"] is not None:
        faulthandler.unregister(STACKS_SIGNAL)
    _state.update(ring=None, is_off=False, stacks=None)
    trace = sys.modules.get("calls_trace")
    if trace is not None:
        trace.forget()


def _have_torch_record() -> None:
    """Have NCCL's recorder of a torch that keeps nothing by default keep what a newer one does.

    The runner cannot: to a newer torch, this name is an old one, and it warns.
    """
    version = str(getattr(sys.modules.get("torch"), "__version__", "")).split(".")
    if version[0].isdigit() and version[1].isdigit() and (int(version[0]), int(version[1])) < (2, 9):
        os.environ.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000")


os.register_at_fork(after_in_child=_after_fork)
_have_torch_record()

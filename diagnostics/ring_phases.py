"""Writes into the ring what a rank does between its collectives: forward, backward, optimizer step, garbage collection.

Of DDP, whose reduction of gradients is in C++, it writes when the rank has its own gradients and waits for those of the
others: a collective like others, with a number. The other records are apart from calls of torch.distributed:
`node_ring.py` leaves them out of what it compares.
"""

from __future__ import annotations

import gc
import os
import weakref
from _thread import get_ident
from collections import defaultdict
from functools import wraps
from itertools import count

import ring_hook
from ring_file import FACTS, NONE, PHASES, REDUCTION

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ring_file import Lane, Ring

    Wrapper = Callable[..., Any]
    Began = tuple[Lane, int]

FORWARD, BACKWARD, STEP, GARBAGE = PHASES[:4]
OLDEST = 2
"""The generation of a garbage collection that takes long: it looks at all objects."""

_steps: dict[int, Began] = {}
_reductions: defaultdict[int, count[int]] = defaultdict(lambda: count(1))
"""The numbers of the reductions to come, by the name of the group in the ring."""
_reducing: list[Began] = []
_collecting: list[Began] = []
_cores: dict[int, CoreCounters] = {}
MOST_US = (1 << 31) - 1


def begin(name: str, numbers: Callable[[], tuple[int, int]] = lambda: (NONE, NONE)) -> Began | None:
    """Write that something begins in this thread, if the process communicates, and two numbers with it."""
    opened = ring_hook.opened()
    lane = ring_hook.lane() if opened is not None else None
    if opened is None or lane is None:
        return None
    return lane, lane.enter(FACTS.pack(opened.name(name), 0, 0, 0, *numbers()))


def end(began: Began | None) -> None:
    if began is not None:
        began[0].leave(began[1])


def during(name: str, after: Callable[[], None] = lambda: None) -> Callable[[Wrapper], Wrapper]:
    """Return what wraps a function whose begin and end are written; `after` is called at its end."""

    def make(original: Wrapper) -> Wrapper:
        @wraps(original)
        def call(*arguments: Any, **named: Any) -> Any:
            began = begin(name)
            try:
                return original(*arguments, **named)
            finally:
                after()
                end(began)

        return call

    return make


def watch_backward(module: Any, wrap: Wrapper) -> None:
    wrap(module, "backward", during(BACKWARD, _reduced))


def _reduced() -> None:
    while _reducing:
        end(_reducing.pop())


def watch_data_parallel(module: Any, wrap: Wrapper, group_of: Callable[[Ring, Any], Any]) -> None:
    """Write when forward passes of DDP run, and when a rank has its own gradients. `group_of` is what a ring knows of a
    process group."""
    kind = module.DistributedDataParallel

    def make(original: Wrapper) -> Wrapper:
        @wraps(original)
        def call(model: Any, *arguments: Any, **named: Any) -> None:
            original(model, *arguments, **named)
            watch_gradients(model, group_of)

        return call

    wrap(kind, "__init__", make)
    wrap(kind, "forward", forward)


def forward(original: Wrapper) -> Wrapper:
    import torch

    is_compiling = torch.compiler.is_compiling if hasattr(torch, "compiler") else bool
    recorded = during(FORWARD)(original)

    @wraps(original)
    def call(*arguments: Any, **named: Any) -> Any:
        return (original if is_compiling() else recorded)(*arguments, **named)

    return call


def watch_gradients(model: Any, group_of: Callable[[Ring, Any], Any]) -> None:
    """Have the last gradient of a backward pass written: that of the parameter that the forward pass needs first.

    Where parameters may be unused, ranks differ in whether they have it: these reductions have no numbers to compare.
    """
    first = next((each for each in model.parameters() if each.requires_grad), None)
    if not hasattr(first, "register_post_accumulate_grad_hook"):  # torch before 2.1
        return
    of = weakref.ref(model)

    def ready(_parameter: Any) -> None:
        here, opened = of(), ring_hook.opened()
        lane = ring_hook.lane() if opened is not None else None
        if here is None or opened is None or lane is None or not here.require_backward_grad_sync:
            return
        group = group_of(opened, here.process_group)
        facts = FACTS.pack(opened.name(REDUCTION), group.name, 0, 0, NONE, NONE)
        number = 0 if here.find_unused_parameters else next(_reductions[group.name])
        _reducing.append((lane, lane.enter(facts, number, group.flags)))

    assert first is not None
    first.register_post_accumulate_grad_hook(ready)


def watch_steps(module: Any) -> None:
    """Write the steps of optimizers, with what kept the thread from a core since the one before. One that raises an
    error has no end."""

    def before(optimizer: Any, _arguments: Any, _named: Any) -> None:
        began = begin(STEP, without_core)
        if began is not None:
            _steps[id(optimizer)] = began

    def after(optimizer: Any, _arguments: Any, _named: Any) -> None:
        end(_steps.pop(id(optimizer), None))

    if hasattr(module, "register_optimizer_step_pre_hook"):  # torch 2.1 or newer
        module.register_optimizer_step_pre_hook(before)
        module.register_optimizer_step_post_hook(after)


def without_core() -> tuple[int, int]:
    """Return for how many microseconds a CPU quota held the process up, and this thread was ready without a core, since
    the last call; `NONE` where the kernel does not count it, and at the first one."""
    thread = get_ident()
    if _cores.get(thread) is None:
        _cores.clear()  # the program steps in another thread now
        _cores[thread] = CoreCounters()
    return _cores[thread].rise()


class CoreCounters:
    """The kernel's counters of what keeps a thread from a core. Files stay open: a read takes microseconds."""

    def __init__(self) -> None:
        self._schedule = kept_open("/proc/thread-self/schedstat")
        self._groups = kept_open("/proc/self/cgroup")
        self._place: bytes | None = None
        self._quotas: list[Any] = []
        self._before: tuple[int | None, int | None] = (None, None)

    def rise(self) -> tuple[int, int]:
        place = content(self._groups)
        if place != self._place:
            self._place, self._quotas = place, quotas_of(place)
            self._before = (None, self._before[1])
        now = (self._held(), self._ready())
        before, self._before = self._before, now
        risen = (NONE if a is None or b is None else min(MOST_US, max(0, b - a)) for a, b in zip(before, now))
        return tuple(risen)  # type: ignore[return-value]

    def _held(self) -> int | None:
        times = [throttled_us(content(quota)) for quota in self._quotas]
        return max(times) if times else None

    def _ready(self) -> int | None:
        counted = content(self._schedule).split()
        return int(counted[1]) // 1000 if len(counted) > 1 else None


def kept_open(path: str) -> Any:
    """Return a file that stays open, without a buffer; None if it cannot be read."""
    try:
        return open(path, "rb", buffering=0)
    except OSError:
        return None


def content(stream: Any) -> bytes:
    try:
        return os.pread(stream.fileno(), 4096, 0) if stream is not None else b""
    except OSError:
        return b""


def quotas_of(groups: bytes) -> list[Any]:
    """Return the counters of the cgroups of /proc/self/cgroup that limit the CPU time of the process, open."""
    found = []
    for line in groups.decode("utf-8", "replace").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        folder = "/sys/fs/cgroup" + (f"/{controllers}" if controllers else "")
        for each in (path[:at] for at, sign in enumerate(path + "/") if sign == "/"):
            limit = content(kept_open(f"{folder}{each}/cpu.max")) or content(
                kept_open(f"{folder}{each}/cpu.cfs_quota_us")
            )
            if limit and limit.split()[0] not in (b"max", b"-1"):
                found.append(kept_open(f"{folder}{each}/cpu.stat"))
    return [each for each in found if each is not None]


def throttled_us(counts: bytes) -> int:
    """Return for how long a cgroup was throttled, from its cpu.stat; version 1 counts in ns."""
    words = counts.split()
    known = dict(zip(words[::2], words[1::2]))
    return int(known.get(b"throttled_usec", 0)) or int(known.get(b"throttled_time", 0)) // 1000


def watch_garbage() -> None:
    """Write the garbage collections that look at all objects, in threads that communicate."""

    def collected(stage: str, info: dict[str, int]) -> None:
        if info["generation"] != OLDEST or not ring_hook.has_lane():
            return
        if stage == "start":
            began = begin(GARBAGE)
            if began is not None:
                _collecting.append(began)
        elif _collecting:
            end(_collecting.pop())

    gc.callbacks.append(collected)


def forget() -> None:
    """Forget numbers that belong to the ring of the parent, in a forked child."""
    for each in (_reducing, _collecting):
        each.clear()
    for known in (_steps, _reductions, _cores):
        known.clear()

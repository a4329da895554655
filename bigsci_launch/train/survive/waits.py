"""Waits for gloo that can be given up. With `blocked.py`, the seam that ends blocked communication.

Shut-down sockets end nearly all waits, but gloo forgets some: if a part of a message was on its way when the
connection broke, the message is never reported as failed, and its receiver waits for the time-out, half an
hour. The same happens inside collectives. So a rank of `survive` waits in slices, and looks between them whether its
generation is over. A collective can be waited for again; a message cannot, because the first time-out closes all
connections of its group, so a helper thread waits for it and is left behind if it must be. So it is with functions of
torch that wait in C++, and with the forming of groups: where a rank has told its addresses and dies before it connects
to them, there is no socket that could be shut down. Gradients that DistributedDataParallel reduces are in `reducer.py`.

Waits for NCCL end when its communicators are aborted. What ranks exchange through host memory goes over gloo there too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
    OpType,
    ProcessGroupGloo,
    Reducer,
    TCPStore,
    Work,
)
from torch.distributed import _functional_collectives, distributed_c10d

SLICE_S = 0.1
_SLICE = timedelta(seconds=SLICE_S)
_MESSAGES = {OpType.SEND, OpType.RECV, OpType.RECVANYSOURCE}
_TIMED_OUT = "Operation timed out"
_BLOCKING: tuple[tuple[Any, str], ...] = (
    (dist, "_broadcast_coalesced"),
    (dist, "_verify_params_across_processes"),
    (Reducer, "_rebuild_buckets"),
    (_functional_collectives, "wait_tensor"),
)
"""What waits in C++ for small messages: DistributedDataParallel when it is made and before a forward pass, DTensor."""
_FORMING: tuple[tuple[Any, str], ...] = ((TCPStore, "__init__"), (ProcessGroupGloo, "__init__"))
"""What waits in C++ for other ranks when it is made, whatever the backend of the world."""


class GivenUpError(Exception):
    """What this rank has waited for belongs to a generation that is over."""


class Waits:
    """The waits of a process. `is_over` tells whether they are to be given up."""

    def __init__(self, is_over: Callable[[], bool]) -> None:
        self._is_over = is_over
        self._wait = Work.wait
        self._helper: SimpleQueue[_Call] | None = None
        self._is_left_behind = False
        self._is_for_gloo = False
        self._kept: list[Any] = []

    def install(self) -> None:
        """Let everything that waits for gloo in this process wait like this, DeepSpeed included. Call it before groups
        are formed."""
        if Work.wait is not self._wait:
            return

        def wait(work: Any, *timeout: Any) -> Any:
            is_plain = timeout or not self._is_gloo or work.is_completed()
            return self._wait(work, *timeout) if is_plain else self.wait(work)

        Work.wait = wait  # type: ignore[method-assign,assignment]
        for places, endable in ((_BLOCKING, self.endable), (_FORMING, self._endable_always)):
            for owner, name in places:
                setattr(owner, name, endable(getattr(owner, name)))

    @property
    def _is_gloo(self) -> bool:
        return self._is_for_gloo or (dist.is_initialized() and dist.get_backend() == "gloo")

    def endable(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that waits for gloo in C++ as one that can be given up."""
        endable = self._endable_always(function)

        def run(*arguments: Any) -> Any:
            return endable(*arguments) if self._is_gloo else function(*arguments)

        return run

    def _endable_always(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **more: Any) -> Any:
            return self._by_helper(partial(function, *arguments, **more))

        return run

    @contextmanager
    def for_gloo(self) -> Iterator[None]:
        """All waits of this block are for gloo, whatever the backend of the world."""
        before, self._is_for_gloo = self._is_for_gloo, True
        try:
            yield
        finally:
            self._is_for_gloo = before

    def wait(self, work: Any) -> bool:
        """Wait for something that gloo does.

        Raises:
            GivenUpError: the generation was over, and the wait did not end by itself.
            RuntimeError: as `work.wait()`.
        """
        if OpType(work._get_op_type()) in _MESSAGES:
            return bool(self._by_helper(partial(self._wait, work)))
        return self._in_slices(work)

    def leave_behind(self) -> None:
        """Note that something is left behind that waits for a group."""
        self._is_left_behind = True

    def keep_groups(self) -> None:
        """Keep the present groups for ever if a wait was given up: their destructors would wait for it."""
        if self._is_left_behind:
            self._kept += list(distributed_c10d._world.pg_map)
            self._is_left_behind = False

    def _in_slices(self, work: Any) -> bool:
        was_over = False
        while not work.is_completed():
            try:
                return bool(self._wait(work, _SLICE))
            except RuntimeError as error:
                if _TIMED_OUT not in str(error):
                    raise
            was_over = self._require_worthwhile(was_over)
        return bool(self._wait(work))

    def _by_helper(self, function: Callable[[], Any]) -> Any:
        if self._helper is None:
            self._helper = SimpleQueue()
            threading.Thread(target=_serve, args=(self._helper,), name="bsl-wait", daemon=True).start()
        mine = _Call(function)
        self._helper.put(mine)
        was_over = False
        while not mine.done.acquire(timeout=SLICE_S):
            was_over = self._require_worthwhile(was_over)
        if mine.error is not None:
            raise mine.error
        return mine.result

    def _require_worthwhile(self, was_over: bool) -> bool:
        """Give up if the generation was over a slice ago, too: its sockets were shut down since. Return if it is."""
        is_over = self._is_over()
        if was_over and is_over:
            self._helper, self._is_left_behind = None, True
            raise GivenUpError("gloo did not end a wait whose connection is gone")
        return is_over


class _Call:
    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.has_gradients = torch.is_grad_enabled()
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = threading.Lock()
        self.done.acquire()


def _serve(todo: SimpleQueue[_Call]) -> None:
    while True:
        each = todo.get()
        try:
            with torch.set_grad_enabled(each.has_gradients):
                each.result = each.function()
        except BaseException as error:
            each.error = error
        each.done.release()

"""Gradients that DistributedDataParallel reduces over gloo can be given up, too: its reducer waits in C++, for futures.

So each reducer gets a communication hook that returns futures of ours. They have the result of the work, or, once the
generation has been over for a slice, an error. What is left of the work keeps its group (`Waits.keep_groups`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from bigsci_launch.train.survive.waits import SLICE_S, GivenUpError, Waits

CommunicationHook = Callable[[Any, Any], Future[Tensor]]


class Reductions:
    """The reductions of all reducers of this process that have begun."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._lock = threading.Lock()
        self._open: dict[int, Future[Any]] = {}
        self._number = 0
        self._over_since: float | None = None
        self._is_installed = False

    def install(self) -> None:
        """Give each DistributedDataParallel of gloo that is made from now on such a hook, for a new generation."""
        with self._lock:
            self._open, self._over_since = {}, None
        if self._is_installed:
            return
        self._is_installed = True
        make, register = DistributedDataParallel.__init__, DistributedDataParallel.register_comm_hook

        def make_with_hook(ddp: Any, *arguments: Any, **more: Any) -> None:
            make(ddp, *arguments, **more)
            # torch registers one itself for mixed precision.
            if dist.get_backend(ddp.process_group) == "gloo" and not ddp._comm_hooks:
                ddp._bsl_hook = _Hook(self, ddp.process_group)
                dist._register_comm_hook(ddp.reducer, None, ddp._bsl_hook)  # type: ignore[attr-defined]

        def register_in_hook(ddp: Any, state: Any, hook: CommunicationHook) -> None:
            ours: _Hook | None = getattr(ddp, "_bsl_hook", None)
            if ours is None or ddp._comm_hooks:
                register(ddp, state, hook)
                return
            ddp._check_comm_hook(hook)
            ddp._comm_hooks.append((hook, state))
            ours.state, ours.hook = state, hook

        DistributedDataParallel.__init__ = make_with_hook  # type: ignore[method-assign,assignment]
        DistributedDataParallel.register_comm_hook = register_in_hook  # type: ignore[method-assign,assignment]

    def give_up(self) -> None:
        """End all reductions if the generation has been over for a slice; called again and again while it is over."""
        with self._lock:
            self._over_since = self._over_since or time.monotonic()
            if time.monotonic() - self._over_since < SLICE_S:
                return
            gates, self._open = list(self._open.values()), {}
        if gates:
            self._waits.leave_behind()
        for gate in gates:
            gate.set_result(GivenUpError("gloo did not end a reduction whose connection is gone"))

    def follow(self, future: Future[Tensor]) -> Future[Tensor]:
        """Return a future with the result of another one, which can be given up."""
        gate: Future[Any] = Future()
        with self._lock:
            self._number += 1
            number = self._number
            self._open[number] = gate

        def pass_on(done: Future[Tensor]) -> None:
            with self._lock:
                was_open = self._open.pop(number, None) is not None
            if was_open:
                gate.set_result(_outcome(done))

        followed: Future[Tensor] = gate.then(_result)
        future.add_done_callback(pass_on)
        return followed


class _Hook:
    """What a reducer calls for each bucket; by default, the mean over the ranks."""

    def __init__(self, reductions: Reductions, group: dist.ProcessGroup) -> None:
        self._reductions = reductions
        self.state: Any = group
        self.hook: CommunicationHook = allreduce_hook

    def __call__(self, _state: None, bucket: Any) -> Future[Tensor]:
        return self._reductions.follow(self.hook(self.state, bucket))


def _outcome(done: Future[Tensor]) -> Tensor | Exception:
    try:
        return done.value()
    except Exception as error:
        return error


def _result(gate: Future[Any]) -> Tensor:
    # `Future.set_exception` would be a result in C++.
    outcome = gate.value()
    if isinstance(outcome, Exception):
        raise outcome
    assert isinstance(outcome, Tensor)
    return outcome

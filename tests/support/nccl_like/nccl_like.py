"""A backend of torch on gloo that blocks as NCCL does, so that what a card would do can be tried on a CPU.

What is alike: a collective returns at once. `wait()` of its work returns at once too, and orders the stream only: the
next operation of torch on one of its tensors blocks, with nothing that could time out, be interrupted or raise. So
does `synchronize`. A peer that is gone is not noticed. `abort` from another thread ends what is blocked, without an
error, and leaves garbage in the tensors. Communicators are formed at their first use, in the calling thread, and one
whose peer does not come blocks for ever. A watchdog prints torch's words when a work has timed out, and then does what
TORCH_NCCL_ASYNC_ERROR_HANDLING says. With NCCL_LIKE=network in the environment it also sees that a peer is gone, as
with a transport over sockets or InfiniBand. `destroy_process_group` waits for what is under way.

What is not: operations on other tensors run ahead only as far as they need nothing that is still to come; the results
are computed by gloo in host memory; only the main thread has a stream.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo, Work
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAME = "nccl_like"
LOOK_S = 0.1
"""How often torch's watchdog looks."""
NO_END = timedelta(days=10)
HOST_READS = ("cpu", "numpy", "tolist", "to", "__array__", "__repr__", "data_ptr")
GARBAGE = 0x5A
ABORTED, REMOTE = "NCCL communicator was aborted", "remote process exited or there was a network error"
TEAR_DOWN, CLEAN_UP = (1, 3), (1, 2)
"""Values of TORCH_NCCL_ASYNC_ERROR_HANDLING: the process ends; communicators are aborted."""

_blocked: dict[int, list[StreamWork]] = {}
"""The works that the stream waits for, by the memory that they write or read."""
_open: set[StreamWork] = set()
_changes = threading.Lock()


class StreamWork(Work):
    """One collective. It is `ended` once the stream may pass it: its result is there, or it was aborted."""

    def __init__(self, name: str, number: int, tensors: list[torch.Tensor], group: StreamGroup) -> None:
        super().__init__()
        self.name, self.number, self.tensors, self.group = name, number, tensors, group
        self.places = {place_of(tensor) for tensor in tensors}
        self.began = time.monotonic()
        self.ended = threading.Lock()
        self.ended.acquire()
        self.is_done = self.is_aborted = self.is_late = self.is_failed = False
        with _changes:
            self.after = [each for each in _open if each.places & self.places]
            _open.add(self)

    def end(self, *, aborted: bool = False) -> None:
        with _changes:
            if self.is_done or self.is_aborted:
                return
            self.is_done, self.is_aborted = not aborted, aborted
            _open.discard(self)
        self.ended.release()

    def pass_by(self) -> None:
        """Block as a stream does, until this work has ended."""
        self.ended.acquire()
        self.ended.release()

    def is_completed(self) -> bool:
        return self.is_done or self.is_aborted

    def is_success(self) -> bool:
        return self.is_done

    def wait(self, timeout: timedelta | None = None) -> bool:  # type: ignore[override]
        if not self.is_done:
            with _changes:
                for place in self.places:
                    _blocked.setdefault(place, []).append(self)
        return True


def place_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Stream(TorchDispatchMode):
    """Makes operations of this thread wait for the works that their tensors come from."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if _blocked:
            pass_by(place_of(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor))
        return func(*args, **(kwargs or {}))


class HostReads(TorchFunctionMode):
    """Makes this thread wait where it reads memory without an operation of torch."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if _blocked and getattr(func, "__name__", "") in HOST_READS:
            pass_by([place_of(args[0])])
        return func(*args, **(kwargs or {}))


def pass_by(places: Iterable[int]) -> None:
    """Block until all that was to be waited for in these places has ended; what was aborted leaves garbage."""
    for place in places:
        while works := _blocked.get(place):
            works[0].pass_by()
            if works[0].is_aborted:
                spoil(works[0].tensors)
            with _changes:
                if works:
                    works.pop(0)
                if not works:
                    _blocked.pop(place, None)


def spoil(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.detach().untyped_storage().fill_(GARBAGE)


def synchronize() -> None:
    """Block as `torch.cuda.synchronize` does."""
    while _open:
        next(iter(set(_open))).pass_by()


class Communicator:
    """Ranks that have found each other. Its works are done in their order, by a thread that stands for the device."""

    def __init__(self, inner: ProcessGroupGloo) -> None:
        self._inner = inner
        self._todo: SimpleQueue[tuple[StreamWork, str, tuple[Any, ...]]] = SimpleQueue()
        threading.Thread(target=self._serve, name="nccl-like", daemon=True).start()

    def put(self, work: StreamWork, name: str, arguments: tuple[Any, ...]) -> None:
        self._todo.put((work, name, arguments))

    @torch.no_grad()
    def _serve(self) -> None:
        while True:
            work, name, arguments = self._todo.get()
            for each in work.after:
                each.pass_by()
            try:
                getattr(self._inner, name)(*arguments).wait(NO_END)
            except Exception:
                # The device does not learn that a peer is gone: its kernel waits, and all behind it.
                work.is_failed = True
                return
            work.end()


class StreamGroup(ProcessGroup):
    """A process group. Pairs of ranks that send and receive have communicators of their own."""

    def __init__(self, options: Any, _: Any) -> None:
        self._rank, self._size = options.group_rank, options.group_size
        super().__init__(self._rank, self._size)
        self._store, self.timeout_s = options.store, options.timeout.total_seconds()
        self._name = options.group_id
        self._communicators: dict[str, Communicator] = {}
        self._numbers = itertools.count(1)
        self.is_aborted = False
        Watchdog.of_process.watch()

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        return self._name

    def collective(self, name: str, arguments: tuple[Any, ...]) -> StreamWork:
        return self._put(self._communicator("0", self._rank, self._size), name, arguments)

    def message(self, name: str, tensors: list[torch.Tensor], peer: int, tag: int) -> StreamWork:
        low, high = sorted((self._rank, peer))
        pair = self._communicator(f"{low}:{high}", int(self._rank == high), 2)
        return self._put(pair, name, (tensors, int(peer == high), tag))

    def _put(self, communicator: Communicator, name: str, arguments: tuple[Any, ...]) -> StreamWork:
        work = StreamWork(name, next(self._numbers), [*_tensors_in(arguments)], self)
        communicator.put(work, name, arguments)
        return work

    def _communicator(self, key: str, rank: int, size: int) -> Communicator:
        if self.is_aborted:
            raise dist.DistBackendError(f"{ABORTED} on rank {self._rank}.")
        if key not in self._communicators:
            self._communicators[key] = Communicator(self._formed(key, rank, size))
        return self._communicators[key]

    def _formed(self, key: str, rank: int, size: int) -> ProcessGroupGloo:
        try:
            if rank == 0:
                self._store.set(key, "unique id")
            self._store.get(key)
        except Exception as error:
            raise dist.DistBackendError(
                f"[{rank}] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value "
                f"store by key '{key}', but store->get('{key}') got error: {error}"
            ) from error
        try:
            self._store.add(f"{key} came", 1)
            while self._store.add(f"{key} came", 0) < size:
                time.sleep(0.005)
            store = dist.PrefixStore(f"{key} addresses", self._store)
            inner = ProcessGroupGloo(store, rank, size, NO_END)
        except Exception:
            # ncclCommInitRank has no time-out, and nothing ends it from outside while it blocks.
            threading.Event().wait()
            raise
        # What torch records of its calls is numbered by the name of the group, which only a group of torch can give.
        named = ProcessGroup(store, rank, size)
        named._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, inner)
        named._set_group_name(self._name)
        return inner

    def abort(self) -> None:
        self.is_aborted = True
        for work in self._own():
            work.end(aborted=True)

    def shutdown(self) -> None:
        """Wait for what is under way, as ncclCommFinalize does."""
        for work in self._own():
            work.pass_by()

    def _own(self) -> list[StreamWork]:
        with _changes:
            return [work for work in _open if work.group is self]

    def barrier(self, opts: Any = None) -> StreamWork:  # type: ignore[override]
        work = self.collective("allreduce", ([torch.zeros(1)], dist.AllreduceOptions()))
        work.pass_by()
        return work

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> StreamWork:  # type: ignore[override]
        return self.message("send", tensors, peer, tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> StreamWork:  # type: ignore[override]
        return self.message("recv", tensors, peer, tag)


def _collective(inner: str) -> Callable[..., StreamWork]:
    def call(self: StreamGroup, *arguments: Any) -> StreamWork:
        return self.collective(inner, arguments)

    return call


COLLECTIVES = (
    *("allreduce", "broadcast", "reduce", "allgather", "reduce_scatter", "gather", "scatter", "alltoall_base"),
    *("_allgather_base", "_reduce_scatter_base", "allreduce_coalesced", "allgather_coalesced"),
)
SINCE_2_13 = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}
for _name, _inner in {**dict(zip(COLLECTIVES, COLLECTIVES, strict=True)), **SINCE_2_13}.items():
    setattr(StreamGroup, _name, _collective(_inner))


def _tensors_in(arguments: Any) -> Iterator[torch.Tensor]:
    for each in arguments:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from _tensors_in(each)


class Watchdog:
    """torch's watchdog: one thread for all groups of this process."""

    of_process: Watchdog

    def __init__(self) -> None:
        self._is_watching = False

    def watch(self) -> None:
        if not self._is_watching:
            self._is_watching = True
            threading.Thread(target=self._run, name="pt_nccl_watchdg", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(LOOK_S)
            for work in list(_open):
                if words := self._why_ended(work):
                    work.is_late = True
                    self._handle(work.group, words)

    def _why_ended(self, work: StreamWork) -> str | None:
        took = time.monotonic() - work.began
        late, failed = took > work.group.timeout_s, work.is_failed and os.environ.get("NCCL_LIKE") == "network"
        if work.is_late or not (late or failed):
            return None
        size = sum(tensor.numel() for tensor in work.tensors)
        call = (
            f"WorkNCCL(SeqNum={work.number}, OpType={work.name.upper()}, NumelIn={size}, NumelOut={size}, "
            f"Timeout(ms)={work.group.timeout_s * 1000:.0f})"
        )
        if failed:
            return f"Collective {call} raised the following async exception: NCCL error: {REMOTE}"
        took_ms = f"{took * 1000:.0f}"
        return f"Watchdog caught collective operation timeout: {call} ran for {took_ms} milliseconds before timing out."

    def _handle(self, group: StreamGroup, words: str) -> None:
        handling = int(os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"))
        rank = group.rank()
        _print(rank, 689, f"[Rank {rank}] {words}")
        if handling in CLEAN_UP:
            group.abort()
        if handling in TEAR_DOWN:
            _print(rank, 764, f"[Rank {rank}] To avoid data inconsistency, we are taking the entire process down.")
            who = f"[PG ID 0 PG GUID 0(default_pg) Rank {rank}] "
            _print(rank, 2119, f"{who}Process group watchdog thread terminated with exception: [Rank {rank}] {words}")
            os.abort()


def _print(rank: int, line: int, words: str) -> None:
    when = f"{datetime.now():%m%d %H:%M:%S.%f}000"
    print(f"[rank{rank}]:[E{when} ProcessGroupNCCL.cpp:{line}] {words}", file=sys.stderr, flush=True)


Watchdog.of_process = Watchdog()


def install() -> None:
    """Offer the backend under its name, and give this thread a stream."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, StreamGroup, extended_api=True, devices=["cpu"])
        Stream().__enter__()
        HostReads().__enter__()


def use_in_trainer() -> None:
    """Let `bsl train` in this process form its groups with the backend."""
    install()
    from bigsci_launch.train import startup
    from bigsci_launch.train.device.choice import Device

    here: Any = Device("cpu", None, NAME)  # type: ignore[arg-type]
    startup._this_device = lambda training: here

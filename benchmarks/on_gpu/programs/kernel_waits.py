"""A rank whose host waits for a GPU that does not finish.

MODE is device_synchronize, stream_synchronize, event_query, event_never_comes or item. On a CPU, a lock that nobody
releases takes the place of the kernel.
"""

from __future__ import annotations

import threading

from stage import DEVICE, MODE, say_ready, start_endless_kernel


class Kernel:
    """A kernel that does not end, and the ways to wait for it. Everything that a wait uses is loaded before."""

    def __init__(self) -> None:
        import torch

        self.cuda = torch.cuda
        self.values = torch.ones(1, device="cuda")
        self.busy, self.waiting, self.event = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Event()
        torch.cuda.synchronize()
        for stream in (self.busy, self.waiting):
            with torch.cuda.stream(stream):
                self.values.add_(1).item()
        with torch.cuda.stream(self.busy):
            start_endless_kernel()
            self.event.record()

    def device_synchronize(self) -> None:
        self.cuda.synchronize()

    def stream_synchronize(self) -> None:
        self.busy.synchronize()

    def item(self) -> None:
        with self.cuda.stream(self.busy):
            self.values.item()

    def event_never_comes(self) -> None:
        with self.cuda.stream(self.waiting):
            self.waiting.wait_event(self.event)
            self.values.add_(1).item()

    def event_query(self) -> None:
        while not self.event.query():
            pass


class Lock:
    """A lock that nobody releases."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def device_synchronize(self) -> None:
        self._lock.acquire()

    stream_synchronize = item = event_never_comes = device_synchronize

    def event_query(self) -> None:
        while not self._lock.acquire(blocking=False):
            pass


def wait_for_the_gpu(kernel: Kernel | Lock) -> None:
    say_ready()
    getattr(kernel, MODE)()


if __name__ == "__main__":
    wait_for_the_gpu(Kernel() if DEVICE == "cuda" else Lock())

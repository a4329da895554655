"""What torch knows of this rank's GPU, and copies to it and from it. Only `finish_queued_work` waits for all of it."""

from __future__ import annotations

import torch
from torch import Tensor


def computes_on_gpu() -> bool:
    """Return whether this rank has chosen a GPU; one that is merely visible does not count."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def finish_queued_work() -> None:
    """Wait until the GPU has done all that it was given, if there is one: otherwise the next clock would count it."""
    if computes_on_gpu():
        torch.cuda.synchronize()


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on `device`.

    The copy is queued behind what the GPU is doing. From memory that is not locked it would wait for that instead.
    """
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class Fetched:
    """The numbers of a tensor as they are when the GPU comes to this; `read` waits for no work that is queued later.

    The tensor must not be changed afterwards.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._numbers, self._done = tensor, None
        if tensor.device.type == "cuda":
            self._numbers = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._numbers.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def read(self) -> Tensor:
        """Return the numbers on the host."""
        if self._done is not None:
            self._done.synchronize()
        return self._numbers


def memory_figures() -> dict[str, int]:
    """Return the peak memory of this rank since the last call, and its failed attempts to allocate so far.

    `memory_allocated` and `memory_reserved` are peaks in bytes, of tensors and of torch's pool; `memory_retries` counts
    how often the pool was emptied to serve a request. Empty on a CPU.
    """
    if not computes_on_gpu():
        return {}
    figures = torch.cuda.memory_stats()
    torch.cuda.reset_peak_memory_stats()
    return {
        "memory_allocated": int(figures["allocated_bytes.all.peak"]),
        "memory_reserved": int(figures["reserved_bytes.all.peak"]),
        "memory_retries": int(figures["num_alloc_retries"]),
    }

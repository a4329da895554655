"""What torch knows of this rank's GPU. Only `finish_queued_work` waits for it."""

from __future__ import annotations

import torch


def computes_on_gpu() -> bool:
    """Return whether this rank has chosen a GPU; one that is merely visible does not count."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def finish_queued_work() -> None:
    """Wait until the GPU has done all that it was given, if there is one: otherwise the next clock would count it."""
    if computes_on_gpu():
        torch.cuda.synchronize()


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

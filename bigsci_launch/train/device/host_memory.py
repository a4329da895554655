"""Host memory for copies of a device's state, and tensors in it."""

from __future__ import annotations

import logging
import mmap
import weakref
from typing import Any

import torch
from torch import Tensor

from bigsci_launch.train.device.gpu import computes_on_gpu

log = logging.getLogger(__name__)


def host_zeros(num_bytes: int) -> Tensor:
    """Return bytes in host memory. With a GPU, their pages are locked until they are freed: it copies to them at full
    speed then.

    torch's own locked memory is rounded up to a power of two, and never given back while the process lives.
    """
    pages = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # The first write to a page takes longer than the copy, and there are 512 times as many small ones.
        pages.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(pages, dtype=torch.uint8)
    if computes_on_gpu():
        _lock(pages, buffer)
    return buffer


def _lock(pages: mmap.mmap, buffer: Tensor) -> None:
    # After a fork the GPU would still write to pages that only the child still has.
    pages.madvise(mmap.MADV_DONTFORK)
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    try:
        torch.cuda.check_error(runtime.cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0))
    except RuntimeError as error:
        log.warning(
            "%d bytes of host memory cannot be locked, so copies from the GPU take longer: %s", len(buffer), error
        )
        return
    weakref.finalize(buffer, runtime.cudaHostUnregister, buffer.data_ptr()).atexit = False


def tensor_in(memory: Tensor, start: int, like: Tensor) -> Tensor:
    """Return the place for a copy of a tensor at byte `start` of `memory`, contiguous and with a storage of its own: a
    file that it is saved to holds nothing else of the memory."""
    if not like.numel():
        return torch.empty(like.shape, dtype=like.dtype)
    return torch.frombuffer(memory.numpy(), dtype=like.dtype, count=like.numel(), offset=start).view(like.shape)

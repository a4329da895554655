"""Makes torch forget all process groups, whose peers may be gone, so that others can be formed in the same process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed import distributed_c10d


def forget_groups(destroy: Callable[[], None] = dist.destroy_process_group) -> None:
    """Destroy all groups of gloo, and abort those of another backend: to destroy one of those would wait for what it
    has begun.

    torch numbers groups, and looks for peers under the number. It counts from 0 again once all are destroyed, but not
    after a peer was lost while the first one was being formed: a new process and this one would never meet.
    """
    if dist.is_initialized():
        _destroy(destroy)
    distributed_c10d._world.group_count = 0


def _destroy(destroy: Callable[[], None]) -> None:
    # torch 2.4 has no such function, and aborts where later versions wait.
    abort = getattr(distributed_c10d, "_abort_process_group", dist.destroy_process_group)
    # Peers are gone, so a backend may complain; the groups are forgotten all the same.
    with contextlib.suppress(RuntimeError):
        (destroy if dist.get_backend() == "gloo" else abort)()
    if dist.is_initialized():
        raise RuntimeError("the process groups of this generation cannot be destroyed")

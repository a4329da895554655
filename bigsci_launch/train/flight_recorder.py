"""Lets `bsl spy` ask a rank which collectives it has begun, even while the rank hangs and holds the GIL.

torch records the last 2000 collectives of every rank by default; its worker server, a C++ thread, answers on a socket
in the run directory. Gloo does not record which ranks belong to which group, so that is written next to the socket.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from torch.distributed import distributed_c10d

from bigsci_launch.runs.layout import write_json
from bigsci_launch.train.identity import RankIdentity

log = logging.getLogger(__name__)


@contextlib.contextmanager
def offered_recorder(identity: RankIdentity) -> Iterator[None]:
    """Serve this rank's flight recorder inside the `with` block; do without if torch or the file system cannot."""
    socket = identity.attempt.recorder_socket(identity.rank)
    try:
        write_json(identity.attempt.recorder_groups(identity.rank), {"members": group_members()})
        server = _start_server(socket)
    except (ImportError, OSError, RuntimeError) as error:
        log.warning("no flight recorder for `bsl spy`: %s", error)
        yield
        return
    try:
        yield
    finally:
        server.shutdown()  # type: ignore[attr-defined]
        socket.unlink(missing_ok=True)


def group_members() -> dict[str, list[int]]:
    """Return the global ranks of every process group this rank belongs to, by torch's name for the group."""
    groups = distributed_c10d._world.pg_group_ranks
    return {str(group.group_name): sorted(ranks) for group, ranks in groups.items() if dist.get_rank() in ranks}


def _start_server(socket: Path) -> object:
    """Listen on `socket`, bound by its bare name: a socket path is limited to 107 bytes, and a run's may be longer."""
    from torch._C._distributed_c10d import _WorkerServer

    socket.unlink(missing_ok=True)
    here = Path.cwd()
    os.chdir(socket.parent)
    try:
        return _WorkerServer(socket.name)
    finally:
        os.chdir(here)

"""Lets `bsl spy` ask a rank which collectives it has begun, even while the rank hangs and holds the GIL.

torch records the last 2000 collectives of every rank by default; its worker server, a C++ thread, answers on a socket
in the run directory. Gloo does not record which ranks belong to which group, so that is written next to the socket.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from torch.distributed import distributed_c10d

from bigsci_launch.runs.layout import write_json
from bigsci_launch.train.rank.identity import RankIdentity

log = logging.getLogger(__name__)

ANSWER_S = 10.0


@contextlib.contextmanager
def offered_recorder(identity: RankIdentity) -> Iterator[None]:
    """Serve this rank's flight recorder inside the `with` block; do without if torch or the file system cannot."""
    place = identity.attempt.recorder_socket(identity.rank)
    try:
        write_json(identity.attempt.recorder_groups(identity.rank), {"members": group_members()})
        server = _start_server(place)
    except (ImportError, OSError, RuntimeError) as error:
        log.warning("no flight recorder for `bsl spy`: %s", error)
        yield
        return
    try:
        yield
    finally:
        server.shutdown()  # type: ignore[attr-defined]
        place.unlink(missing_ok=True)


def group_members() -> dict[str, list[int]]:
    """Return the global ranks of every process group this rank belongs to, by torch's name for the group."""
    groups = distributed_c10d._world.pg_group_ranks
    return {str(group.group_name): sorted(ranks) for group, ranks in groups.items() if dist.get_rank() in ranks}


def _start_server(place: Path) -> object:
    """Listen at `place`, bound by its bare name: a socket path is limited to 107 bytes, and a run's may be longer."""
    from torch._C._distributed_c10d import _WorkerServer

    place.unlink(missing_ok=True)
    here = Path.cwd()
    os.chdir(place.parent)
    try:
        mask = os.umask(0o177)  # only the owner may connect: the server does not authenticate
        try:
            server = _WorkerServer(place.name)
        finally:
            os.umask(mask)
        _await_answer(place.name)
        return server
    finally:
        os.chdir(here)


def _await_answer(name: str) -> None:
    """Wait until the server's thread listens: torch's `shutdown` before that never returns, and holds the GIL."""
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(ANSWER_S)
        link.connect(name)
        link.sendall(b"GET /handler/ping HTTP/1.0\r\n\r\n")
        link.recv(1)

"""Waits for the store of a generation. torch's own attempt to connect could not be interrupted."""

from __future__ import annotations

import socket
import time

from bigsci_launch.train.survive.channel import Begin, Channel

_LOOK_S = 0.02
_CONNECT_S = 2.0


def wait_for_store(begin: Begin, channel: Channel) -> None:
    """Return once rank 0 listens.

    Raises:
        GenerationOver: the generation ended before that.
    """
    if begin.rank == 0:
        return
    while True:
        channel.require_present()
        try:
            socket.create_connection((begin.master_addr, begin.master_port), _CONNECT_S).close()
            return
        except OSError:
            time.sleep(_LOOK_S)

"""Ports for ranks that a test starts."""

from __future__ import annotations

import random
import socket


def find_port() -> int:
    """Return a free port outside the range from which gloo takes ports for its own connections."""
    while True:
        port = random.randrange(20000, 30000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port

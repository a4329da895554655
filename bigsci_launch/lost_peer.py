"""Recognises the errors of a rank whose peer is gone. The reason for them is on the other rank."""

from __future__ import annotations

import re

LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken ?pipe|closed by (peer|remote)|remote (process|peer|error)"
    r"|ConnectionResetError|caused pair closure|socket closed|no route to host|DistNetworkError|failed to recv, got 0",
    re.IGNORECASE,
)


def says_lost_peer(words: str) -> bool:
    """Return whether an error, as `Type: message`, is one that gloo, NCCL and plain sockets raise when a peer is
    gone."""
    return LOST_PEER.search(words) is not None

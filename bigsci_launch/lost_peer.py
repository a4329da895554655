"""Recognises the errors of a rank whose peer is gone or did not come. The reason for them is on the other rank.

gloo's errors name the connection. NCCL mostly waits until its watchdog ends the collective after the time-out of the
process group; what it prints then is in two further patterns.
"""

from __future__ import annotations

import re

LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken ?pipe|closed by (peer|remote)|remote (process|peer|error)"
    r"|ConnectionResetError|caused pair closure|socket closed|no route to host|DistNetworkError|failed to recv, got 0",
    re.IGNORECASE,
)

# What the watchdog of NCCL, gloo, and torch's store say when something took too long: another rank did not take part.
TIMED_OUT = re.compile(
    r"Watchdog caught collective operation timeout|Timed out waiting \d+ ?ms for (recv|send) operation"
    r"|Application timeout caused pair closure"
    r"|wait timeout after \d+ ?ms, keys: |Timed out after \d+ seconds waiting for clients",
    re.IGNORECASE,
)

# What NCCL prints after that, or after a lost connection.
AFTERMATH = re.compile(
    r"NCCL communicator was aborted|Some NCCL operations have failed or timed out"
    r"|To avoid data inconsistency, we are taking the entire process down",
    re.IGNORECASE,
)

# NCCL's word for a failed system call: mostly that of a socket, but a full /dev/shm is this rank's own trouble.
SYSTEM_ERROR = re.compile(
    r"unhandled system error(?!.*(shared memory|no space left|cannot allocate|malloc of))", re.IGNORECASE | re.DOTALL
)


def says_lost_peer(words: str) -> bool:
    """Return whether an error, as `Type: message`, is one that gloo, NCCL and plain sockets raise when a peer is gone
    or did not come."""
    return any(pattern.search(words) for pattern in (LOST_PEER, TIMED_OUT, AFTERMATH, SYSTEM_ERROR))

"""Recognises the errors of a rank whose peer is gone or did not come. The reason for them is on the other rank.

gloo's errors name the connection. NCCL mostly waits until its watchdog ends the collective after the time-out of the
process group. What they print is in the table of words, `diagnostics/endings`.
"""

from __future__ import annotations

from bigsci_launch.endings.words import EndWord, read_words

LOST_PEER = ("hang", "network", "rendezvous", "aborted")
"""The kinds of what a victim says of another rank. `aborted` follows a timeout or a lost connection."""
TIMED_OUT = ("hang", "rendezvous")
"""Something took too long: another rank did not take part, or did not come."""


def says_lost_peer(words: str) -> bool:
    """Return whether an error, as `Type: message`, is one that gloo, NCCL and plain sockets raise when a peer is gone
    or did not come."""
    return loss_in(words) is not None


def loss_in(words: str) -> str | None:
    """Return what an error or a line says of another rank: one of `LOST_PEER`; None if it says nothing of the kind."""
    found = read_words().find(words)
    return found.word.kind if found is not None and is_loss(found.word) else None


def is_loss(word: EndWord) -> bool:
    """Whether a word of the table is that of a victim that lost another rank."""
    return word.speaker == "victim" and word.kind in LOST_PEER

"""Acts that were shown and wait for their confirmation: each token is for one act, once, and for a short time."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bigsci_launch.errors import BslError

VALID_S = 300.0
MOST_WAITING = 20


@dataclass(frozen=True, slots=True)
class PlannedAct:
    """What would be done. `verb` is one of `bsl control`, or `cancel`. `jobs` are what it would reach, in words: if
    they have changed when it is confirmed, it is another act."""

    run: Path
    verb: str
    why: str
    after_step: int | None
    jobs: tuple[str, ...]


class NotConfirmed(BslError):
    """A token that confirms nothing: it was never given, was used, or is too old."""


class Confirmations:
    """The acts that wait."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: dict[str, tuple[float, PlannedAct]] = {}

    def offer(self, act: PlannedAct) -> str:
        """Return the token that confirms this act."""
        while len(self._waiting) >= MOST_WAITING:
            del self._waiting[next(iter(self._waiting))]
        token = secrets.token_urlsafe(16)
        self._waiting[token] = (self._clock() + VALID_S, act)
        return token

    def take(self, token: str) -> PlannedAct:
        """Return the act that a token confirms, which it does no second time.

        Raises:
            NotConfirmed: it confirms nothing.
        """
        until, act = self._waiting.pop(token, (0.0, None))
        if act is None:
            raise NotConfirmed("this token confirms nothing", hint="ask for the act again, with control or cancel")
        if self._clock() > until:
            raise NotConfirmed(f"the token is older than {VALID_S:.0f} s", hint="ask for the act again")
        return act

"""What one foreign file says of one process, before anybody knows which rank it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Reading:
    """One process at one moment.

    `rank` is None where the file does not say it, `local_rank` likewise; `node` is empty where no name is known.
    `threads` are as in a bundle's `stack`, None where there are none; `recorder` as in a bundle. `why` says why
    nothing is known of a process that is known of, `is_gone` that it has ended.
    """

    source: str
    node: str = ""
    rank: int | None = None
    local_rank: int | None = None
    pid: int | None = None
    threads: Sequence[Mapping[str, Any]] | None = None
    recorder: Mapping[str, Any] | None = None
    why: str | None = None
    is_gone: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """The readings of one file, and what could not be used of it."""

    readings: tuple[Reading, ...]
    problems: tuple[str, ...] = ()


class NotThis(Exception):
    """The file holds something else than the reader is for."""


class Damaged(Exception):
    """The file is what the reader is for, but cannot be used; the message says why."""

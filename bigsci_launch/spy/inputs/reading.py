"""What one file of another tool shows about a process, before its rank is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bigsci_launch.spy.evidence.numbering import NumberedBy, OtherProcess
from bigsci_launch.spy.inputs.looks import NO_TIME, LookTime


@dataclass(frozen=True, slots=True)
class Reading:
    """One process at one moment.

    `rank` and `local_rank` are None if the file does not give them; `node` is empty if its name is not known.
    `threads` has the format of a bundle's `stack`, or is None if there are none; `recorder` has the bundle's format.
    `why` is the reason why a process that exists could not be read; `is_gone` means that it has ended. `command` is its
    command line, empty if it is not shown, and `parent` the process that started it, None if that is not shown.
    `numbered_by` says where `rank` is from, `moment` when it was read.
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
    command: str = ""
    numbered_by: NumberedBy = NumberedBy.FILES
    moment: LookTime = NO_TIME
    parent: int | None = None

    @property
    def process(self) -> object:
        """What two looks at one process have in common; nothing that another reading has, if that is not known."""
        if self.rank is not None:
            return self.rank
        return id(self) if self.pid is None else (self.node, self.pid, self.command)


@dataclass(frozen=True, slots=True)
class Found:
    """The readings of one file, the problems found in it, and its processes that are certainly no ranks."""

    readings: tuple[Reading, ...]
    problems: tuple[str, ...] = ()
    others: tuple[OtherProcess, ...] = ()


class NotThis(Exception):
    """The file is not of the kind that the reader handles."""


class Damaged(Exception):
    """The file is of the kind that the reader handles, but cannot be used; the message has the reason."""

"""How the ranks of a job got their numbers, and how to name a process whose number is unknown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from bigsci_launch.spy.evidence.run_facts import Exit, parse_end

MAX_LISTED = 3
NO_NAME = re.compile(r"[^\w.:\[\]-]")
"""What an address, a port or a number of nodes never contains: others may have written it."""
RANKS_NOT_NAMED = "the files do not name ranks: ranks were numbered in the order of nodes and processes"


class NumberedBy(Enum):
    """The source that makes a process the rank with its number. The values are those of the node agent's `source`."""

    PID_FILE = "pid file"
    RING = "ring"
    """The ring in which it records its calls, and whose header has its rank since it joined the others."""
    FRAMES = "frames"
    """Arguments of functions on its stack, such as torch's spawn or `init_process_group`."""
    STORE = "store"
    """It serves the store to all others, which makes it rank 0."""
    ENVIRONMENT_NOW = "environment now"
    """Variables that the process has set for itself since it began."""
    ENVIRONMENT = "environment"
    TASK = "task id"
    ARGUMENTS = "arguments"
    FILES = "files"
    """Files of other tools, which give it: in their content, or as `rank-3` in their name."""
    FILE_NUMBER = "number in the file name"
    """Some number in the name of a file, such as `dump_17`: it may be a rank or anything else."""
    FILE_ORDER = "order of the files"
    """Nothing: the processes in files of other tools were numbered in the order of files and of text."""
    COUNTED = "order of start"
    """Nothing: the processes were only counted. The number means nothing outside of one document."""
    UNKNOWN = "unknown"
    """A document of an earlier version, which numbered processes by files, environment or task."""

    @property
    def is_known(self) -> bool:
        """Whether the number is that of the rank in its own program."""
        return self not in (NumberedBy.COUNTED, NumberedBy.FILE_NUMBER, NumberedBy.FILE_ORDER)

    @property
    def is_of_files(self) -> bool:
        """Whether the rank was read from files of other tools."""
        return self in (NumberedBy.FILES, NumberedBy.FILE_NUMBER, NumberedBy.FILE_ORDER)

    @property
    def is_placed(self) -> bool:
        """Whether the number is known, or is a place in the order of files. Who gives a topology says by that that the
        files are in the order of ranks."""
        return self is not NumberedBy.COUNTED


class Numbering(Enum):
    """Whether the numbers of all ranks that were found are known."""

    KNOWN = "known"
    PARTLY = "partly known"
    GUESSED = "guessed"


def parse_source(source: object, is_from_files: bool) -> NumberedBy:
    """Return what numbers a rank, from the `source` of its document."""
    otherwise = NumberedBy.FILES if is_from_files else NumberedBy.UNKNOWN
    return next((each for each in NumberedBy if each.value == source), otherwise)


@dataclass(frozen=True, slots=True)
class OtherProcess:
    """A process of the job that is no rank. `role` is `launcher`, `helper`, `ended` or `unknown`; `why`: the reason."""

    node: str
    pid: int
    comm: str
    role: str
    why: str
    end: Exit | None = None
    """How it has ended, if that is known."""


@dataclass(frozen=True, slots=True)
class WaitingLauncher:
    """A launcher of torch that has started no rank for `age_s` seconds and was given several `nodes`, such as `2` or
    `1:4`, to meet at `endpoint`; empty if it was given none."""

    pid: int
    node: str
    nodes: str
    endpoint: str
    age_s: float


def parse_waiting_launcher(node: Mapping[str, Any]) -> WaitingLauncher | None:
    """Return the launcher on a node that waits for other nodes, if there is one."""
    for other in node.get("others") or []:
        fact = other.get("waits_for_nodes")
        if fact:
            nodes, endpoint = (NO_NAME.sub("?", str(fact[name])) for name in ("nodes", "endpoint"))
            return WaitingLauncher(int(other["pid"]), str(node["node"]), nodes, endpoint, float(fact["age_s"]))
    return None


def parse_others(node: Mapping[str, Any]) -> list[OtherProcess]:
    """Return the processes of a node's document that are no ranks."""
    return [
        OtherProcess(
            str(node["node"]),
            int(other["pid"]),
            str(other["comm"]),
            str(other["role"]),
            str(other["why"]),
            parse_end(other.get("end"), node),
        )
        for other in node.get("others") or []
    ]


def numbering_of(found: Sequence[NumberedBy]) -> Numbering:
    """Return how much of the numbering is known, from what numbers each rank that was found."""
    num_known = sum(each.is_known for each in found)
    if num_known == len(found):
        return Numbering.KNOWN
    return Numbering.PARTLY if num_known else Numbering.GUESSED


def list_processes(pids: Sequence[int | str | None]) -> str:
    """`4711, 4712 and 2 more`; processes that were not found are `2 not found`, and `#3` is known by its place only."""
    known = sorted((pid for pid in pids if pid is not None), key=lambda pid: int(str(pid).lstrip("#")))
    words = [str(pid) for pid in known]
    if len(words) > MAX_LISTED:
        words = [*words[: MAX_LISTED - 1], f"{len(words) - MAX_LISTED + 1} more"]
    if len(known) < len(pids):
        words.append(f"{len(pids) - len(known)} not found")
    return " and ".join(part for part in (", ".join(words[:-1]), words[-1] if words else "") if part)

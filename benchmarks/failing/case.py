"""What a failure is, and what was found of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from injected.field import MiniCluster

LAUNCHERS = ("srun", "torchrun", "accelerate", "DeepSpeed", "Ray")
CRASHED = ("crashed",)
MEMORY = ("out_of_memory",)
HANG = ("hang",)


@dataclass(frozen=True)
class Live:
    """A job that runs."""

    cluster: MiniCluster
    job_id: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class LaunchFailure:
    """One failure: a batch script, and what is true of its end. The rank that fails first writes down who it is."""

    launcher: str
    name: str
    what: str
    kinds: tuple[str, ...]
    body: str
    """What the batch script does, after its head."""
    nodes: tuple[int, int] = (0, 4)
    """The first node, and how many."""
    tasks: int = 2
    """Tasks of Slurm on a node."""
    options: tuple[str, ...] = ()
    """More options of sbatch."""
    whose: str = "rank"
    """`rank`, `node` (which was lost), `ranks of a node`, or `none` where the job was ended from outside."""
    has_logs: bool = False
    """Ranks print into files of their own, which the output of the job does not name: the folder is asked about."""
    act: Callable[[Live], str | None] | None = None
    """What is done to the job once it trains; it returns the node that it ends."""


@dataclass(frozen=True)
class Truth:
    """Who failed first: None where nothing did."""

    ranks: tuple[int, ...] = ()
    node: str | None = None
    local_rank: int | None = None
    why: str = ""


@dataclass(frozen=True)
class Grades:
    """`right`, `wrong`, `unknown`, or `-` where there is nothing to know."""

    kind: str
    rank: str
    node: str

    @property
    def verdict(self) -> str:
        grades = (self.kind, self.rank, self.node)
        return "wrong" if "wrong" in grades else "unknown" if "unknown" in (self.kind, self.rank) else "right"


@dataclass(frozen=True)
class Ended:
    """A failure that was made, with what three ways to look at it say."""

    failure: LaunchFailure
    truth: Truth
    why: Grades
    exit_code: Grades
    traceback: Grades
    said: dict[str, Any] = field(default_factory=dict)
    """The answer of `bsl why --json`."""
    state: str = ""
    quoted: str = ""
    """The last line of the last traceback."""
    problem: str = ""
    """Why it could not be made."""

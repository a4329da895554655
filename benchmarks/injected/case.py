"""What an injection is, what is true of it, and what was seen: values between the field and the judge."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from injected.field import Field

Column = Literal["exit status", "cause", "rank", "node", "next step"]
Grade = Literal["right", "unknown", "wrong", "-"]
COLUMNS: tuple[Column, ...] = ("exit status", "cause", "rank", "node", "next step")


@dataclass(frozen=True, slots=True)
class Truth:
    """What is true at one moment, known from how the failure was made.

    `code` is the exit status of the training; a text is a pattern for it, None if it is not judged. `states` are the
    states that `bsl status` may show and `reasons` those of the end; both empty if they are not judged. `rank` is the
    culprit and `node_index` its node by its place in the job: both None if nobody is to blame, and the rank alone None
    if all ranks of that node are equally good answers. `words`, `advice` and `never` are regular expressions: all of
    the words and one of the advice must be in what `bsl status` prints, and none of `never`. `said` must be in the
    output of the `bsl logs` that it advises.
    """

    code: int | str | None = None
    states: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    rank: int | None = None
    node_index: int | None = None
    words: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    said: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """Something that the injection itself observed. `grade` says how that compares with the truth."""

    column: Column
    grade: Grade
    what: str


@dataclass(frozen=True, slots=True)
class Look:
    """What a user saw at one moment.

    `document` is `bsl status --json`, None if it was not asked. `slurm_code` is Slurm's own exit status of the job, as
    a shell writes it. `nodes` are those of the job in the order of its ranks. `logs` is what the advised `bsl logs`
    printed; None if it was not advised.
    """

    moment: str
    document: dict[str, Any] | None = None
    text: str = ""
    slurm_code: int | None = None
    nodes: tuple[str, ...] = ()
    ranks_per_node: int = 2
    logs: str | None = None
    checks: tuple[Check, ...] = ()


@dataclass(frozen=True, slots=True)
class Injection:
    """A failure: how it is made, and what is true at each look.

    `before` is what was said of it before this table existed, in short words. `cluster` says where it is made:
    `isolated` nodes, or `shared`, a cluster whose daemons the injection itself may stop. `is_own` marks those that are
    not among the 28 of the first table, `is_held_out` those of them that were written without looking at how `bsl`
    judges.
    """

    name: str
    what: str
    inject: Callable[[Field], Iterator[Look]]
    truths: tuple[Truth, ...]
    before: str = ""
    cluster: Literal["isolated", "shared", "preempting", "rebooting"] = "isolated"
    is_own: bool = False
    is_held_out: bool = False
    needs_torch: bool = False

    @property
    def group(self) -> Literal["first", "more", "held-out"]:
        """Return which table of the page has it."""
        return "held-out" if self.is_held_out else "more" if self.is_own else "first"


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing in an answer that is not as it should be: which column, how bad, in words."""

    column: Column
    grade: Grade
    what: str


@dataclass(frozen=True, slots=True)
class Row:
    """The judgement of one injection. `problem` says why it could not be made; then nothing was judged."""

    injection: Injection
    grades: dict[Column, Grade]
    faults: tuple[Fault, ...]
    said: tuple[str, ...]
    seconds: float
    problem: str = ""

    @property
    def verdict(self) -> str:
        """`right`, `unknown` if something is only not said, `wrong`, or `not made`."""
        if self.problem:
            return "not made"
        grades = set(self.grades.values())
        return "wrong" if "wrong" in grades else "unknown" if "unknown" in grades else "right"

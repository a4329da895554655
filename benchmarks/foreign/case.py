"""One entry of the table of foreign programs: how it is started, when it is asked about, and what is true then."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

STATES = ("hang", "crashed", "slow", "progressing", "finished")
MOMENTS = ("steady", "starting", "ending", "random")


@dataclass(frozen=True, slots=True)
class ForeignCase:
    """A program, its launcher and its true state.

    `command` is a template: {python} {program} {programs} {culprit} {port} {world_size}
    {folder} are replaced; `program` is a file in the folder {programs}. `culprits` are the ranks that an engineer would
    call guilty once he knows everything; where the evidence is symmetric there are none, and `involved` is the smaller
    side, or both. `classes` are the ids that are exactly right, `also` further states that count as right.

    The program appends lines to the file $FOREIGN_LOG: `TIME WORDS`. The state is reached when `sign`, a regular
    expression, has matched the beginning of the WORDS of `sign_count` lines, and `settle_s` seconds have passed.
    `moment` says when it is asked:

      steady    at two moments after the state has been reached
      ending    the same, with the second soon after the first
      starting  at two moments `between_s` (seconds) after the start; `state` is what is true then
      random    the same; before the sign the truth is "progressing", around it nothing is scored

    A steady case waits between_s after the settling, if given. `needs` are modules that the program's interpreter must
    find, and commands as `command:NAME`. `interpreter` is a name given to the runner by --interpreter NAME=PATH.
    """

    name: str
    framework: str
    launcher: str
    program: str
    command: tuple[str, ...]
    state: str
    world_size: int = 4
    culprits: tuple[int, ...] = ()
    involved: tuple[int, ...] = ()
    classes: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    moment: str = "steady"
    sign: str = "struck"
    sign_count: int = 1
    settle_s: float = 5.0
    between_s: tuple[float, float] = (0.0, 4.0)
    limit_s: float = 200.0
    needs: tuple[str, ...] = ("torch",)
    environment: tuple[tuple[str, str], ...] = ()
    interpreter: str = ""

    def __post_init__(self) -> None:
        """Raises:
        ValueError: a field holds a word that is not one of those above.
        """
        unknown = {self.state, *self.also} - set(STATES)
        if unknown or self.moment not in MOMENTS:
            raise ValueError(f"{self.name}: {sorted(unknown) or self.moment}")
        re.compile(self.sign)

    @property
    def culprit(self) -> int:
        """The rank that is given to the program as {culprit}."""
        return (*self.culprits, *self.involved, 0)[0]


@dataclass(frozen=True, slots=True)
class Truth:
    """What was true when a question was asked. `pids` are the ranks by process, as the program wrote them."""

    state: str
    culprits: frozenset[int]
    involved: frozenset[int]
    classes: frozenset[str]
    also: frozenset[str]
    pids: Mapping[int, int]

    def document(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "culprits": sorted(self.culprits),
            "involved": sorted(self.involved),
            "classes": sorted(self.classes),
            "also": sorted(self.also),
        }


def truth_of(case: ForeignCase, phase: str, pids: Mapping[int, int]) -> Truth:
    """Return what is true in a phase: "reached", or "before" the state has been reached."""
    if phase == "before":
        return Truth("progressing", frozenset(), frozenset(), frozenset(), frozenset(), pids)
    return Truth(
        case.state,
        frozenset(case.culprits),
        frozenset(case.involved),
        frozenset(case.classes),
        frozenset(case.also),
        pids,
    )

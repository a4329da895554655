"""What is done to which run: a seed decides the layout, the injuries, their moments and their victims."""

from __future__ import annotations

import random
from dataclasses import dataclass

KINDS = ("kill", "exit", "exception", "stop", "runner")
"""kill: SIGKILL to the rank. exit: it ends with a code of its own. exception: it raises. stop: SIGSTOP. runner: SIGKILL
to its runner, so that the slot is lost and fewer replicas are left."""

MOMENTS = ("in a step", "in the first step", "in a save", "in an evaluation", "at the end of a step", "in the recovery")


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout and the numbers of a run."""

    tp: int
    pp: int
    dp: int
    precision: str
    dropout: float

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def name(self) -> str:
        return f"tp{self.tp}-pp{self.pp}-dp{self.dp}-{self.precision}"


@dataclass(frozen=True, slots=True)
class Injury:
    """What is done to `victims`, `delay_s` after `moment` has come.

    `wait` is how many steps are finished before, counted from when all standbys wait. In the first step, none do yet.
    """

    kind: str
    moment: str
    wait: int
    delay_s: float
    victims: tuple[int, ...]

    def __str__(self) -> str:
        who = "+".join(map(str, self.victims))
        return f"{self.kind} of rank {who} {self.moment}"


@dataclass(frozen=True, slots=True)
class Case:
    """One run: its layout, and what is done to it."""

    seed: int
    layout: Layout
    injuries: tuple[Injury, ...]


LAYOUTS = (
    Layout(1, 2, 2, "bf16", 0.1),
    Layout(2, 1, 2, "fp32", 0.1),
    Layout(1, 1, 4, "bf16", 0.0),
    Layout(4, 1, 1, "bf16", 0.1),
    Layout(2, 2, 1, "fp32", 0.0),
    Layout(2, 2, 2, "bf16", 0.1),
    Layout(1, 2, 4, "fp32", 0.1),
)
"""Those with 8 ranks come last."""

SHRINKING = (Layout(1, 2, 2, "fp32", 0.0), Layout(1, 1, 4, "fp32", 0.0), Layout(2, 1, 2, "fp32", 0.0))

STEPS, SAVE_EVERY, EVALUATE_EVERY = 40, 6, 8
LONGEST_STEP_S = 0.4


def draw_case(seed: int) -> Case:
    """Return the case of a seed. Every kind, moment and layout comes in turn; the rest is drawn."""
    draw = random.Random(seed)
    kind = draw.choices(KINDS, (50, 12, 12, 8, 18))[0]
    layout = draw.choices(SHRINKING)[0] if kind == "runner" else draw.choices(LAYOUTS, (4, 4, 4, 2, 4, 1, 1))[0]
    moment = draw.choices(MOMENTS, (36, 10, 14, 12, 14, 14))[0]
    first = _draw(draw, kind, "in a step" if moment == "in the recovery" else moment, layout)
    if moment != "in the recovery":
        return Case(seed, layout, (first,))
    second = _draw(draw, "kill", moment, layout)
    return Case(seed, layout, (first, second))


def _draw(draw: random.Random, kind: str, moment: str, layout: Layout) -> Injury:
    number = 2 if kind == "kill" and moment == "in a step" and draw.random() < 0.3 else 1
    victims = tuple(sorted(draw.sample(range(layout.ranks), number)))
    wait = draw.randint(0, 6)
    longest = 1.5 if moment == "in the recovery" else LONGEST_STEP_S if moment == "in a step" else 0.02
    return Injury(kind, moment, wait, draw.random() * longest, victims)

"""One thing that a log or a record of a rank says: a step, an evaluation, a save, a phase."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LogEventKind = Literal[
    "start",
    "phase",
    "step",
    "evaluated",
    "saving",
    "saved",
    "settings",
    "failed",
    "end",
    "output",
    "call",
    "generation",
]

IN_BACKGROUND = "background"


@dataclass(frozen=True, slots=True)
class LogEvent:
    """What was seen. What is not said is None.

    `time` is when it happened by the clock of its source, in seconds since the epoch; None if the source has no times.
    `step` counts optimizer steps done, in `phase` that in progress. `seconds` is how long the step, evaluation or save
    took, as the source says. `phase`: `init`, `load`, `step`, `eval`, `save`, `copy`, `dump`. `batch_size` is the
    global batch size in samples. `rank` is None for a line that may be any rank's. `saved` in the background: `text`
    says so. `output`: a line with none of this, which only shows that something is printed. `settings`: what a program
    prints of its arguments, as `eval_interval=1000` or `save_interval=0` in `text`. `failed`: a line of an error, in
    `text`. `generation`: what the controller of `survive` recorded: `phase` is `ended`, `began`, `joined`, `restored`,
    `first_step` or another word, `world_size` the ranks of one that began. `call`: ranks have begun calls that their
    rings record.
    """

    kind: LogEventKind
    time: float | None = None
    rank: int | None = None
    step: int | None = None
    phase: str | None = None
    seconds: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    batch_size: int | None = None
    total_steps: int | None = None
    world_size: int | None = None
    text: str = ""

"""How long a run has shown nothing new, and whether that is usual for the phase that it is in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum


class Pace(Enum):
    """What a silence means, by the clock alone."""

    USUAL = "usual"
    LONG = "long"
    """Twice what the phase usually takes."""
    TOO_LONG = "too long"
    """More than the phase has ever a reason to take: four times its median, by the clock a stall."""
    UNKNOWN = "unknown"
    """It may be a phase whose length is not known, such as the first evaluation."""


@dataclass(frozen=True, slots=True)
class Silence:
    """`phase` is `start`, `step`, `eval`, `save`, `load`, `dump`, `end` (the ranks have ended, the job has not), or
    `unknown`; `step` the last finished step, None if none was seen. `lasts_s` is how long nothing new was seen,
    `usual_s` the median of the phase; None if it is not known. `sentence` is the whole for readers. In `look_in_s`
    seconds the ranks are worth a look, 0 or less: now. `has_shown`: something new has come since this watch began.
    `quiet_s` is how long the ranks have issued no call either; None if no ring shows their calls. Because of that alone
    they are worth a look in `calls_in_s` seconds.
    """

    pace: Pace
    phase: str
    step: int | None
    lasts_s: float
    usual_s: float | None
    sentence: str
    look_in_s: float = 0.0
    has_shown: bool = True
    quiet_s: float | None = None
    calls_in_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Noticed:
    """Something in what a run reports: `slower`, `loss_spike`, `grad_spike`, `nan`. `since` is by the clock of the
    log events; None if they have none. `step` is where it began. `is_over`: an earlier one has passed."""

    kind: str
    step: int
    sentence: str
    since: float | None = None
    is_over: bool = False

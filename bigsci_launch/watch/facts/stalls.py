"""When to look at ranks that show nothing new, and what the silence and the looks mean together.

The clock alone accuses no rank: a log may be silent while ranks make steps. Nor does one look: ranks that wait may be
served. A hang is what a look calls one; it is confirmed when a second look, later, finds the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from bigsci_launch.runs.watching.ledger import RunFinding
from bigsci_launch.spy.taxonomy import State
from bigsci_launch.units import format_age
from bigsci_launch.watch.facts.look import Look
from bigsci_launch.watch.judge.silence import Pace, Silence

LEAST_SETTLE_S, MOST_SETTLE_S = 2.0, 30.0
"""How long one look lasts at least and at most: about as long as a step, or a tenth of a silence of unknown meaning."""
STALL = "stall:"
"""What the keys of findings about a silence begin with."""
BACK_OFF = 1.25
"""Ranks in doubt are looked at again each time that the silence has become so many times as long."""
MOST_HURRIED, SOON_S, LATER_S = 3, 30.0, 0.3
"""So many looks in a row may instead end a little later than when the ranks may be called hung, if that is soon."""
MOVING_GAPS = 10
"""After a look that found progress, the next one comes after so many of the least times between two looks."""
CERTAIN = 0.95
PATIENT_S = 600.0
"""In a phase of unknown length, the watcher acts on a less certain verdict only after this long."""

TakeLook = Callable[[float, bool], Look]
"""Looks at the ranks for some seconds, and stores evidence also of a doubt, or only of a failure."""


@dataclass(frozen=True, slots=True)
class _Taken:
    """`still_s` is how long the ranks may have stood still: since the silence began, their last call, or a look that
    saw them move."""

    look: Look
    at: float
    lasts_s: float
    still_s: float


class StallWatch:
    """The present silence of one attempt.

    `gap_s` is the least time between two looks: each asks Slurm. A second look that confirms a failure comes
    `confirm_s` after the first.
    """

    def __init__(self, take_look: TakeLook, gap_s: float, confirm_s: float) -> None:
        self._take_look = take_look
        self._gap_s = gap_s
        self._confirm_s = confirm_s
        self._taken: list[_Taken] = []
        self._lasted_s = 0.0
        self._moved_at: float | None = None

    def consider(self, silence: Silence, now: float) -> None:
        """Look at the ranks if that is due. `now` is the watcher's monotonic clock."""
        if silence.lasts_s < self._lasted_s:
            self._taken.clear()
        self._lasted_s = silence.lasts_s
        if self.due_in_s(silence, now) <= 0:
            self.look_now(silence, now)

    def look_now(self, silence: Silence, now: float) -> None:
        """Look at the ranks, for about as long as a step takes."""
        since_moved_s = now - self._moved_at if self._moved_at is not None else silence.lasts_s
        still_s = min(silence.lasts_s, since_moved_s, *(() if silence.quiet_s is None else (silence.quiet_s,)))
        usual_s = silence.usual_s if silence.usual_s is not None else still_s / 10
        if (hang_at := self._hang_at()) is not None:
            usual_s = hang_at + LATER_S - now
        settle_s = min(max(usual_s, LEAST_SETTLE_S), MOST_SETTLE_S)
        look = self._take_look(settle_s, silence.pace is not Pace.USUAL)
        self._taken.append(_Taken(look, now, silence.lasts_s, still_s))
        self._moved_at = now if look.is_moving else self._moved_at

    def due_in_s(self, silence: Silence, now: float) -> float:
        """Return in how many seconds the ranks are to be looked at; 0 or less: now."""
        if silence.look_in_s > 0 or not self._taken:
            return silence.look_in_s
        last = self._taken[-1]
        if last.look.is_failure and self.is_confirmed:
            return 2 * last.lasts_s - silence.lasts_s
        if last.look.is_failure:
            return last.at + self._confirm_s - now
        if last.look.is_moving:
            has_called = silence.quiet_s is not None and silence.quiet_s < now - last.at
            rests_s = last.at + MOVING_GAPS * self._gap_s - now
            return min(rests_s, silence.calls_in_s) if has_called else rests_s
        hang_at = self._hang_at()
        again = last.at + (BACK_OFF - 1) * last.still_s if hang_at is None else hang_at + LATER_S - LEAST_SETTLE_S
        return max(last.at + self._gap_s, again) - now

    def _hang_at(self) -> float | None:
        """When the ranks may be called hung, if that is soon, and they were in doubt a few times only."""
        if not 0 < len(self._taken) <= MOST_HURRIED:
            return None
        last = self._taken[-1]
        return last.look.hang_at if last.look.hang_at and last.look.hang_at - last.at <= SOON_S else None

    @property
    def look(self) -> Look | None:
        """The newest look of this silence; None if there was none."""
        return self._taken[-1].look if self._taken else None

    @property
    def is_confirmed(self) -> bool:
        """Whether two looks in a row found the same failure, with the same ranks."""
        if len(self._taken) < 2:
            return False
        one, other = (each.look for each in self._taken[-2:])
        return one.is_failure and other.is_failure and one.state is other.state and one.suspects == other.suspects

    def may_act(self, silence: Silence) -> bool:
        """Whether a watcher that may act may end the ranks now."""
        if silence.pace is Pace.USUAL:
            return False
        is_known = silence.pace in (Pace.LONG, Pace.TOO_LONG) or silence.lasts_s >= PATIENT_S
        return self.is_confirmed and (is_known or all(each.look.confidence >= CERTAIN for each in self._taken[-2:]))

    def is_unexplained(self, silence: Silence) -> bool:
        """Whether ranks do nothing for too long, and two looks in a row found neither progress nor a suspect."""
        looks = [each.look for each in self._taken[-2:]]
        seen = all(look.state is not None and not look.is_moving and not look.suspects for look in looks)
        return len(looks) == 2 and seen and (self.may_act(silence) or silence.pace is Pace.TOO_LONG)

    def finding(self, silence: Silence, attempt: str | None) -> RunFinding | None:
        """Return what is wrong; None if nothing is known to be. A hang stays one until something moves."""
        telling = (each.look for each in reversed(self._taken) if each.look.is_failure or each.look.is_moving)
        found, look = next(telling, None), self.look
        if found is not None and found.is_failure:
            kind = "hang" if found.state is State.HANG else "dead"
            return self._made(kind, silence, attempt, found.sentence, found)
        if silence.pace is not Pace.TOO_LONG:
            return None
        if look is None or look.state is None:
            failed = f"the ranks could not be examined: {look.sentence}" if look else ""
            return self._made("stall", silence, attempt, failed, look)
        if look.state is State.SLOW:
            return self._made("slow", silence, attempt, look.sentence, look)
        return None if look.is_moving else self._made("stall", silence, attempt, look.sentence, look)

    def _made(self, kind: str, silence: Silence, attempt: str | None, said: str, look: Look | None) -> RunFinding:
        now = time.time()
        return RunFinding(
            kind=kind,
            key=f"{STALL}{attempt}:{silence.step}",
            sentence=f"{said}; {silence.sentence}" if said else silence.sentence,
            noticed=now,
            attempt=attempt,
            step=silence.step,
            since=now - silence.lasts_s,
            details=look.details if look else (),
            bundle=str(look.bundle) if look is not None and look.bundle else None,
            signature=look.signature if look else "",
            accuses=look is not None and bool(look.suspects),
        )

    def remark(self, silence: Silence) -> str:
        """Return the remark about a silence that is not a finding; empty if there is none."""
        look = self.look
        if silence.pace is Pace.TOO_LONG and look is not None and look.is_moving:
            return f"no output for {format_age(silence.lasts_s)}, but the ranks make progress: {look.sentence}"
        return ""

    def blindness(self, silence: Silence) -> str:
        """Return why it is not known whether the run makes progress; empty if it is."""
        look = self.look
        if look is not None and (look.is_moving or look.is_failure):
            return ""
        if silence.look_in_s > 0:
            last = "no step has been seen" if silence.step is None else f"the last step that was seen is {silence.step}"
            return "" if silence.has_shown else f"nothing new has come since this watch began: {last}"
        said = "" if look is None else f": {look.sentence}"
        return f"{silence.sentence}{said}"

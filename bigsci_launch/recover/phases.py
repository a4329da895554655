"""How far a generation has come, by the words of its ranks; and when generations make no progress."""

from __future__ import annotations

from typing import Any

SOURCES = ("memory", "replicas", "buddies", "checkpoint", "start")
"""Where state came from, the best first: a generation is as good as its worst rank."""
LOST = ("checkpoint", "start")
WORDS = ("joined", "restored", "stepped", "standby")
"""What every rank says in a generation. The last one: a standby waits next to it."""
MAX_WITHOUT_PROGRESS = 3
SHORT_S = 60.0
"""A generation that reports no step, and lived for less than this, made no progress."""


class Phases:
    """The phases of one generation. Each is recorded when its last rank has said so."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._said: dict[str, dict[int, dict[str, Any]]] = {word: {} for word in WORDS}
        self._is_recorded: set[str] = set()
        self.step: int | None = None
        """The newest step that any rank has finished, or restored."""

    @property
    def has_stepped(self) -> bool:
        """Whether every rank has finished a step."""
        return len(self._said["stepped"]) == self._world_size

    @property
    def back_at(self) -> int | None:
        """The step from which all ranks begin again because the state was lost; None if it was not."""
        found = list(self._said["restored"].values())
        is_lost = any(fields.get("source") in LOST for fields in found)
        return min((step for fields in found if (step := _step(fields)) is not None), default=None) if is_lost else None

    def step_of(self, rank: int) -> int | None:
        """Return the newest step that a rank has finished or restored; None if it has reported none."""
        for word in ("stepped", "restored"):
            if rank in self._said[word]:
                return _step(self._said[word][rank])
        return None

    def note(self, rank: int, word: str, fields: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """Note a word of a rank. Returns the record of a phase that is complete with it."""
        if word not in self._said:
            return None
        self._said[word][rank] = fields
        step = _step(fields)
        if step is not None and (self.step is None or step > self.step):
            self.step = step
        phase = "first_step" if word == "stepped" else word
        if phase in self._is_recorded or len(self._said[word]) < self._world_size:
            return None
        self._is_recorded.add(phase)
        return self._record(phase, list(self._said[word].values()), seconds)

    def _record(self, phase: str, said: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
        steps = [step for fields in said if (step := _step(fields)) is not None]
        sources = [fields["source"] for fields in said if fields.get("source") in SOURCES]
        whys = [str(fields["why"]) for fields in said if fields.get("why")]
        return {
            "phase": phase,
            "seconds": round(seconds, 3),
            "step": min(steps, default=None),
            "source": max(sources, key=SOURCES.index, default=None),
            "why": whys[0] if whys else None,
        }


class StandstillCount:
    """Counts generations in a row that got no further than the furthest step of all, that one included.

    Where the state was lost, it counts on from the step that the ranks have gone back to. It also counts generations in
    a row that lose it.
    """

    def __init__(self, *, knows_steps: bool) -> None:
        """`knows_steps`: ranks report every step, so that no step means that none was finished."""
        self._knows_steps = knows_steps
        self.furthest: int | None = None
        """The last step that any generation has finished since the state was lost; None if it is not known."""
        self._number = self._losses = 0

    def note(self, step: int | None, lived_s: float, back_at: int | None = None) -> bool:
        """Note the end of a generation at `step`; the state was lost before it, and it began after step `back_at`.
        Returns whether that is the third in a row without progress, or that has lost the state."""
        if back_at is not None and self.furthest is not None and back_at < self.furthest:
            self.furthest, self._losses = back_at, self._losses + 1
        else:
            self._losses = 0
        if step is None:
            stands = self._knows_steps or lived_s < SHORT_S
        else:
            stands = self.furthest is not None and step <= self.furthest
            self.furthest = step if self.furthest is None else max(step, self.furthest)
        self._number = self._number + 1 if stands else int(step is not None)
        return max(self._number, self._losses) >= MAX_WITHOUT_PROGRESS

    def words(self, cause: object) -> str:
        """Return why there is no further generation after those; `cause` ended the last."""
        where = "ended without a known step"
        if self._losses >= MAX_WITHOUT_PROGRESS:
            where = "lost the state"
        elif self.furthest is not None:
            where = f"got no further than step {self.furthest}"
        return f"{MAX_WITHOUT_PROGRESS} generations in a row {where}, the last because {cause}"


def _step(fields: dict[str, Any]) -> int | None:
    step = fields.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) else None

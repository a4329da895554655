"""How far a generation has come, by the words of its ranks; and when generations make no progress."""

from __future__ import annotations

from typing import Any

SOURCES = ("memory", "buddies", "checkpoint", "start")
"""Where state came from, the best first: a generation is as good as its worst rank."""
WORDS = ("joined", "restored", "stepped", "standby")
"""What every rank says in a generation. The last one: a standby waits next to it."""
MAX_WITHOUT_PROGRESS = 3
SHORT_S = 60.0
"""A generation that tells no step, and lived for less than this, made no progress."""


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

    def step_of(self, rank: int) -> int | None:
        """Return the newest step that a rank has finished or restored; None if it has told none."""
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
    """Counts generations in a row that ended without progress."""

    def __init__(self, *, knows_steps: bool) -> None:
        """`knows_steps`: ranks tell every step, so that no step means that none was finished."""
        self._knows_steps = knows_steps
        self.step: int | None = None
        """The step at which the newest generation ended; None if it is not known."""
        self._number = 0

    def note(self, step: int | None, lived_s: float) -> bool:
        """Note the end of a generation at `step`. Returns whether that is the third in a row without progress."""
        is_short = lived_s < SHORT_S
        if self._knows_steps:
            step = self.step if step is None else step
        is_known = self._knows_steps or step is not None
        is_same = step == self.step if is_known and (self._knows_steps or self.step is not None) else is_short
        counts = is_known or is_short
        self._number = self._number + 1 if is_same and self._number else int(counts)
        self.step = step
        return self._number >= MAX_WITHOUT_PROGRESS


def _step(fields: dict[str, Any]) -> int | None:
    step = fields.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) else None

"""A watcher with a clock of its own, and sightings as readers make them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from bigsci_launch.watch.judge.course import Course
from bigsci_launch.watch.judge.expected import Expected
from bigsci_launch.watch.judge.silence import Noticed, Silence
from bigsci_launch.watch.sighting import Sighting

STEP_S = 100.0


@dataclass
class Watched:
    """A course, and the time by the watcher's clock."""

    course: Course
    now: float = 5000.0
    noticed: list[Noticed] = field(default_factory=list)

    def see(self, *sightings: Sighting, after: float = 0.0) -> None:
        self.now += after
        self.course.take(sightings, self.now)
        self.noticed += self.course.noticed()

    def silent(self, seconds: float) -> Silence:
        """What is said after so many seconds without anything new."""
        return self.course.silence(self.now + seconds)

    def steps(self, first: int, last: int, seconds: float = STEP_S) -> None:
        for step in range(first, last + 1):
            self.see(Sighting("step", step=step, seconds=seconds), after=seconds)


@pytest.fixture
def watch() -> Callable[..., Watched]:
    def start(**expected: float) -> Watched:
        return Watched(Course(Expected(**expected)))  # type: ignore[arg-type]

    return start

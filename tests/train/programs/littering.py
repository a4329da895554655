"""Like `several`, but each step leaves a circle of garbage, and rank 1 makes so many objects that Python would collect.

Each rank writes `collections-RANK.json` into the attempt: the step and the generation of each collection during the
training, and in which steps the circles were made that are still there at its end.
"""

from __future__ import annotations

import gc
import json
import os
import weakref
from typing import Any

import several

EVERY = 4


class Circle:
    def __init__(self, step: int) -> None:
        self.step, self.itself = step, self


def litter() -> None:
    from bigsci_launch.train import loop
    from bigsci_launch.train.steps import garbage

    garbage.EVERY = EVERY
    step = loop._step
    now, seen, left = [0], list[tuple[int, int]](), list[weakref.ref[Circle]]()

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append((now[0], info["generation"]))

    def run(training: Any, progress: Any) -> Any:
        now[0] = progress.step + 1
        left.append(weakref.ref(Circle(now[0])))
        _ = [[] for _ in range(50_000 * int(os.environ["RANK"]))]
        done = step(training, progress)
        if now[0] == 1:
            gc.callbacks.append(note)
        there = [each.step for each in (ref() for ref in left) if each is not None]
        path = training.setup.identity.attempt.path / f"collections-{os.environ['RANK']}.json"
        path.write_text(json.dumps({"seen": seen, "left": there}))
        return done

    loop._step = run


if __name__ == "__main__":
    several.main(litter)

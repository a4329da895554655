"""Collects Python's garbage at the end of the same steps on all ranks.

Python would do it when a process has made enough objects. That moment is another one on each rank: one pauses, and all
others wait for it in their next collective. A step leaves nothing in circles, so there is little to find.
"""

from __future__ import annotations

import gc

from bigsci_launch.train.steps.companion import Companion, StepDone

EVERY = 50
"""Steps between two collections. Objects that hold memory of a device must not wait for long."""


class Garbage(Companion):
    """Collects after the first step of an attempt, and then after every `EVERY` steps.

    What is there after the first step is what training needs until it ends: code that was imported or compiled, the
    model, the engine. Frozen, it is not looked at again. It can then not be freed either, so a process that outlives
    its engine does not freeze it.
    """

    def __init__(self, *, freezes: bool) -> None:
        self._freezes, self._has_begun = freezes, False

    def after_step(self, done: StepDone) -> None:
        if not self._has_begun:
            self._has_begun = True
            gc.disable()
            gc.collect()
            if self._freezes:
                gc.freeze()
        elif done.progress.step % EVERY == 0:
            gc.collect()

    def close(self) -> None:
        if self._has_begun:
            gc.enable()

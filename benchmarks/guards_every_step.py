"""Trains attempts like `several` and writes what the guards took in each step that was not checked.

    python -m guards_every_step RUN/ATTEMPT...    (a rank's environment; `guards_cost.py` starts it)

What a step calls of them is timed on rank 0, without the time of waiting for other ranks: none of them
communicates in such a step. The word that the ranks exchange is left out, because the trainer needs it
without guards, and so is reading the data.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import several

FILE = "guards-ms.json"
EVERY_SECOND, UNCHECKED = "every-second", "unchecked"
"""Names of runs that check every second step, or none after the first ones; others choose their interval."""


def timed(
    original: Callable[..., Any], note: Callable[[float], None], settle: Callable[[], None] = lambda: None
) -> Callable[..., Any]:
    """Return `original` that reports the seconds it takes. `settle` is called before the clock is read: it may wait for
    a device, whose work is not that of `original`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        settle()
        started = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            settle()
            note(time.perf_counter() - started)

    return run


def time_guards(note: Callable[[float], None], settle: Callable[[], None] = lambda: None) -> None:
    """Time what guards do in a step, apart from its beginning."""
    from bigsci_launch.train.guards.engine.adam import OptimizerWatch
    from bigsci_launch.train.guards.engine.clipping import ClipWatch
    from bigsci_launch.train.guards.engine.data import DataWatch
    from bigsci_launch.train.guards.engine.watch import EngineGuards

    for owner, names in (
        (EngineGuards, ("alarm", "after_words", "check_step", "after_step")),
        (DataWatch, ("word",)),
        (ClipWatch, ("see_reduced", "see_used")),
        (OptimizerWatch, ("_look",)),
    ):
        for name in names:
            setattr(owner, name, timed(getattr(owner, name), note, settle))


def stand_in(spent: dict[int, float]) -> None:
    """Time what guards do in a step."""
    from bigsci_launch.train.guards.engine.watch import EngineGuards

    step = 0

    def note(seconds: float) -> None:
        spent[step] += seconds

    before_step = EngineGuards.before_step

    def begin(self: EngineGuards, number: int) -> None:
        nonlocal step
        step = number
        before_step(self, number)

    time_guards(note)
    choose = EngineGuards._choose_interval

    def choose_interval(self: EngineGuards, cost: float, seconds: float) -> None:
        fixed = {EVERY_SECOND: 2, UNCHECKED: 1000}.get(self._config.run.name)
        if fixed is None:
            choose(self, cost, seconds)
        else:
            self.interval = fixed

    EngineGuards._choose_interval = choose_interval  # type: ignore[method-assign]
    EngineGuards.before_step = timed(begin, note)  # type: ignore[method-assign]


def main() -> None:
    """Train the attempts whose folders are on the command line."""
    train_one, spent = several.train_one, defaultdict(float)
    is_standing = False

    def first_stand_in() -> None:
        nonlocal is_standing
        if not is_standing:
            stand_in(spent)
            is_standing = True
        spent.clear()
        train_one()
        if os.environ["RANK"] == "0":
            attempt = Path(os.environ["BSL_RUN_DIR"]) / "attempts" / os.environ["BSL_ATTEMPT"]
            (attempt / FILE).write_text(json.dumps({step: 1e3 * seconds for step, seconds in spent.items()}))

    several.train_one = first_stand_in
    several.main()


if __name__ == "__main__":
    main()

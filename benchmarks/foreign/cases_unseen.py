"""Programs that were written after the rules and run once, when these were frozen. A third are traps: the many are
wrong, or nothing is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foreign.case import ForeignCase
from foreign.cases_majority import LAUNCHERS


def unseen(
    name: str, way: str, wrong: Sequence[int], launcher: str = "torchrun", state: str = "hang", **more: Any
) -> ForeignCase:
    """Return a case in which the ranks `wrong` do what the way says."""
    command = (*LAUNCHERS[launcher], way, ",".join(map(str, wrong)))
    more = {"culprits": tuple(wrong), "sign_count": 3, "limit_s": 400.0, **more}
    return ForeignCase(f"unseen-{name}", "own loop", launcher, "small_hours.py", command, state, **more)


FEW_WRONG = (
    unseen("worker", "worker", (1,), world_size=3),
    unseen("sealed", "sealed", (2,), "bash", world_size=3),
    unseen("uneven", "uneven", (3,)),
    unseen("objects", "objects", (0,), world_size=3),
    unseen("order", "order", (1,)),
    unseen("preempted", "preempted", (2,), "own", world_size=3),
    unseen("crossed", "crossed", (0,), world_size=3),
    unseen("frozen", "frozen", (1,), "bash", world_size=3),
    unseen("counted", "counted", (3,)),
    unseen("early", "early", (2,), world_size=3),
    unseen("swallowed", "swallowed", (1,), "own"),
)

TRAPS = (
    unseen("census-many", "census", (0, 1, 3)),
    unseen("counted-many", "counted", (0, 1, 2), "own"),
    unseen("swallowed-many", "swallowed", (0, 2, 3)),
    unseen("examines", "examines", (0,), state="slow", also=("progressing",), world_size=3, settle_s=10.0),
    unseen("cools", "cools", (0,), state="progressing", culprits=(), world_size=3, sign="cooled 2 ", settle_s=3.0),
)

CASES: tuple[ForeignCase, ...] = (*FEW_WRONG, *TRAPS)

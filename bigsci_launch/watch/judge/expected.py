"""What is known of a run before it is watched."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Expected:
    """Intervals in steps, 0 for never, and times in seconds. None: not known; it is then learned from what is seen."""

    step_time_s: float | None = None
    eval_interval: int | None = None
    eval_time_s: float | None = None
    save_interval: int | None = None
    save_time_s: float | None = None
    start_time_s: float | None = None

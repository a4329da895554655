"""How long before the time limit ranks are asked to save and stop. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.units import parse_slurm_duration

SLACK_S = 60
"""Part of the exit margin: Slurm counts time limits in half-minute steps, and ranks need some seconds to exit."""


@dataclass(frozen=True, slots=True)
class ExitMargin:
    """How many seconds before the time limit ranks are asked to save and stop, and how that was computed."""

    margin_s: int
    how: str


def usual_margin_s(config: RunConfig) -> int:
    """Return the margin in seconds that a run needs, if its time limit leaves room for it.

    The signal may come just after a step and a save have begun. These must end, then the step in which all ranks agree
    to stop, and the last save.
    """
    monitor = config.monitor
    if monitor.exit_margin_s is not None:
        return monitor.exit_margin_s
    return math.ceil(2 * (monitor.step_time_s + monitor.save_time_s)) + SLACK_S


def exit_margin(config: RunConfig) -> ExitMargin | None:
    """Return the margin of a run; None if it has no time limit. A computed one is at most half of the limit."""
    if config.slurm.time_limit is None:
        return None
    monitor, margin_s = config.monitor, usual_margin_s(config)
    if monitor.exit_margin_s is not None:
        return ExitMargin(margin_s, f"{margin_s} s before the limit: monitor.exit_margin_s")
    how = f"{margin_s} s = 2 x (step {monitor.step_time_s:g} s + save {monitor.save_time_s:g} s) + slack {SLACK_S} s"
    half_s = parse_slurm_duration(config.slurm.time_limit) // 2
    if margin_s > half_s:
        return ExitMargin(max(half_s, 1), f"{half_s} s: half of the time limit, which is less than {how}")
    return ExitMargin(margin_s, how)

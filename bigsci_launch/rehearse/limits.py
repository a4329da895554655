"""How long each part of a rehearsal may take before it counts as failed. Seconds. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from bigsci_launch.config.exit_margin import usual_margin_s
from bigsci_launch.config.schema.run import RunConfig

RANKS_START_S = 300.0
"""From the start of the job until the last rank runs: containers and shared file systems are slow."""
FIRST_STEP_S = 600.0
"""Until the first step of `bsl train`, apart from the steps themselves: imports, the model, the process groups."""
LEAST_S = 30.0
SLOWEST = 3.0
"""How many times longer than expected a step or a save may take."""
TEARDOWN_S = 300.0
"""From the kill of a rank to the end of the job. Slurm's own limits (KillWait, UnkillableStepTimeout) are shorter."""


@dataclass(frozen=True, slots=True)
class RehearsalLimits:
    """`pending_s` is the longest wait for nodes; `stop_s` the exit margin of the run, which a stop must keep."""

    pending_s: float
    ranks_s: float
    first_step_s: float
    step_s: float
    save_s: float
    stop_s: float
    teardown_s: float

    @classmethod
    def of_config(cls, config: RunConfig, *, pending_s: float) -> RehearsalLimits:
        """Return the limits for a run whose expected times are in `monitor`."""
        monitor = config.monitor
        step_s = max(LEAST_S, SLOWEST * monitor.step_time_s)
        return cls(
            pending_s=pending_s,
            ranks_s=RANKS_START_S,
            # Another program may not print its steps at all.
            first_step_s=step_s + (FIRST_STEP_S if config.run.starts_trainer else 0.0),
            step_s=step_s,
            save_s=max(LEAST_S, SLOWEST * (monitor.save_time_s + monitor.eval_time_s)),
            stop_s=float(usual_margin_s(config)),
            teardown_s=TEARDOWN_S,
        )

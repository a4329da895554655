"""How long ranks may take to save or to stop after they were asked to. Ended too early, they lose their work."""

from __future__ import annotations

from collections.abc import Callable

from bigsci_launch.config.schema.run import MonitorSection, RunConfig

SLACK_S = 30.0


def patience_s(usual_s: Callable[[str], float | None], config: RunConfig | None) -> float:
    """Return the seconds after which ranks that have not done what they were asked to are taken for hung.

    As before the time limit: the step and the save in progress must end, then the step in which all ranks agree, and
    the last save; an evaluation may come first. `usual_s` says how long a phase of the run takes, or None; then it is
    what the run file expects.
    """
    monitor = config.monitor if config is not None else MonitorSection()
    step_s, save_s = usual_s("step") or monitor.step_time_s, usual_s("save") or monitor.save_time_s
    eval_s = usual_s("eval") or monitor.eval_time_s
    return max(monitor.exit_margin_s or 0.0, SLACK_S + 3 * step_s + 2 * save_s + 2 * eval_s)

"""What is done to a job from outside, once it trains."""

from __future__ import annotations

from failing.case import Live


def cancel(live: Live) -> None:
    live.cluster.ask("scancel", live.job_id)


def cut_power(live: Live) -> str:
    """End the last node of a job as a power cut does."""
    live.cluster.bsl("cluster", "kill-node", live.nodes[-1])
    return live.nodes[-1]

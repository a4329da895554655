"""Hours of training to expect of a day in which nodes fail and none is repaired, with and without spare nodes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from bigsci_launch.plan.survive.expected import expected_run
from bigsci_launch.plan.survive.trace import Strategy

DAY_H = 24.0
IN_PLACE_S = 10.0
"""Seconds of a recovery of `bsl train` on many nodes. Assumed: 4 to 8 ranks on one machine take about 3."""
START_AGAIN_S = 300.0
"""Seconds in which another program starts again and loads its checkpoint. Assumed: programs differ."""


@dataclass(frozen=True, slots=True)
class Endurance:
    """How a job behaves that loses nodes. `replicas[n]` are the data-parallel replicas that n nodes can hold, at most
    those of the run; 0 where the job ends. `pause_s` is what each loss costs, in seconds."""

    num_nodes: int
    replicas: tuple[int, ...]
    pause_s: float
    horizon_h: float


def hours_per_day(job: Endurance, num_spares: int, node_mtbf_h: float) -> float:
    """Return the expected hours of training a day, counted at full size, in a job with spare nodes."""
    full = job.replicas[job.num_nodes]

    def rate(nodes: int) -> float:
        return job.replicas[min(nodes, job.num_nodes)] / full

    strategy = Strategy("survive", rate, lambda before, after: job.pause_s if before != after else 0.0)
    expected = expected_run(strategy, job.num_nodes + num_spares, node_mtbf_h, job.horizon_h)
    return DAY_H * expected.effective_share

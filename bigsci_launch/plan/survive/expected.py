"""What a strategy trains on average if every node fails independently, after `node_mtbf_h` hours, and is not replaced.

The nodes left after t hours are binomial: each of N is left with probability exp(-t / mtbf). The integral over t has a
closed form. With n nodes, one is lost at the rate n / mtbf, and such a loss happens before the horizon H exactly if
fewer than n nodes are left at H. The expected time with n nodes is therefore mtbf / n x P(fewer than n left at H).
Of that time, what comes later than a pause of d after the loss is exp(-n d / mtbf) x the same with the horizon H - d,
because nodes do not age.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, lgamma, log

from bigsci_launch.plan.survive.trace import Strategy

NEGLIGIBLE = 1e-17


@dataclass(frozen=True, slots=True)
class ExpectedRun:
    """Averages over all ways to fail until the horizon. `effective_share` is of a run at full size without failures."""

    effective_share: float
    paused_share: float
    stopped_share: float
    num_losses: float


def expected_run(strategy: Strategy, num_nodes: int, node_mtbf_h: float, horizon_h: float) -> ExpectedRun:
    """Return what to expect of `num_nodes` nodes over `horizon_h` hours.

    Exact for pauses of equal length, also if a node fails during a pause. Where an earlier pause is longer, the part of
    it that outlasts the next one is not counted.

    Raises:
        ValueError: a time is not positive, or the strategy cannot train at full size.
    """
    full = strategy.samples_per_second(num_nodes)
    if node_mtbf_h <= 0 or horizon_h <= 0 or full <= 0:
        raise ValueError(
            f"{strategy.name}: nothing to expect of {full:g} samples per second in {horizon_h:g} h, "
            f"with a node failing every {node_mtbf_h:g} h"
        )
    trained = paused = able = 0.0
    for nodes in range(num_nodes, 0, -1):
        rate = strategy.samples_per_second(nodes)
        if rate <= 0:
            continue
        hours = _hours(num_nodes, nodes, node_mtbf_h, horizon_h)
        if hours <= NEGLIGIBLE * horizon_h:
            continue
        pause_h = strategy.pause_s(nodes + 1, nodes) / 3600 if nodes < num_nodes else 0.0
        working = hours
        if pause_h > 0:
            later = _hours(num_nodes, nodes, node_mtbf_h, horizon_h - pause_h)
            working = exp(-nodes * pause_h / node_mtbf_h) * later
        able += hours
        paused += hours - working
        trained += rate * working
    losses = -num_nodes * expm1(-horizon_h / node_mtbf_h)
    return ExpectedRun(trained / (full * horizon_h), paused / horizon_h, max(0.0, 1 - able / horizon_h), losses)


def _hours(num_nodes: int, nodes: int, node_mtbf_h: float, horizon_h: float) -> float:
    """Return the expected hours with exactly `nodes` nodes, of `num_nodes` at the start."""
    if horizon_h <= 0:
        return 0.0
    return node_mtbf_h / nodes * _fewer_left(num_nodes, nodes, horizon_h / node_mtbf_h)


def _fewer_left(num_nodes: int, nodes: int, lifetimes: float) -> float:
    """Return the probability that fewer than `nodes` of `num_nodes` are left after so many mean lifetimes.

    The tail that does not hold the mean is summed, from its largest term on, so a few standard deviations suffice.
    """
    left, failed = exp(-lifetimes), -expm1(-lifetimes)
    if left <= 0:
        return 1.0
    is_lower = nodes - 1 < num_nodes * left
    count = nodes - 1 if is_lower else nodes
    term = exp(
        lgamma(num_nodes + 1)
        - lgamma(count + 1)
        - lgamma(num_nodes - count + 1)
        - count * lifetimes
        + (num_nodes - count) * log(failed)
    )
    tail = 0.0
    while term > tail * NEGLIGIBLE and 0 <= count <= num_nodes:
        tail += term
        if is_lower:
            term *= count * failed / ((num_nodes - count + 1) * left)
            count -= 1
        else:
            term *= (num_nodes - count) * left / ((count + 1) * failed)
            count += 1
    return tail if is_lower else 1 - tail

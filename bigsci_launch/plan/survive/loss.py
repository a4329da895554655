"""Answers `bsl plan --lose`: which node works where before and after a loss, and what has to move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bigsci_launch.errors import ConfigError
from bigsci_launch.plan.survive.compose import Composition, price_composition
from bigsci_launch.plan.survive.reconfigure import (
    Means,
    Nodes,
    Pipelines,
    Reconfiguration,
    TooFewNodes,
    reconfigure,
)
from bigsci_launch.plan.survive.survival import OnNodes, Survival, Tier, step_seconds
from bigsci_launch.plan.survive.transfer import TransferPlan, in_old_order, plan_transfer


@dataclass(frozen=True, slots=True)
class Loss:
    """What a loss does. `seconds` are those of a step; `transfer_seconds` pass before the next step can begin.

    `later_seconds` is how long the copies of the optimizer's shards take beyond that; until then one more loss may cost
    state. `failures_left` holds once they are made.
    """

    lost: Nodes
    before: Pipelines
    after: Pipelines
    idle: Nodes
    means: Means
    composition: Composition
    seconds_before: float
    seconds: float
    transfer: TransferPlan
    transfer_seconds: float
    later_seconds: float
    failures_left: int


def lay_out(sizes: Sequence[int], nodes: Sequence[str]) -> Pipelines:
    """Return the pipelines that the nodes form in their order."""
    found, at = [], 0
    for size in sizes:
        found.append(tuple(nodes[at : at + size]))
        at += size
    return tuple(found)


def plan_loss(survival: Survival, nodes: Sequence[str], lost: Sequence[str]) -> Loss:
    """Return what losing nodes does to the pipelines that all nodes form.

    Raises:
        ConfigError: a lost node is not one of the nodes, they are not planned for, or what is left holds no replica.
    """
    _require_known(nodes, lost)
    found = survival.by_nodes.get(len(nodes))
    if found is None:
        raise ConfigError(
            f"--lose: the plan is for up to {survival.num_nodes} nodes, not for {len(nodes)} nodes",
            hint=f"name at most {survival.num_nodes} nodes of the run",
        )
    before = lay_out(found.composition.sizes, nodes)
    idle = tuple(node for node in nodes[sum(found.composition.sizes) :] if node not in lost)
    return _replan(survival, found, before, idle, tuple(dict.fromkeys(lost)))


def _require_known(nodes: Sequence[str], lost: Sequence[str]) -> None:
    known = {*nodes}
    for node in lost:
        if node not in known:
            raise ConfigError(
                f"--lose {node}: the run has no such node", hint=f"its nodes: {nodes[0]} to {nodes[-1]}, {len(nodes)}"
            )


def _replan(survival: Survival, found: OnNodes, before: Pipelines, idle: Nodes, lost: Nodes) -> Loss:
    replica = survival.replica
    num_left = sum(node not in lost for nodes in before for node in nodes) + len(idle)
    target = survival.by_nodes.get(num_left)
    if target is None:
        fewest = min(survival.by_nodes)
        raise ConfigError(
            f"--lose: {num_left} nodes are left, and a replica needs {fewest}; the run stops",
            hint="a checkpoint and other nodes are needed to continue",
        )
    changed, tier = _reconfigured(survival, before, {*lost}, idle)
    after = in_old_order(before, changed.pipelines)
    sizes = tuple(sorted(map(len, after)))
    composition = price_composition(sizes, tier.templates, replica.num_micro_batches)
    transfer = plan_transfer(
        before,
        after,
        {*lost},
        {size: template.counts for size, template in found.tier.templates.items()},
        replica.stages_per_node,
        replica.model_bytes,
        survival.failures,
        {size: template.counts for size, template in tier.templates.items()},
    )
    rate = replica.calibration.constants.network_gb_per_s * 1e9
    return Loss(
        lost=lost,
        before=before,
        after=after,
        idle=changed.idle,
        means=changed.means,
        composition=composition,
        seconds_before=found.seconds,
        seconds=step_seconds(replica, composition),
        transfer=transfer,
        transfer_seconds=transfer.now.seconds(rate),
        later_seconds=transfer.afterwards.seconds(rate),
        failures_left=survival.failures_left(len(after)),
    )


def _reconfigured(survival: Survival, before: Pipelines, lost: set[str], idle: Nodes) -> tuple[Reconfiguration, Tier]:
    """Return the pipelines that are fastest after the loss, of those that each tier's templates would give."""
    num_left = sum(node not in lost for nodes in before for node in nodes) + len(idle)
    options = []
    for tier in survival.tiers:
        if tier.replicas * tier.fewest_nodes > num_left:
            continue
        try:
            changed = reconfigure(before, lost, tuple(tier.templates), tier.replicas - 1, idle)
        except TooFewNodes:
            continue
        if len(changed.pipelines) < tier.replicas:
            # With larger shards of the optimizer than the tier's templates have room for.
            continue
        sizes = tuple(sorted(map(len, changed.pipelines)))
        priced = price_composition(sizes, tier.templates, survival.replica.num_micro_batches)
        kept = min(tier.replicas, survival.failures + 1)
        options.append((-kept, step_seconds(survival.replica, priced), tier.replicas, changed, tier))
    _, _, _, changed, tier = min(options, key=lambda option: option[:3])
    return changed, tier

"""What `bsl plan` says of a run with `survive`: the memory of its copies, and what spare nodes are worth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bigsci_launch.config.finding import Finding, Severity
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.config.schema.survive import SurviveSection
from bigsci_launch.config.site import Site
from bigsci_launch.plan.choose.answer import configured_setup
from bigsci_launch.plan.choose.search import make_plan
from bigsci_launch.plan.price.calibration import Calibration
from bigsci_launch.plan.shape.ramp import phases_of
from bigsci_launch.plan.shape.setup import Setup
from bigsci_launch.plan.survive.host_memory import copies_gib
from bigsci_launch.plan.survive.spares import (
    DAY_H,
    IN_PLACE_S,
    START_AGAIN_S,
    Endurance,
    hours_per_day,
)
from bigsci_launch.units import parse_slurm_duration

FULL_SHARE = 0.5
"""Share of a node's host memory above which copies are worth a warning: ranks, loaders and files need some too."""


@dataclass(frozen=True, slots=True)
class SurvivePrice:
    """What `survive` costs and gives. GiB on the fullest node; hours of training a day. None: not known.

    `copies_gib` is 0 for a program other than `bsl train`, which keeps none. `num_spares` nodes are compared with none:
    those of the run file, else one.
    """

    copies_gib: float
    node_memory_gib: float | None
    num_spares: int
    spares_are_asked: bool
    hours_with: float | None
    hours_without: float | None
    pause_s: float
    node_mtbf_h: float | None


def price_of_survive(config: RunConfig, site: Site, calibration: Calibration | None) -> SurvivePrice | None:
    """Return what `survive` costs; None for a run without it."""
    survive = config.survive
    if survive is None:
        return None
    setup = configured_setup(config, site, calibration)
    step_s = _step_s(config, site, setup, calibration)
    job = _endurance(config, site, setup, survive, step_s)
    mtbf, spares = site.config.node_mtbf_h, config.slurm.spare_nodes or 1
    return SurvivePrice(
        copies_gib=copies_gib(setup) if config.run.starts_trainer else 0.0,
        node_memory_gib=site.config.node_memory_gib,
        num_spares=spares,
        spares_are_asked=config.slurm.spare_nodes > 0,
        hours_with=hours_per_day(job, spares, mtbf) if mtbf else None,
        hours_without=hours_per_day(job, 0, mtbf) if mtbf else None,
        pause_s=job.pause_s,
        node_mtbf_h=mtbf,
    )


def _step_s(config: RunConfig, site: Site, setup: Setup, calibration: Calibration | None) -> float:
    """Return the seconds of a step: predicted if runs were measured, else as the run file expects."""
    if calibration is not None and calibration.is_measured:
        return make_plan(setup, phases_of(config.training), calibration).price.seconds
    return config.monitor.step_time_s


def _endurance(config: RunConfig, site: Site, setup: Setup, survive: SurviveSection, step_s: float) -> Endurance:
    limit = config.slurm.time_limit
    horizon_h = min(DAY_H, parse_slurm_duration(limit) / 3600 if limit else DAY_H)
    if config.run.starts_trainer:
        pause_s = IN_PLACE_S + step_s * survive.snapshot_steps / 2
    else:
        pause_s = START_AGAIN_S + step_s * (config.checkpoint.save_interval or 0) / 2
    replicas = tuple(_replicas(config, site, setup, survive, nodes) for nodes in range(setup.num_nodes + 1))
    return Endurance(setup.num_nodes, replicas, pause_s, horizon_h)


def _replicas(config: RunConfig, site: Site, setup: Setup, survive: SurviveSection, nodes: int) -> int:
    """Return the replicas that so many nodes hold: every global batch must be whole micro batches on each."""
    topology = setup.topology
    if nodes >= setup.num_nodes:
        return topology.dp
    if not survive.shrink:
        return 0
    room = min(topology.dp, nodes * setup.ranks_per_node // (topology.world_size // topology.dp))
    if not config.run.starts_trainer:
        return room
    sizes = [phase.global_batch_size for phase in phases_of(config.training)]
    fits = (dp for dp in range(room, 0, -1) if all(size % (setup.micro_batch_size * dp) == 0 for size in sizes))
    return next(fits, 0)


def survive_findings(config: RunConfig, site: Site, calibration: Calibration | None) -> Iterator[Finding]:
    """Yield the memory of copies, and the worth of spare nodes, of a run with `survive`."""
    price = price_of_survive(config, site, calibration)
    if price is None:
        return
    if price.copies_gib:
        keys = ("survive", "site.node_memory_gib")
        yield Finding("survive memory", _severity(price), keys, memory_text(price), "it is allocated at the start")
    if not site.is_local:
        about = ("survive", "slurm.spare_nodes", "site.node_mtbf_h")
        yield Finding("spare nodes", "note", about, spares_text(price), pause_text(price))


def _severity(price: SurvivePrice) -> Severity:
    known = price.node_memory_gib
    if known is None or price.copies_gib <= FULL_SHARE * known:
        return "note"
    return "error" if price.copies_gib > known else "warning"


def memory_text(price: SurvivePrice) -> str:
    """`copies of optimizer state take 38.4 GiB of host memory on the fullest node, 8 % of its 480 GiB`."""
    known = price.node_memory_gib
    of_what = "; the node's memory is unknown (site.node_memory_gib)"
    if known is not None:
        of_what = f", {price.copies_gib / known:.0%} of its {known:.0f} GiB"
    return f"copies of optimizer state take {price.copies_gib:.3g} GiB of host memory on the fullest node{of_what}"


def spares_text(price: SurvivePrice) -> str:
    """`with 1 spare node, 23.9 h of training a day; with none, 22.6 h`."""
    nodes = f"{price.num_spares} spare {'node' if price.num_spares == 1 else 'nodes'}"
    if price.hours_with is None or price.hours_without is None:
        return f"benefit of {nodes} unknown: the site file does not give how often a node fails"
    verb = "" if price.spares_are_asked else "would "
    return (
        f"{nodes} {verb}{'give' if verb or price.num_spares > 1 else 'gives'} {price.hours_with:.2f} h of training a "
        f"day at full size, none gives {price.hours_without:.2f} h"
    )


def pause_text(price: SurvivePrice) -> str:
    """Return what the hours rest on."""
    fails = f"a node fails every {price.node_mtbf_h:.0f} h" if price.node_mtbf_h else "rate of node failures unknown"
    return f"{fails}, and each failure costs {price.pause_s:.0f} s (partly assumed)"


def survive_lines(price: SurvivePrice | None) -> list[str]:
    """Return what `bsl plan --explain` says."""
    if price is None:
        return []
    memory = [f"survive: {memory_text(price)}"] if price.copies_gib else []
    return [*memory, f"survive: {spares_text(price)}; {pause_text(price)}"]


def survive_document(price: SurvivePrice | None) -> dict[str, Any] | None:
    """Return the part of the JSON document of `bsl plan`; None for a run without `survive`."""
    if price is None:
        return None
    return {
        "copies_gib": price.copies_gib,
        "node_memory_gib": price.node_memory_gib,
        "spare_nodes": price.num_spares,
        "hours_per_day_with_spares": price.hours_with,
        "hours_per_day_without": price.hours_without,
        "pause_s": price.pause_s,
        "node_mtbf_h": price.node_mtbf_h,
    }

"""Answers `bsl plan` for a run file: which calibration applies, what is asked, and the search."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from bigsci_launch.config.finding import Finding
from bigsci_launch.config.micro_batches import legal_sizes
from bigsci_launch.config.rules.described import find_misfit, limits_of
from bigsci_launch.config.rules.layout import Limits
from bigsci_launch.config.rules.own_cut import own_method
from bigsci_launch.config.rules.table import find_refusal
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.config.site import MOST_RANKS, Site
from bigsci_launch.errors import ConfigError
from bigsci_launch.plan.choose.automatic import with_fastest_size
from bigsci_launch.plan.choose.search import Plan, SearchResult, make_plan, search, with_free_heads, with_free_layers
from bigsci_launch.plan.choose.variations import Variation, best_variation
from bigsci_launch.plan.price.balance import settle_method
from bigsci_launch.plan.price.calibration import Calibration
from bigsci_launch.plan.shape.ramp import Phase, count_samples, phases_of
from bigsci_launch.plan.shape.setup import Setup, program_needed, require_framework
from bigsci_launch.progress import Progress, no_progress
from bigsci_launch.topology import Topology

Free = Literal["layers", "heads"]

MOST_NODE_COUNTS = 2048
"""Numbers of nodes of one search, which takes seconds for every hundred."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What was asked: the run's name, its setup as configured, the site's name, the numbers of nodes to search, how
    long it trains, and what `bsl train` cannot do of it."""

    name: str
    configured: Setup
    site_name: str
    nodes: range
    limits: Limits
    phases: tuple[Phase, ...]
    calibration: Calibration | None
    refusal: Finding | None
    num_steps: int
    num_samples: int
    program_needed: str | None


@dataclass(frozen=True, slots=True)
class Answer:
    """What `bsl plan` found. Nothing is searched or priced on a site without GPUs. `variation` is another technique
    that would be faster."""

    request: PlanRequest
    result: SearchResult | None
    configured: Plan | None
    variation: Variation | None = None


def parse_nodes(text: str | None, configured: int) -> range:
    """Return the node counts in `N` or `A:B` (both ends included); without a text, the configured count.

    Raises:
        ConfigError: the text has another form, or there are too many.
    """
    if text is None:
        return range(configured, configured + 1)
    match = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", text.strip())
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise ConfigError(f"--nodes {text}: neither N nor A:B with A <= B", hint="--nodes 48, or --nodes 40:48")
    first, last = int(match[1]), int(match[2] or match[1])
    if last - first >= MOST_NODE_COUNTS:
        raise ConfigError(
            f"--nodes {text}: {last - first + 1} numbers of nodes; the most is {MOST_NODE_COUNTS}",
            hint=f"--nodes {first}:{first + MOST_NODE_COUNTS - 1} is the first part",
        )
    return range(first, last + 1)


def configured_setup(config: RunConfig, site: Site, calibration: Calibration | None) -> Setup:
    """Return the setup of a run file. A cut by price uses `calibration`, or priors without one.

    Where the run file leaves the size of micro-batches to `bsl train`, it is the one that is expected.

    Raises:
        ValueError: the sizes of the run do not fit the site.
    """
    layout = site.layout(config)
    setup = _settled(_at(site, Setup.of_config(config, layout.topology, layout.ranks_per_node)), calibration)
    sizes = legal_sizes(config.training, layout.topology.dp)
    if config.training.micro_batch_size != "auto" or calibration is None or not sizes:
        return setup
    return with_fastest_size(setup, sizes, calibration)


def _all_replicas(config: RunConfig, site: Site, calibration: Calibration | None) -> Setup:
    """Return a stand-in setup for a run whose sizes do not fit the site: every rank is a replica."""
    world, ranks_per_node = config.slurm.nodes * site.config.ranks_per_node, site.config.ranks_per_node
    return _settled(_at(site, Setup.of_config(config, Topology(tp=1, pp=1, dp=world), ranks_per_node)), calibration)


def _at(site: Site, setup: Setup) -> Setup:
    return replace(setup, nodes_per_domain=site.config.nvlink_domain_nodes)


def _settled(setup: Setup, calibration: Calibration | None) -> Setup:
    pp, chunks, layers = setup.topology.pp, setup.technique.chunks_per_rank, setup.shape.num_layers
    method = own_method(setup.framework, layers, pp, chunks, setup.partition_method)
    return settle_method(replace(setup, partition_method=method), calibration or Calibration())


def request_plans(
    config: RunConfig, site: Site, calibration: Calibration | None, *, nodes: str | None = None
) -> PlanRequest:
    """Return what `bsl plan` is asked about a run, which takes no search.

    Raises:
        ConfigError: `nodes` has the wrong form or names more than can be planned, or the framework of the run is not
            known.
    """
    require_framework(config)
    numbers, ranks = parse_nodes(nodes, config.slurm.nodes), site.config.ranks_per_node
    if numbers[-1] * ranks > MOST_RANKS:
        key = "slurm.nodes" if nodes is None else "--nodes"
        raise ConfigError(f"{key}: {numbers[-1]} nodes x {ranks} ranks; the most is {MOST_RANKS} ranks")
    limits, phases = limits_of(config, site), phases_of(config.training)
    setup, refusal = _configured(config, site, limits, calibration)
    return PlanRequest(
        name=config.run.name,
        configured=setup,
        site_name=site.name,
        nodes=numbers,
        limits=limits,
        phases=phases,
        calibration=calibration,
        refusal=refusal,
        num_steps=config.training.steps,
        num_samples=count_samples(phases),
        program_needed=program_needed(config),
    )


def find_plans(request: PlanRequest, *, free: Free | None, report_progress: Progress = no_progress) -> Answer:
    """Return everything that `bsl plan` says about a run; reports percents of the search."""
    calibration, phases, setup = request.calibration, request.phases, request.configured
    if calibration is None:
        return Answer(request, None, None)
    result = search(
        tuple(_bases(setup, free)),
        request.nodes,
        request.limits,
        calibration,
        phases=phases,
        per_parameter=free == "layers",
        report_progress=report_progress,
    )
    configured = make_plan(setup, phases, calibration) if request.refusal is None else None
    return Answer(request, result, configured, None if free else _variation(request, calibration, result))


def _variation(request: PlanRequest, calibration: Calibration, result: SearchResult) -> Variation | None:
    best = result.plans[0] if result.plans else None
    count = best.setup.num_nodes if best else request.nodes[-1]

    def find_best(setup: Setup) -> Plan | None:
        nodes = range(count, count + 1)
        plans = search((setup,), nodes, request.limits, calibration, phases=request.phases, per_parameter=False).plans
        return plans[0] if plans else None

    return best_variation(request.configured, best, find_best)


def _configured(
    config: RunConfig, site: Site, limits: Limits, calibration: Calibration | None
) -> tuple[Setup, Finding | None]:
    if misfit := find_misfit(config, site):
        return _all_replicas(config, site, calibration), misfit
    setup = configured_setup(config, site, calibration)
    return setup, find_refusal(setup, limits)


def _bases(setup: Setup, free: Free | None) -> Iterable[Setup]:
    if free == "layers":
        return with_free_layers(setup)
    return with_free_heads(setup) if free == "heads" else (setup,)


def reference_plans(answer: Answer) -> Sequence[Plan]:
    """Return the best plan, and the configured one if it is different."""
    if answer.result is None or not answer.result.plans:
        return ()
    best, mine = answer.result.plans[0], answer.configured
    return (best,) if mine is None or mine.setup == best.setup else (best, mine)

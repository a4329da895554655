"""Searches all layouts of a model on some nodes: prices and ranks the legal ones, counts the others by rule.

Plans are ranked by the time to the end of the token budget, including the ramp-up, that 3 of 4 such plans stay within.
So a plan unlike anything measured comes first only if it is predicted to be faster by a margin.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from bigsci_launch.config.rules.layout import Limits
from bigsci_launch.plan.choose.screen import LayoutCandidate, LayoutScreen, Refusals, Tally
from bigsci_launch.plan.price.balance import settle_method
from bigsci_launch.plan.price.calibration import Calibration
from bigsci_launch.plan.price.price import Price, price_setup
from bigsci_launch.plan.shape.parameters import count_parameters
from bigsci_launch.plan.shape.ramp import Phase, count_samples
from bigsci_launch.plan.shape.setup import Setup
from bigsci_launch.progress import Progress, no_progress

THREE_OF_FOUR = 0.41
"""Share of a band (which contains 9 of 10 measurements) below which 3 of 4 are, if errors are normal."""

LAYERS_AROUND = 6

DOUBTFUL_LISTED = 3


@dataclass(frozen=True, slots=True)
class Plan:
    """A legal setup with its price and the time of the whole run."""

    setup: Setup
    price: Price
    run_seconds: float
    num_tokens: int

    @property
    def days(self) -> float:
        return self.run_seconds / 86400

    @property
    def likely_days(self) -> float:
        """Days that 3 of 4 such plans stay within."""
        return self.days * (1 + THREE_OF_FOUR * self.price.band)

    @property
    def gpu_hours(self) -> float:
        return self.run_seconds / 3600 * self.setup.topology.world_size


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Plans that fit, those about which the estimate is in doubt, and those that run out of memory, each best first;
    and refused setups, by rule."""

    plans: tuple[Plan, ...]
    doubtful: tuple[Plan, ...]
    out_of_memory: tuple[Plan, ...]
    refused: tuple[Refusals, ...]

    def listed(self, top: int) -> tuple[Plan, ...]:
        """Return the best plans, and after them the best doubtful ones that would be better than all of these."""
        best = self.plans[0].likely_days if self.plans else math.inf
        return (*self.plans[:top], *(plan for plan in self.doubtful[:DOUBTFUL_LISTED] if plan.likely_days < best))


def with_free_layers(base: Setup) -> Iterator[Setup]:
    """Yield the same model with a few layers more or fewer."""
    count = base.shape.num_layers
    for layers in range(max(1, count - LAYERS_AROUND), count + LAYERS_AROUND + 1):
        yield replace(base, shape=replace(base.shape, num_layers=layers))


def with_free_heads(base: Setup) -> Iterator[Setup]:
    """Yield the same model with its width divided into half to twice as many heads, and as many key/value heads."""
    hidden, heads = base.shape.hidden_size, base.shape.num_attention_heads
    for count in range(-(-heads // 2), min(2 * heads, hidden) + 1):
        is_shared_evenly = count % (base.shape.num_key_value_heads or count) == 0
        if hidden % count == 0 and is_shared_evenly:
            yield replace(base, shape=replace(base.shape, num_attention_heads=count))


def search(
    bases: Sequence[Setup],
    nodes: Sequence[int],
    limits: Limits,
    calibration: Calibration,
    *,
    phases: tuple[Phase, ...] = (),
    per_parameter: bool,
    report_progress: Progress = no_progress,
) -> SearchResult:
    """Return all plans for `bases` on each number of `nodes`.

    Args:
        bases: setups whose topology, micro batch and partition method are replaced by all others.
        nodes: numbers of nodes.
        limits: the site's nodes and the ramp.
        calibration: the basis of prices.
        phases: how long the run trains with which batch size.
        per_parameter: rank by time per parameter, for models of different sizes.
        report_progress: is called with percents.
    """
    found: list[Plan] = []
    tally = Tally()
    for index, base in enumerate(bases):
        screen = LayoutScreen(base, limits, tally)
        for done, num_nodes in enumerate(nodes):
            share = (index * len(nodes) + done) / (len(bases) * len(nodes))
            report_progress(int(100 * share), f"%, {num_nodes} nodes, {len(found)} layouts priced")
            for candidate in screen.candidates(num_nodes):
                found += _price_cuts(candidate, screen, phases, calibration)
    ranked = rank_plans(found, per_parameter=per_parameter)
    return SearchResult(
        tuple(plan for plan in ranked if plan.price.is_safe),
        tuple(plan for plan in ranked if plan.price.fit == "doubtful"),
        tuple(plan for plan in ranked if plan.price.is_out_of_memory),
        tally.summarise(limits, calibration),
    )


def _price_cuts(
    candidate: LayoutCandidate, screen: LayoutScreen, phases: tuple[Phase, ...], calibration: Calibration
) -> Iterator[Plan]:
    """Yield a plan for every cut of `candidate` into stages. Partition methods that give the same cut count as one."""
    seen: set[tuple[int, ...]] = set()
    for method in candidate.methods:
        if screen.is_refused(candidate, method):
            continue
        setup = settle_method(candidate.setup(method), calibration)
        if setup.layers_per_stage not in seen:
            seen.add(setup.layers_per_stage)
            yield make_plan(setup, phases, calibration)


def make_plan(setup: Setup, phases: tuple[Phase, ...], calibration: Calibration) -> Plan:
    """Return `setup` with its price and the time of the whole run."""
    price = price_setup(setup, calibration)
    num_tokens = count_samples(phases) * setup.shape.sequence_length
    return Plan(setup, price, run_seconds(setup, price, phases), num_tokens)


def run_seconds(setup: Setup, price: Price, phases: tuple[Phase, ...]) -> float:
    """Return the seconds of all steps. A step's time is linear in its micro batches, so sums over phases suffice."""
    num_steps = sum(phase.num_steps for phase in phases)
    missing = num_steps * setup.num_micro_batches - count_samples(phases) / (
        setup.micro_batch_size * setup.num_replicas
    )
    return num_steps * price.seconds - missing * price.micro_batch_seconds


def rank_plans(plans: Sequence[Plan], *, per_parameter: bool = False) -> tuple[Plan, ...]:
    """Return the plans ordered by the days that 3 of 4 stay within; `per_parameter` compares models of different
    sizes."""

    def cost(plan: Plan) -> float:
        return plan.likely_days / (count_parameters(plan.setup.shape) if per_parameter else 1)

    return tuple(sorted(plans, key=cost))

"""Searches all layouts of a model on some nodes: prices and ranks the legal ones, counts the others by rule.

Plans are ranked by the time to the end of the token budget, including the ramp-up, that 3 of 4 such plans stay within.
So a plan unlike anything measured comes first only if it is predicted to be faster by a margin.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from bigsci_launch.config.finding import Finding
from bigsci_launch.plan.price.balance import PRICED_METHODS, settle_method
from bigsci_launch.plan.price.calibration import Calibration
from bigsci_launch.plan.price.price import Price, price_setup
from bigsci_launch.plan.shape.legality import HARD_RULES, Limits, Rule, find_refusal
from bigsci_launch.plan.shape.parameters import count_parameters
from bigsci_launch.plan.shape.ramp import Phase, count_samples
from bigsci_launch.plan.shape.setup import Setup
from bigsci_launch.topology import Topology

THREE_OF_FOUR = 0.41
"""Share of a band (which contains 9 of 10 measurements) below which 3 of 4 are, if errors are normal."""

LARGEST_MICRO_BATCH = 64
METHODS = ("type:transformer|embedding", "type:transformer", "parameters")
LAYERS_AROUND = 6


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
class Refusals:
    """How many setups a rule refused, and the first of them."""

    rule: Rule
    count: int
    example: str
    setup: Setup


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Plans that fit, best first; plans that run out of memory, best first; and refused setups, summarised by rule and
    one by one with the rule's name."""

    plans: tuple[Plan, ...]
    out_of_memory: tuple[Plan, ...]
    refused: tuple[Refusals, ...]
    refused_setups: tuple[tuple[str, Setup], ...] = ()


def divisors(number: int) -> list[int]:
    """Return every divisor, smallest first."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def topologies_of(world_size: int) -> Iterator[Topology]:
    """Yield every topology of exactly that many ranks."""
    for tp in divisors(world_size):
        for pp in divisors(world_size // tp):
            yield Topology(tp=tp, pp=pp, dp=world_size // (tp * pp))


def micro_batches(setup: Setup) -> list[int]:
    """Return the micro batch sizes to try: powers of two, and the configured one."""
    powers = [1 << power for power in range(LARGEST_MICRO_BATCH.bit_length())]
    return sorted({*powers, setup.micro_batch_size})


def candidates(base: Setup, nodes: Iterable[int]) -> Iterator[Setup]:
    """Yield every setup to try: topologies, micro batches and partition methods for each number of nodes."""
    own = base.partition_method.split(":")[0]
    # A cut that was computed for the configured topology is computed again for each one.
    configured = own if own in PRICED_METHODS else base.partition_method
    # Megatron-DeepSpeed does not support cuts by price.
    priced = PRICED_METHODS if base.framework == "bsl" else ()
    methods = list(dict.fromkeys((configured, *METHODS, *priced)))
    for num_nodes in nodes:
        for topology in topologies_of(num_nodes * base.ranks_per_node):
            for size in micro_batches(base):
                if size * topology.dp > base.global_batch_size and size > 1:
                    continue
                for method in methods if topology.pp > 1 else methods[:1]:
                    if method in PRICED_METHODS and base.shape.num_layers < topology.pp:
                        continue
                    yield replace(base, topology=topology, micro_batch_size=size, partition_method=method)


def with_free_layers(base: Setup) -> Iterator[Setup]:
    """Yield the same model with a few layers more or fewer."""
    count = base.shape.num_layers
    for layers in range(max(1, count - LAYERS_AROUND), count + LAYERS_AROUND + 1):
        yield replace(base, shape=replace(base.shape, num_layers=layers))


def with_free_heads(base: Setup) -> Iterator[Setup]:
    """Yield the same model with its width divided into half to twice as many heads, and as many key/value heads."""
    hidden, heads = base.shape.hidden_size, base.shape.num_attention_heads
    for count in divisors(hidden):
        is_shared_evenly = count % (base.shape.num_key_value_heads or count) == 0
        if heads <= 2 * count and count <= 2 * heads and is_shared_evenly:
            yield replace(base, shape=replace(base.shape, num_attention_heads=count))


def search(
    bases: Iterable[Setup], nodes: Sequence[int], limits: Limits, calibration: Calibration, *, per_parameter: bool
) -> SearchResult:
    """Return all plans for `bases` on each number of `nodes`.

    Args:
        bases: setups whose topology, micro batch and partition method are replaced by all others.
        nodes: numbers of nodes.
        limits: the site's nodes and the phases of the run.
        calibration: the basis of prices.
        per_parameter: rank by time per parameter, for models of different sizes.
    """
    found: list[Plan] = []
    refused: dict[str, list[tuple[Finding, Setup]]] = {}
    seen: set[Setup] = set()
    for base in bases:
        for setup in (settle_method(setup, calibration) for setup in candidates(base, nodes)):
            refusal = find_refusal(setup, limits)
            if refusal:
                refused.setdefault(refusal.rule, []).append((refusal, setup))
            elif _is_new(setup, seen):
                found.append(make_plan(setup, limits.phases, calibration))
    fitting = [plan for plan in found if not plan.price.is_out_of_memory]
    beyond = [plan for plan in found if plan.price.is_out_of_memory]
    return SearchResult(
        rank_plans(fitting, per_parameter=per_parameter),
        rank_plans(beyond, per_parameter=per_parameter),
        tuple(_summarise(name, entries) for name, entries in refused.items()),
        tuple((name, setup) for name, entries in refused.items() for _, setup in entries),
    )


def _is_new(setup: Setup, seen: set[Setup]) -> bool:
    """Return whether this setup is new. Partition methods that give the same cut count as equal."""
    key = replace(setup, partition_method=str(setup.layers_per_stage))
    if key in seen:
        return False
    seen.add(key)
    return True


def _summarise(name: str, entries: list[tuple[Finding, Setup]]) -> Refusals:
    (first, setup), *_ = entries
    rule = next(rule for rule in HARD_RULES if rule.name == name)
    return Refusals(rule, len(entries), first.text, setup)


def make_plan(setup: Setup, phases: tuple[Phase, ...], calibration: Calibration) -> Plan:
    """Return `setup` with its price and the time of the whole run."""
    price = price_setup(setup, calibration)
    num_tokens = count_samples(phases) * setup.shape.sequence_length
    return Plan(setup, price, run_seconds(setup, price, phases), num_tokens)


def run_seconds(setup: Setup, price: Price, phases: tuple[Phase, ...]) -> float:
    """Return the seconds of all steps. A step's time is linear in its micro batches, so sums over phases suffice."""
    num_steps = sum(phase.num_steps for phase in phases)
    missing = num_steps * setup.num_micro_batches - count_samples(phases) / (setup.micro_batch_size * setup.topology.dp)
    return num_steps * price.seconds - missing * price.micro_batch_seconds


def rank_plans(plans: Sequence[Plan], *, per_parameter: bool = False) -> tuple[Plan, ...]:
    """Return the plans ordered by the days that 3 of 4 stay within; `per_parameter` compares models of different
    sizes."""

    def cost(plan: Plan) -> float:
        return plan.likely_days / (count_parameters(plan.setup.shape) if per_parameter else 1)

    return tuple(sorted(plans, key=cost))

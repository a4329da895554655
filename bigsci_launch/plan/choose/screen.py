"""Which layouts a search has to price: the rules refuse most of them by the sizes of their axes alone.

A rule is asked once for all layouts that agree in what it looks at, and the layouts that it refuses are counted, not
made. Only the others become setups.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import isqrt

from bigsci_launch.config.rules.layout import Limits, Rule
from bigsci_launch.config.rules.own_cut import is_cut_by_deepspeed, own_method
from bigsci_launch.config.rules.table import LAYOUT_RULES
from bigsci_launch.plan.price.balance import PRICED_METHODS, settle_method
from bigsci_launch.plan.price.calibration import Calibration
from bigsci_launch.plan.shape.setup import Setup

LARGEST_MICRO_BATCH = 64
METHODS = ("type:transformer|embedding", "type:transformer", "parameters")
MOST_SAMPLES = 64

_OF_SIZES = tuple(rule for rule in LAYOUT_RULES if "size" in rule.looks_at)
_OF_CUTS = tuple(rule for rule in LAYOUT_RULES if "cut" in rule.looks_at)
_OF_AXES = tuple(rule for rule in LAYOUT_RULES if rule not in (*_OF_SIZES, *_OF_CUTS))


@dataclass(frozen=True, slots=True)
class LayoutCandidate:
    """A layout of `base` by its sizes, with the partition methods to try."""

    base: Setup
    num_nodes: int
    tp: int
    pp: int
    dp: int
    size: int
    methods: tuple[str, ...]

    def setup(self, method: str) -> Setup:
        topology = self.base.topology.resized(tp=self.tp, pp=self.pp, dp=self.dp)
        return replace(self.base, topology=topology, micro_batch_size=self.size, partition_method=method)

    def look(self, rule: Rule) -> tuple[object, ...]:
        """Return the values that `rule` looks at; of the cut, the first method."""
        return tuple(
            self.methods[0] if name == "cut" else self.num_nodes if name == "nodes" else getattr(self, name)
            for name in rule.looks_at
        )


@dataclass(frozen=True, slots=True)
class Refusals:
    """How many layouts a rule refused, the first of them with what was wrong, and some evenly chosen ones."""

    rule: Rule
    count: int
    example: str
    setup: Setup
    samples: tuple[Setup, ...]


class Tally:
    """Counts refused layouts by rule."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._first: dict[str, tuple[Rule, LayoutCandidate]] = {}
        self._samples: dict[str, list[LayoutCandidate]] = {}
        self._seen: dict[str, int] = {}
        self._strides: dict[str, int] = {}

    def add(self, rule: Rule, candidate: LayoutCandidate, count: int) -> None:
        """Count `count` layouts, of which `candidate` is the first."""
        name = rule.name
        self._counts[name] = self._counts.get(name, 0) + count
        self._first.setdefault(name, (rule, candidate))
        seen, stride = self._seen.get(name, 0), self._strides.get(name, 1)
        self._seen[name] = seen + 1
        if seen % stride:
            return
        samples = self._samples.setdefault(name, [])
        samples.append(candidate)
        if len(samples) > MOST_SAMPLES:
            self._samples[name], self._strides[name] = samples[::2], 2 * stride

    def summarise(self, limits: Limits, calibration: Calibration) -> tuple[Refusals, ...]:
        """Return the refusals in the order in which rules first refused."""
        found = []
        for name, (rule, first) in self._first.items():
            setup = settle_method(first.setup(first.methods[0]), calibration)
            samples = tuple(settle_method(each.setup(each.methods[0]), calibration) for each in self._samples[name])
            finding = rule.finding(setup, limits)
            found.append(Refusals(rule, self._counts[name], finding.text if finding else "", setup, samples))
        return tuple(found)


class LayoutScreen:
    """Tells which layouts of `base` the rules allow; `tally` counts the others."""

    def __init__(self, base: Setup, limits: Limits, tally: Tally) -> None:
        self._base, self._limits, self._tally = base, limits, tally
        self._sizes = micro_batches(base)
        self._ranks_apart = base.topology["cp"] * base.topology["ep"]
        self._answers: dict[str, dict[tuple[object, ...], bool]] = {rule.name: {} for rule in LAYOUT_RULES}

    def candidates(self, num_nodes: int) -> Iterator[LayoutCandidate]:
        """Yield what is left on that many nodes; the cuts of its methods may still be refused."""
        base = self._base
        ranks, rest = divmod(num_nodes * base.ranks_per_node, self._ranks_apart)
        if rest:
            return
        for tp, pp, dp in axes_of(ranks):
            first = LayoutCandidate(base, num_nodes, tp, pp, dp, 1, self._methods(pp))
            sizes = self._sizes_for(dp)
            refusing = self._refusing(_OF_AXES, first)
            if refusing:
                self._tally.add(refusing, first, len(sizes) * len(first.methods))
                continue
            for size in sizes:
                candidate = replace(first, size=size)
                refusing = self._refusing(_OF_SIZES, candidate)
                if refusing:
                    self._tally.add(refusing, candidate, len(first.methods))
                else:
                    yield candidate

    def is_refused(self, candidate: LayoutCandidate, method: str) -> bool:
        """Return whether the cut by `method` is refused. Cuts by price are not: every stage gets a layer."""
        if method in PRICED_METHODS:
            return False
        alone = replace(candidate, methods=(method,))
        refusing = self._refusing(_OF_CUTS, alone)
        if refusing:
            self._tally.add(refusing, alone, 1)
        return refusing is not None

    def _refusing(self, rules: Sequence[Rule], candidate: LayoutCandidate) -> Rule | None:
        for rule in rules:
            answers, seen = self._answers[rule.name], candidate.look(rule)
            refuses = answers.get(seen)
            if refuses is None:
                setup = candidate.setup(candidate.methods[0])
                refuses = answers[seen] = rule.check(setup, self._limits) is not None
            if refuses:
                return rule
        return None

    def _sizes_for(self, dp: int) -> list[int]:
        """Return the micro batch sizes that give every replica at least one; always 1."""
        share = self._base.global_batch_size // (dp * self._base.topology["ep"])
        return self._sizes[: max(1, bisect_right(self._sizes, share))]

    def _methods(self, pp: int) -> tuple[str, ...]:
        """Return the partition methods to try on `pp` stages; one is enough for a single stage."""
        base = self._base
        if not is_cut_by_deepspeed(base.framework):
            chunks = base.technique.chunks_per_rank
            return (own_method(base.framework, base.shape.num_layers, pp, chunks, base.partition_method),)
        own = base.partition_method.split(":")[0]
        # A cut that was computed for the configured topology is computed again for each one.
        configured = own if own in PRICED_METHODS else base.partition_method
        # Megatron-DeepSpeed does not support cuts by price.
        priced = PRICED_METHODS if base.framework == "bsl" else ()
        methods = list(dict.fromkeys((configured, *METHODS, *priced)))[: None if pp > 1 else 1]
        has_enough = base.shape.num_layers >= pp
        return tuple(method for method in methods if has_enough or method not in PRICED_METHODS)


def micro_batches(setup: Setup) -> list[int]:
    """Return the micro batch sizes to try: powers of two, and the configured one."""
    powers = [1 << power for power in range(LARGEST_MICRO_BATCH.bit_length())]
    return sorted({*powers, setup.micro_batch_size})


def axes_of(ranks: int) -> Iterator[tuple[int, int, int]]:
    """Yield every tp, pp and dp whose product is `ranks`."""
    for tp in divisors(ranks):
        for pp in divisors(ranks // tp):
            yield tp, pp, ranks // (tp * pp)


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """Return every divisor, smallest first."""
    low = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return (*low, *(number // divisor for divisor in reversed(low) if divisor * divisor != number))

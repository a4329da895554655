"""Composes a number of nodes of pipelines: which sizes, and how many micro batches each pipeline gets.

All of it is deterministic, so every rank finds the same composition from the same templates.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bigsci_launch.plan.survive.templates import Template

Sizes = tuple[int, ...]
"""Sizes of pipelines in nodes, smallest first; a size occurs once per pipeline."""

MOST_COMPOSITIONS = 2000
"""Up to this many compositions are all priced; of more, the one with the highest rate is found without listing them."""


@dataclass(frozen=True, slots=True)
class Composition:
    """Pipelines for a number of nodes: their sizes, the micro batches of each, and the seconds of a step."""

    sizes: Sizes
    micro_batches: tuple[int, ...]
    seconds: float


def compositions(num_nodes: int, sizes: Sequence[int], fewest_pipelines: int = 1) -> Iterator[Sizes]:
    """Yield every multiset of sizes that uses all nodes in at least `fewest_pipelines` pipelines."""
    ordered = sorted(set(sizes))

    def extend(left: int, first: int, chosen: Sizes) -> Iterator[Sizes]:
        if left == 0:
            if len(chosen) >= fewest_pipelines:
                yield chosen
            return
        for index in range(first, len(ordered)):
            size = ordered[index]
            if size > left:
                return
            yield from extend(left - size, index, (*chosen, size))

    yield from extend(num_nodes, 0, ())


def count_compositions(num_nodes: int, sizes: Sequence[int]) -> int:
    """Return how many multisets of sizes use all nodes, without listing them."""
    counts = [1] + [0] * num_nodes
    for size in sorted(set(sizes)):
        for total in range(size, num_nodes + 1):
            counts[total] += counts[total - size]
    return counts[num_nodes]


def split_batch(templates: Sequence[Template], num_micro_batches: int) -> tuple[int, ...]:
    """Return the micro batches of each pipeline, at least one each, such that the slowest finishes first.

    Giving each micro batch to the pipeline that would finish it first is exact, because more micro batches never make a
    pipeline faster. Of equal pipelines the first one gets it.

    Raises:
        ValueError: there are fewer micro batches than pipelines.
    """
    if num_micro_batches < len(templates):
        raise ValueError(f"{num_micro_batches} micro batches cannot give {len(templates)} pipelines one each")
    counts = [1] * len(templates)
    heap = [(template.seconds(2), index) for index, template in enumerate(templates)]
    heapq.heapify(heap)
    for _ in range(num_micro_batches - len(templates)):
        _, index = heap[0]
        counts[index] += 1
        heapq.heapreplace(heap, (templates[index].seconds(counts[index] + 1), index))
    return tuple(counts)


def price_composition(sizes: Sizes, templates: Mapping[int, Template], num_micro_batches: int) -> Composition:
    """Return a composition with its batch split and the seconds of its slowest pipeline.

    Raises:
        ValueError: there are fewer micro batches than pipelines.
    """
    chosen = [templates[size] for size in sizes]
    split = split_batch(chosen, num_micro_batches)
    seconds = max(template.seconds(count) for template, count in zip(chosen, split, strict=True))
    return Composition(sizes, split, seconds)


def compose(
    num_nodes: int, templates: Mapping[int, Template], num_micro_batches: int, fewest_pipelines: int
) -> Composition | None:
    """Return the fastest composition of all nodes in at least `fewest_pipelines` pipelines; None if there is none."""
    sizes = sorted(templates)
    if count_compositions(num_nodes, sizes) <= MOST_COMPOSITIONS:
        options = list(compositions(num_nodes, sizes, fewest_pipelines))
    else:
        options = list(_of_highest_rate(num_nodes, templates, fewest_pipelines))
    priced = [
        price_composition(option, templates, num_micro_batches)
        for option in options
        if len(option) <= num_micro_batches
    ]
    return min(priced, key=lambda option: (option.seconds, option.sizes), default=None)


def _of_highest_rate(num_nodes: int, templates: Mapping[int, Template], fewest_pipelines: int) -> Iterator[Sizes]:
    """Yield the composition whose pipelines finish most micro batches a second, if there is any.

    `best[k][n]` is the highest rate of k pipelines on n nodes, where the last k means that many or more.
    """
    rates = {size: 1 / template.seconds_per_micro_batch for size, template in sorted(templates.items())}
    none = (-1.0, 0, 0)
    best = [[none] * (num_nodes + 1) for _ in range(fewest_pipelines + 1)]
    best[0][0] = (0.0, 0, 0)
    for nodes in range(1, num_nodes + 1):
        for size, rate in rates.items():
            for before in range(fewest_pipelines + 1):
                known = best[before][nodes - size][0] if size <= nodes else -1.0
                now = min(before + 1, fewest_pipelines)
                if known >= 0 and known + rate > best[now][nodes][0]:
                    best[now][nodes] = (known + rate, size, before)
    if best[fewest_pipelines][num_nodes][0] < 0:
        return
    chosen: Counter[int] = Counter()
    pipelines, nodes = fewest_pipelines, num_nodes
    while nodes:
        _, size, before = best[pipelines][nodes]
        chosen[size] += 1
        pipelines, nodes = before, nodes - size
    yield tuple(sorted(chosen.elements()))

"""Composes a number of nodes of pipelines: which sizes, and how many micro batches each pipeline gets.

All of it is deterministic, so every rank finds the same composition from the same templates.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

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
    ordered = sorted(set(sizes), reverse=True)
    most = _most_pipelines(num_nodes, ordered)
    waiting: list[tuple[int, int, Sizes]] = []
    if most[-1][num_nodes] >= fewest_pipelines:
        waiting.append((num_nodes, len(ordered), ()))
    while waiting:
        left, count, chosen = waiting.pop()
        if left == 0:
            yield chosen
            continue
        for index in range(count):
            # What is left takes sizes no smaller than this one. Without looking ahead the search runs into dead ends.
            rest = left - ordered[index]
            if rest >= 0 and len(chosen) + 1 + most[index + 1][rest] >= fewest_pipelines:
                waiting.append((rest, index + 1, (*chosen, ordered[index])))


def most_nodes(num_nodes: int, sizes: Sequence[int], fewest_pipelines: int) -> int | None:
    """Return how many of the nodes at least `fewest_pipelines` pipelines can use; None if they are too few."""
    most = _most_pipelines(num_nodes, sorted(set(sizes)))[-1]
    return next((nodes for nodes in range(num_nodes, -1, -1) if most[nodes] >= fewest_pipelines), None)


def _most_pipelines(num_nodes: int, sizes: Sequence[int]) -> list[list[float]]:
    """Return, for the first k sizes and every number of nodes, the most pipelines that use all of these nodes.

    It is minus infinity where none do.
    """
    most = [[0.0] + [-math.inf] * num_nodes]
    for size in sizes:
        with_size = most[-1].copy()
        for nodes in range(size, num_nodes + 1):
            with_size[nodes] = max(with_size[nodes], with_size[nodes - size] + 1)
        most.append(with_size)
    return most


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
    # Equal pipelines in a row get theirs at the same time, so they are counted as one.
    runs = [(same[0], len(same)) for same in (list(group) for _, group in groupby(templates, key=id))]
    # No split is faster than this, because a pipeline never does better than its rate, and up to here every pipeline
    # gets what it finishes. Only the rest is given out one at a time.
    seconds = num_micro_batches / sum(times / template.seconds_per_micro_batch for template, times in runs)
    counts = [max(1, template.most_micro_batches(seconds)) for template, _ in runs]
    rest = num_micro_batches - sum(count * times for count, (_, times) in zip(counts, runs, strict=True))
    if rest < 0:
        counts, rest = [1] * len(runs), num_micro_batches - len(templates)
    heap = [
        (template.seconds(count + 1), index)
        for index, ((template, _), count) in enumerate(zip(runs, counts, strict=True))
    ]
    heapq.heapify(heap)
    while rest >= runs[heap[0][1]][1]:
        _, index = heap[0]
        template, times = runs[index]
        counts[index] += 1
        rest -= times
        heapq.heapreplace(heap, (template.seconds(counts[index] + 1), index))
    last = heap[0][1]
    return tuple(
        count + (index == last and place < rest)
        for index, ((_, times), count) in enumerate(zip(runs, counts, strict=True))
        for place in range(times)
    )


def price_composition(sizes: Sizes, templates: Mapping[int, Template], num_micro_batches: int) -> Composition:
    """Return a composition with its batch split and the seconds of its slowest pipeline.

    Raises:
        ValueError: there are fewer micro batches than pipelines.
    """
    chosen = [templates[size] for size in sizes]
    split = split_batch(chosen, num_micro_batches)
    seconds = max(templates[size].seconds(count) for size, count in {*zip(sizes, split, strict=True)})
    return Composition(sizes, split, seconds)


def compose(
    num_nodes: int, templates: Mapping[int, Template], num_micro_batches: int, fewest_pipelines: int
) -> Composition | None:
    """Return the fastest composition of all nodes in at least `fewest_pipelines` pipelines; None if there is none.

    Of more than MOST_COMPOSITIONS it is the one that finishes most micro batches a second.
    """
    sizes = sorted(templates)
    rates = {size: 1 / templates[size].seconds_per_micro_batch for size in sizes}
    options: Iterable[Sizes]
    if count_compositions(num_nodes, sizes) <= MOST_COMPOSITIONS:
        options = compositions(num_nodes, sizes, fewest_pipelines)
    else:
        options = _largest_sum(num_nodes, rates, fewest_pipelines)
        if all(len(option) > num_micro_batches for option in options):
            options = _largest_sum(num_nodes, dict.fromkeys(sizes, -1.0), fewest_pipelines)
    bounds = sorted(
        (num_micro_batches / sum(map(rates.__getitem__, option)), option)
        for option in options
        if len(option) <= num_micro_batches
    )
    best = None
    for bound, option in bounds:
        # A pipeline never does better than its rate, so no later composition is faster.
        if best is not None and bound > best.seconds * (1 + 1e-9):
            break
        found = price_composition(option, templates, num_micro_batches)
        if best is None or (found.seconds, found.sizes) < (best.seconds, best.sizes):
            best = found
    return best


def _largest_sum(num_nodes: int, values: Mapping[int, float], fewest_pipelines: int) -> list[Sizes]:
    """Return the composition whose sizes' values have the largest sum, if there is any.

    `best[k][n]` is the largest sum of k pipelines on n nodes, where the last k means that many or more.
    """
    none = (-math.inf, 0, 0)
    best = [[none] * (num_nodes + 1) for _ in range(fewest_pipelines + 1)]
    best[0][0] = (0.0, 0, 0)
    for nodes in range(1, num_nodes + 1):
        for size, value in values.items():
            if size > nodes:
                continue
            for before in range(fewest_pipelines + 1):
                now = min(before + 1, fewest_pipelines)
                total = best[before][nodes - size][0] + value
                if total > best[now][nodes][0]:
                    best[now][nodes] = (total, size, before)
    if best[fewest_pipelines][num_nodes] == none:
        return []
    chosen = []
    pipelines, nodes = fewest_pipelines, num_nodes
    while nodes:
        _, size, before = best[pipelines][nodes]
        chosen.append(size)
        pipelines, nodes = before, nodes - size
    return [tuple(sorted(chosen))]

"""Which groups of nodes to time next, to find up to k slow nodes in few rounds. Pure.

A program that runs on several nodes is as slow as the slowest of them. With at most k slow nodes, one of k + 1 groups
has none, and its time is that of healthy nodes. Each slow group is cut in halves, and all halves are timed at the same
time on nodes of their own. Where a program needs more nodes than a half has, healthy nodes fill it up. A node that was
slow alone is timed again before it is blamed: noise makes a group slow once, but not twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

FACTOR = 1.3
"""A group is slow if it takes this many times as long as the fastest one."""
CONFIRMATIONS = 2
"""How often a single node must be slow."""


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Nodes that are timed together: those in question, and healthy ones that fill the group up."""

    members: tuple[str, ...]
    fillers: tuple[str, ...] = ()

    @property
    def nodes(self) -> tuple[str, ...]:
        return (*self.members, *self.fillers)


@dataclass(frozen=True, slots=True)
class SlowSearch:
    """A search: groups in question, what is known, and every time so far, in seconds."""

    most: int
    smallest: int
    factor: float
    questions: tuple[tuple[str, ...], ...]
    fast: tuple[tuple[tuple[str, ...], float], ...] = ()
    """Groups that were fast, with their time."""
    strikes: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Times of single nodes that were slow."""
    reference_s: float | None = None
    unexplained: tuple[tuple[str, ...], ...] = ()
    num_rounds: int = 0

    @property
    def good(self) -> list[str]:
        return [node for members, _ in self.fast for node in members]


@dataclass(frozen=True, slots=True)
class SlowFound:
    """The end of a search. `slow` has each slow node with how many times slower it is; `unexplained` groups were slow
    although none of their nodes was alone, or could not be timed."""

    slow: Mapping[str, float]
    good: tuple[str, ...]
    unexplained: tuple[tuple[str, ...], ...]
    reference_s: float | None
    num_rounds: int
    are_too_many: bool
    """More slow nodes were found than the search assumed: there may be others."""


def begin_search(nodes: Sequence[str], most: int, *, smallest: int = 1, factor: float = FACTOR) -> SlowSearch:
    """Return a search for at most `most` slow nodes, with a program that needs `smallest` nodes or more.

    Raises:
        ValueError: there are too few nodes for `most` + 1 groups.
    """
    if most < 1 or len(nodes) < (most + 1) * smallest:
        raise ValueError(
            f"{len(nodes)} nodes are too few for {most + 1} groups of {smallest} or more, one of which has no slow node"
        )
    return SlowSearch(most, smallest, factor, tuple(_parts(nodes, most + 1)))


def next_round(search: SlowSearch) -> list[NodeGroup]:
    """Return the groups to time now, at the same time: no node is in two of them. Empty: the search is over."""
    fillers = search.good
    groups = []
    for members in search.questions:
        missing = max(0, search.smallest - len(members))
        if missing <= len(fillers):
            groups.append(NodeGroup(members, tuple(fillers[:missing])))
            fillers = fillers[missing:]
    return groups


def absorb_round(search: SlowSearch, seconds: Mapping[NodeGroup, float | None]) -> SlowSearch:
    """Return the search after a round; None as the time of a group: it could not be timed."""
    times = [*(value for value in seconds.values() if value is not None), *(value for _, value in search.fast)]
    reference_s = min(times, default=None)
    asked = {group.members for group in seconds}
    search = replace(
        search,
        reference_s=reference_s,
        questions=tuple(members for members in search.questions if members not in asked),
        num_rounds=search.num_rounds + 1,
    )
    # A later round may show that what counted as fast was slow.
    before = search.fast
    search = replace(search, fast=())
    for members, value in [*before, *((group.members, value) for group, value in seconds.items())]:
        search = _file(search, members, value)
    return search


def _file(search: SlowSearch, members: tuple[str, ...], seconds: float | None) -> SlowSearch:
    """Put a group where its time says."""
    if seconds is None or search.reference_s is None:
        return replace(search, unexplained=(*search.unexplained, members))
    if seconds <= search.factor * search.reference_s:
        strikes = {node: times for node, times in search.strikes.items() if node not in members}
        return replace(search, fast=(*search.fast, (members, seconds)), strikes=strikes)
    if len(members) > 1:
        return replace(search, questions=(*search.questions, *_parts(members, 2)))
    times = (*search.strikes.get(members[0], ()), seconds)
    search = replace(search, strikes={**search.strikes, members[0]: times})
    is_open = len(times) < CONFIRMATIONS
    return replace(search, questions=(*search.questions, members)) if is_open else search


def end_search(search: SlowSearch) -> SlowFound:
    """Return what a search has found. Groups that are still in question are unexplained."""
    reference_s = search.reference_s
    slow = {
        node: min(times) / reference_s
        for node, times in search.strikes.items()
        if reference_s and len(times) >= CONFIRMATIONS
    }
    return SlowFound(
        slow=slow,
        good=tuple(search.good),
        unexplained=(*search.unexplained, *search.questions),
        reference_s=reference_s,
        num_rounds=search.num_rounds,
        are_too_many=len(slow) > search.most,
    )


def _parts(nodes: Iterable[str], count: int) -> list[tuple[str, ...]]:
    """Return `nodes` in `count` parts whose sizes differ by at most one; none is empty."""
    listed = tuple(nodes)
    bounds = [len(listed) * index // count for index in range(count + 1)]
    return [listed[first:last] for first, last in pairwise(bounds) if last > first]

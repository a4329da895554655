"""How far the clocks of nodes are apart, by the collectives of their ranks: all leave one at nearly the same time."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median

from bigsci_launch.slow.timeline import Doing, Key, RankTimeline

SMALLEST_S = 1e-3
"""Clocks that are closer count as equal: a collective may take as long."""


def clocks_of(timelines: Sequence[RankTimeline], nodes: Mapping[int, str]) -> dict[int, float]:
    """Return how many seconds the clock of each rank is ahead of that of the first. Ranks of a node share its clock.

    A rank whose node is not in `nodes` counts as alone on its node. Collectives show it, and messages where there is no
    way by collectives; clocks that neither connects count as equal.
    """
    homes = {each.rank: nodes.get(each.rank, f"rank {each.rank}") for each in timelines}
    apart = _apart(timelines, homes)
    ahead: dict[str, float] = {}
    for home in homes.values():
        queue = deque([(home, 0.0)] if home not in ahead else [])
        while queue:
            here, seconds = queue.popleft()
            if here in ahead:
                continue
            ahead[here] = seconds
            for there, (more, by_messages) in apart.get(here, {}).items():
                (queue.append if by_messages else queue.appendleft)((there, seconds + more))
    return {rank: ahead[home] for rank, home in homes.items()}


def _apart(timelines: Sequence[RankTimeline], homes: Mapping[int, str]) -> dict[str, dict[str, tuple[float, bool]]]:
    """Return {node: {another: how many seconds its clock is ahead, and whether only messages show that}}.

    Who sends a message leaves it earlier than who receives it, on a slow link by far: both directions count the same.
    """
    left: dict[Key, dict[str, float]] = {}
    for each in timelines:
        for piece in each.pieces:
            if piece.doing is Doing.WAIT and piece.key is not None and len(piece.needs) > 1:
                left.setdefault(piece.key, {})[homes[each.rank]] = piece.end
    found: dict[tuple[str, str], dict[Key | None, list[float]]] = {}
    for key, ends in left.items():
        way = (*key[:3], 0, 0) if key[0] == "message" else None
        for (one, at), (other, then) in pairwise(sorted(ends.items())):
            found.setdefault((one, other), {}).setdefault(way, []).append(then - at)
    apart: dict[str, dict[str, tuple[float, bool]]] = {}
    for (one, other), ways in found.items():
        ahead = median(ways[None]) if None in ways else fmean(map(median, ways.values()))
        ahead = ahead if abs(ahead) > SMALLEST_S else 0.0
        apart.setdefault(one, {})[other] = ahead, None not in ways
        apart.setdefault(other, {})[one] = -ahead, None not in ways
    return apart

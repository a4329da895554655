"""How far the clocks of nodes are apart, by the collectives of their ranks: all leave one at nearly the same time."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

from bigsci_launch.slow.timeline import Doing, Key, RankTimeline

SMALLEST_S = 1e-3
"""Clocks that are closer count as equal: a collective may take as long."""


def clocks_of(timelines: Sequence[RankTimeline], nodes: Mapping[int, str]) -> dict[int, float]:
    """Return how many seconds the clock of each rank is ahead of that of the first. Ranks of a node share its clock.

    A rank whose node is not in `nodes` counts as alone on its node. Clocks that no collective connects count as equal.
    """
    homes = {each.rank: nodes.get(each.rank, f"rank {each.rank}") for each in timelines}
    apart = _apart(timelines, homes)
    ahead: dict[str, float] = {}
    for home in homes.values():
        if home in ahead:
            continue
        ahead[home] = 0.0
        queue = deque([home])
        while queue:
            here = queue.popleft()
            for there, seconds in apart.get(here, {}).items():
                if there not in ahead:
                    ahead[there] = ahead[here] + seconds
                    queue.append(there)
    return {rank: ahead[home] for rank, home in homes.items()}


def _apart(timelines: Sequence[RankTimeline], homes: Mapping[int, str]) -> dict[str, dict[str, float]]:
    left: dict[Key, dict[str, float]] = {}
    for each in timelines:
        for piece in each.pieces:
            if piece.doing is Doing.WAIT and piece.key is not None and len(piece.needs) > 1:
                left.setdefault(piece.key, {})[homes[each.rank]] = piece.end
    found: dict[tuple[str, str], list[float]] = {}
    for ends in left.values():
        for (one, at), (other, then) in pairwise(sorted(ends.items())):
            found.setdefault((one, other), []).append(then - at)
    apart: dict[str, dict[str, float]] = {}
    for (one, other), seconds in found.items():
        ahead = median(seconds)
        ahead = ahead if abs(ahead) > SMALLEST_S else 0.0
        apart.setdefault(one, {})[other] = ahead
        apart.setdefault(other, {})[one] = -ahead
    return apart

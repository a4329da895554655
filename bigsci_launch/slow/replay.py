"""Plays the steps of a job again from what its ranks did, with other times: what a step would have lasted.

A rank works as long as it did, and waits for whom it waited for. So the schedule of a pipeline, whatever it is, is that
of the program.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bigsci_launch.slow.timeline import Doing, Key, RankTimeline

End = tuple[Key, int]
"""One end of a collective or a message: what it is, and the rank."""


@dataclass(frozen=True, slots=True)
class Lane:
    """What is played of one rank: a piece lasts `seconds` after its rank is free and all in `awaited` have begun."""

    timeline: RankTimeline
    start: float
    seconds: tuple[float, ...]
    awaited: tuple[tuple[End, ...], ...]


def lanes_of(timelines: Sequence[RankTimeline], clocks: Mapping[int, float]) -> list[Lane]:
    """Return what can be played. `clocks` is how many seconds the clock of each rank is ahead."""
    begun = {
        (piece.key, each.rank): piece.begin - clocks[each.rank]
        for each in timelines
        for piece in each.pieces
        if piece.doing is Doing.BEGIN and piece.key is not None
    }
    return [_lane(each, clocks[each.rank], begun) for each in timelines if each.pieces]


def _lane(timeline: RankTimeline, ahead: float, begun: Mapping[End, float]) -> Lane:
    seconds, awaited = [], []
    for piece in timeline.pieces:
        ends: tuple[End, ...] = ()
        lasts = piece.seconds
        if piece.doing is Doing.WAIT and piece.key is not None:
            found = tuple((piece.key, rank) for rank in piece.needs if rank != timeline.rank)
            if found and all(end in begun for end in found):
                last = max(begun[end] for end in found) + ahead
                # Who left before the last one came did not wait for it, such as a root that only sends.
                if last <= piece.end:
                    ends, lasts = found, piece.end - max(last, piece.begin)
        seconds.append(max(0.0, lasts))
        awaited.append(ends)
    return Lane(timeline, timeline.pieces[0].begin - ahead, tuple(seconds), tuple(awaited))


def play(lanes: Sequence[Lane], other: Mapping[int, Sequence[float]]) -> dict[int, list[float]] | None:
    """Return when each rank begins each of its steps, and when it ends the last one; None if ranks wait in a circle.

    `other` has other seconds of the pieces of some ranks.
    """
    players = [_Player(lane, other.get(lane.timeline.rank, lane.seconds)) for lane in lanes]
    begun: dict[End, float] = {}
    waiting: dict[End, list[_Player]] = {}
    ready = deque(players)
    while ready:
        player = ready.popleft()
        missing = player.advance(begun, waiting, ready)
        if missing is not None:
            waiting.setdefault(missing, []).append(player)
    if any(not player.is_done for player in players):
        return None
    return {player.lane.timeline.rank: player.bounds for player in players}


class _Player:
    """One rank while it is played."""

    def __init__(self, lane: Lane, seconds: Sequence[float]) -> None:
        self.lane, self._seconds = lane, seconds
        self._at, self._now = 0, lane.start
        self._step: int | None = None
        self.bounds: list[float] = []

    @property
    def is_done(self) -> bool:
        return self._at == len(self._seconds)

    def advance(self, begun: dict[End, float], waiting: dict[End, list[_Player]], ready: deque[_Player]) -> End | None:
        """Go on until the end, or until an end of a collective is missing, which is returned."""
        pieces, rank = self.lane.timeline.pieces, self.lane.timeline.rank
        while self._at < len(pieces):
            piece = pieces[self._at]
            for end in self.lane.awaited[self._at]:
                came = begun.get(end)
                if came is None:
                    return end
                self._now = max(self._now, came)
            if piece.step != self._step:
                self._step = piece.step
                self.bounds.append(self._now)
            self._now += self._seconds[self._at]
            if piece.doing is Doing.BEGIN and piece.key is not None:
                begun[piece.key, rank] = self._now
                ready.extend(waiting.pop((piece.key, rank), ()))
            self._at += 1
        self.bounds.append(self._now)
        return None


def step_seconds(bounds: Mapping[int, Sequence[float]]) -> list[float]:
    """Return the length of each step: the mean of all ranks."""
    lengths = [[end - begin for begin, end in pairwise(each)] for each in bounds.values()]
    return [sum(step) / len(step) for step in zip(*lengths, strict=True)]

"""The steps of a job that the rings of all its ranks hold, and what a step would have lasted with other times."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from bigsci_launch.slow.clocks import clocks_of
from bigsci_launch.slow.replay import lanes_of, play, step_seconds
from bigsci_launch.slow.straggler import StepPhase
from bigsci_launch.slow.timeline import Doing, RankTimeline, TimelinePiece, WithoutCore
from bigsci_launch.topology import Topology

WorkPart = tuple[StepPhase, str | None]
"""A phase, and where in the code."""
Seconds = Callable[[TimelinePiece, float], float]
WARM_UP = 3
"""First steps of a program, which import, compile and allocate."""
MAX_STEPS = 60
MAX_PIECES = 400_000
PASSES = (StepPhase.FORWARD, StepPhase.BACKWARD)


@dataclass(frozen=True, slots=True)
class PipelinePlace:
    """Where a rank is in the pipeline: ranks of a stage do the same work, and replicas of a pipeline have one `replica`
    each. None where it is not known."""

    stage: int | None
    replica: int | None = None


class PlayedJob:
    """Steps `numbers` of a job, the newest, of all ranks. `base` is what each lasts when it is played as it was.

    Raises:
        ValueError: the calls of its ranks do not fit together.
    """

    def __init__(
        self,
        timelines: Sequence[RankTimeline],
        topology: Topology | None,
        nodes: Mapping[int, str],
        most: int = MAX_STEPS,
    ) -> None:
        self.numbers = common_steps(timelines, most)
        within = [each.within(self.numbers) for each in timelines]
        self.ranks = tuple(each.rank for each in within)
        self.lanes = {lane.timeline.rank: lane for lane in lanes_of(within, clocks_of(within, nodes))}
        self.places = places_of(within, topology)
        self.without_core = {each.rank: each.without_core for each in within}
        self.has_stages = topology is None or topology.is_grid
        self.base = self._play({})
        self.step_s = sum(self.base) / len(self.base) if self.base else 0.0

    def _play(self, other: Mapping[int, Sequence[float]]) -> list[float]:
        if not self.numbers:
            return []
        bounds = play(list(self.lanes.values()), other)
        if bounds is None:
            raise ValueError("the calls of its ranks do not fit together")
        return step_seconds(bounds)

    def gains(self, other: Mapping[int, Sequence[float]]) -> list[float]:
        """Return how many seconds shorter each step would have been, had some ranks had other times."""
        return [was - would for was, would in zip(self.base, self._play(other), strict=True)]

    @cached_property
    def work(self) -> dict[int, dict[int, dict[WorkPart, float]]]:
        """{rank: {step: {part: seconds of own work}}}."""
        found: dict[int, dict[int, dict[WorkPart, float]]] = {}
        for rank, lane in self.lanes.items():
            steps = found.setdefault(rank, {step: {} for step in self.numbers})
            for piece, seconds in zip(lane.timeline.pieces, lane.seconds, strict=True):
                if piece.doing is Doing.OWN:
                    part = (piece.phase, piece.site)
                    steps[piece.step][part] = steps[piece.step].get(part, 0.0) + seconds
        return found

    def peers(self, rank: int) -> list[int]:
        """Return the other ranks that do the same work."""
        return [each for each in self.ranks if each != rank and self.places[each].stage == self.places[rank].stage]

    def usual(self, rank: int, others: Sequence[int]) -> dict[int, dict[WorkPart, float]]:
        """Return the median of the work of `others` in each step, in every part that this rank has or they have."""
        found: dict[int, dict[WorkPart, float]] = {}
        for step in self.numbers:
            rows = [self.work[each][step] for each in others]
            parts = set(self.work[rank][step]).union(*rows)
            found[step] = {part: median(row.get(part, 0.0) for row in rows) for part in parts}
        return found

    def waits_for_core(self, rank: int) -> tuple[list[float], bool]:
        """Return for how many seconds of each step a rank was kept from a core, beyond the median of its peers, and
        whether that was by a quota. Less than nothing if they waited longer; nothing where it is not known of all.
        """
        held, ready = (self._kept_longer(rank, of) for of in (lambda each: each.held, lambda each: each.ready))
        return (held, True) if sum(held) > sum(ready) else (ready, False)

    def _kept_longer(self, rank: int, of: Callable[[WithoutCore], float]) -> list[float]:
        peers = self.peers(rank)
        if not peers:
            return [0.0 for _ in self.numbers]
        rows = ([self.without_core[each].get(step) for each in (rank, *peers)] for step in self.numbers)
        known = ([of(each) for each in row if each is not None] for row in rows)
        return [row[0] - median(row[1:]) if len(row) > len(peers) else 0.0 for row in known]

    def without(self, rank: int) -> float | None:
        """Return for how many seconds of a step a rank was kept from a core; None where it is not known."""
        known = [max(each.held, each.ready) for each in self.without_core[rank].values()]
        return sum(known) / len(known) if known else None

    def transfers(self, rank: int) -> Iterator[tuple[int, TimelinePiece, float]]:
        """Yield each transfer of a rank: its place among the pieces, the piece, and how many seconds the rank was in
        it once all had come."""
        lane = self.lanes[rank]
        for at, (piece, seconds, ends) in enumerate(zip(lane.timeline.pieces, lane.seconds, lane.awaited, strict=True)):
            if ends:
                yield at, piece, seconds

    def passes(self, rank: int) -> list[float]:
        """Return the seconds of a rank's forward and backward passes in each step."""
        return [sum(s for (phase, _), s in self.work[rank][step].items() if phase in PASSES) for step in self.numbers]

    def as_usual(self, rank: int, others: Sequence[int], phases: Collection[StepPhase]) -> list[float]:
        """Return the seconds of the pieces of a rank, had it worked as `others` did in these phases of each step."""
        usual, own = self.usual(rank, others), self.work[rank]

        def seconds(piece: TimelinePiece, lasted: float) -> float:
            part = (piece.phase, piece.site)
            spent = own[piece.step].get(part, 0.0)
            return lasted * usual[piece.step][part] / spent if spent and piece.phase in phases else lasted

        return self.changed(rank, seconds)

    def changed(self, rank: int, seconds: Seconds) -> list[float]:
        """Return the seconds of the pieces of a rank, those of its own work changed."""
        lane = self.lanes[rank]
        return [
            seconds(piece, lasted) if piece.doing is Doing.OWN else lasted
            for piece, lasted in zip(lane.timeline.pieces, lane.seconds, strict=True)
        ]


def common_steps(timelines: Sequence[RankTimeline], most: int = MAX_STEPS) -> range:
    """Return the newest steps, `most` of them, that all timelines hold from begin to end."""
    if not timelines:
        return range(0)
    first = max(WARM_UP, *(each.steps.start for each in timelines))
    end = min(each.steps.stop for each in timelines)
    pieces = sum(piece.step in range(first, end) for each in timelines for piece in each.pieces)
    fits = max(1, (end - first) * MAX_PIECES // pieces) if pieces else most
    return range(max(first, end - min(most, fits)), max(first, end))


def places_of(timelines: Sequence[RankTimeline], topology: Topology | None) -> dict[int, PipelinePlace]:
    """Return where each rank is; without a topology, messages show the stages: activations go first."""
    if topology is not None and all(each.rank < topology.world_size for each in timelines):
        ranks = [each.rank for each in timelines]
        return {rank: PipelinePlace(topology.kind_of(rank), topology.coordinate(rank).dp_rank) for rank in ranks}
    sends: dict[int, int] = {}
    pairs: set[frozenset[int]] = set()
    messages = [
        (piece.begin, piece.key[1], piece.key[2])
        for each in timelines
        for piece in each.pieces
        if piece.doing is Doing.BEGIN and piece.key is not None and piece.key[0] == "message"
    ]
    for _, source, target in sorted(messages):
        if frozenset((int(source), target)) not in pairs:
            pairs.add(frozenset((int(source), target)))
            sends.setdefault(target, int(source))
    return {each.rank: PipelinePlace(_depth(each.rank, sends)) for each in timelines}


def _depth(rank: int, sends: Mapping[int, int]) -> int | None:
    seen = {rank}
    while rank in sends:
        rank = sends[rank]
        if rank in seen:
            return None
        seen.add(rank)
    return len(seen) - 1

"""What is drawn of the steps of a job: how long each rank worked in each of them, and one step in lanes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median, median_low

from bigsci_launch.slow.job import PlayedJob
from bigsci_launch.slow.replay import Lane
from bigsci_launch.slow.timeline import Doing
from bigsci_launch.topology import Topology
from bigsci_launch.topology.naming import name_ranks_and_part

MOST_ROWS, MOST_LANES = 40, 12
WAITS = "waits"
SHORTEST_S = 5e-4
"""What is shorter is drawn as a part of what was before."""


@dataclass(frozen=True, slots=True)
class WorkRow:
    """A rank: its own work in each step, in ms, and that of its peers; 0 for what it has no peers for."""

    name: str
    work_ms: tuple[float, ...]
    usual_ms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StepSpan:
    """What a rank does from one moment of a step to another, in ms since its begin: a phase, or `waits`."""

    what: str
    begin_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class RankLane:
    name: str
    spans: tuple[StepSpan, ...]


@dataclass(frozen=True, slots=True)
class StepPicture:
    """Ranks x steps, and the typical step in lanes. `num_ranks` is how many there are: not all may be drawn."""

    answer: str
    taken: float
    num_ranks: int
    steps: tuple[int, ...]
    rows: tuple[WorkRow, ...]
    lanes_of: int
    lanes: tuple[RankLane, ...]


def picture_of(
    job: PlayedJob, topology: Topology | None, answer: str, taken: float, named: Collection[int]
) -> StepPicture:
    """Return what is drawn, of the named ranks and of those that work longest. `taken` is when they were looked at."""
    totals = {rank: [sum(job.work[rank][step].values()) for step in job.numbers] for rank in job.ranks}
    usual = {rank: _usual(totals, job.peers(rank), len(job.numbers)) for rank in job.ranks}
    order = sorted(job.ranks, key=lambda rank: (rank not in named, sum(usual[rank]) - sum(totals[rank])))
    middle = sorted(range(len(job.base)), key=lambda at: job.base[at])[len(job.base) // 2]
    chosen = _with_peers(job, order, MOST_LANES)
    return StepPicture(
        answer,
        taken,
        len(job.ranks),
        tuple(job.numbers),
        tuple(
            WorkRow(name_ranks_and_part([rank], topology), _ms(totals[rank]), _ms(usual[rank]))
            for rank in sorted(order[:MOST_ROWS])
        ),
        job.numbers[middle],
        tuple(_lanes(job, chosen, job.numbers[middle], topology)),
    )


def _usual(totals: Mapping[int, Sequence[float]], peers: Sequence[int], count: int) -> list[float]:
    return [median_low(totals[peer][at] for peer in peers) if peers else 0.0 for at in range(count)]


def _ms(seconds: Sequence[float]) -> tuple[float, ...]:
    return tuple(round(each * 1e3, 2) for each in seconds)


def _with_peers(job: PlayedJob, order: Sequence[int], most: int) -> list[int]:
    """Return the first ranks of an order, one of each stage among them."""
    stages: dict[int | None, int] = {}
    for rank in order:
        stages.setdefault(job.places[rank].stage, rank)
    return sorted(dict.fromkeys([order[0], *stages.values(), *order]).keys() & {*order[:most], *stages.values()})[:most]


def _lanes(job: PlayedJob, ranks: Sequence[int], step: int, topology: Topology | None) -> Iterator[RankLane]:
    spans = {rank: list(_spans(job.lanes[rank], step)) for rank in ranks}
    first = min((each[0].begin_ms for each in spans.values() if each), default=0.0)
    for rank in ranks:
        moved = (
            StepSpan(each.what, round(each.begin_ms - first, 2), round(each.end_ms - first, 2)) for each in spans[rank]
        )
        yield RankLane(name_ranks_and_part([rank], topology), tuple(moved))


def _spans(lane: Lane, step: int) -> Iterator[StepSpan]:
    ahead = lane.timeline.pieces[0].begin - lane.start
    pieces = [piece for piece in lane.timeline.pieces if piece.step == step and piece.seconds > SHORTEST_S]
    for what, group in groupby(pieces, key=lambda piece: str(piece.phase) if piece.doing is Doing.OWN else WAITS):
        held = list(group)
        yield StepSpan(what, (held[0].begin - ahead) * 1e3, (held[-1].end - ahead) * 1e3)


def speeds_of(job: PlayedJob, nodes: Mapping[int, str]) -> dict[str, float]:
    """Return {node: how many times longer than their peers its slowest rank needs for forward and backward passes}.

    A node whose ranks have no peers, or no passes that the rings show, is left out.
    """
    passes = {rank: job.passes(rank) for rank in job.ranks}
    found: dict[str, float] = {}
    for rank in job.ranks:
        peers = [peer for peer in job.peers(rank) if nodes.get(peer) != nodes.get(rank)]
        usual = _usual(passes, peers, len(job.numbers))
        ratios = [own / other for own, other in zip(passes[rank], usual, strict=True) if own > 0 and other > 0]
        if rank in nodes and len(ratios) > len(job.numbers) / 2:
            found[nodes[rank]] = max(found.get(nodes[rank], 0.0), median(ratios))
    return found

"""Which rank makes a job slow: from the rings of its ranks, or by looks at a job that was not prepared."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from bigsci_launch.errors import RunDirError
from bigsci_launch.runs.find import find_attempt, find_run
from bigsci_launch.runs.generations.read import read_layouts, uneven_topology
from bigsci_launch.runs.layout import rank_files, read_record
from bigsci_launch.slow.job import PlayedJob
from bigsci_launch.slow.judge import judge, too_few
from bigsci_launch.slow.looks import answer_by_looks
from bigsci_launch.slow.picture import StepPicture, picture_of, speeds_of
from bigsci_launch.slow.straggler import SlowAnswer
from bigsci_launch.slow.timeline import RankTimeline, timeline_of
from bigsci_launch.slow.words import not_compared, slow_document, slow_lines
from bigsci_launch.spy.look.target import Target
from bigsci_launch.topology import Topology
from bigsci_launch.topology.naming import agree, name_ranks
from bigsci_launch.trace.last import RankCalls
from bigsci_launch.trace.read import ALL_CALLS, read_ranks

RINGS = "rings"
NO_RINGS = "no rank has a ring"
ON_DEVICE = (
    "collectives run on a device: the rings show when a rank asked for them, and not when its device came to them"
)
UNEVEN_UNKNOWN = "the pipelines have different depths, and the rings have no room for where each rank is: name the run"

NUM_NEWEST = 20
"""Steps that are judged alone if no rank is slow in all that the rings hold: one may be since a short time."""
NUM_LIVING = 2048
"""Calls that are read of each thread of a rank that runs: of 384 ranks, some 40 MB."""


@dataclass(frozen=True, slots=True)
class Asked:
    """An answer, and where ranks are, if that is known."""

    answer: SlowAnswer
    topology: Topology | None
    job: PlayedJob | None = None
    nodes: Mapping[int, str] = field(default_factory=dict)

    @property
    def picture(self) -> StepPicture | None:
        """What can be drawn; None without enough steps."""
        if self.job is None or self.answer.undecided is not None:
            return None
        named = {rank for each in self.answer.stragglers for rank in each.ranks}
        return picture_of(self.job, self.topology, self.lines[0], time.time(), named)

    @property
    def speeds(self) -> dict[str, float]:
        """How many times longer than their peers the ranks of each node work; nothing without enough steps."""
        if self.job is None or self.answer.undecided is not None:
            return {}
        return speeds_of(self.job, self.nodes)

    @property
    def lines(self) -> list[str]:
        return list(slow_lines(self.answer, self.topology))

    @property
    def document(self) -> dict[str, Any]:
        return slow_document(self.answer)


def who_is_slow(argument: str | None) -> Asked:
    """Return who makes a run slow, by its rings: those of its living ranks, or those that were left; also in a folder.

    Raises:
        RunDirError: there is no such run.
        CollectError: nothing can be read.
    """
    ranks = read_ranks(argument, None, ALL_CALLS, NUM_LIVING)
    nodes, topology = _nodes(argument), _uneven_topology(argument)
    answer, job = judged_rings(ranks, nodes, topology)
    topology = topology or next((each.ring.topology for each in ranks if each.ring is not None), None)
    return Asked(answer, topology, job, nodes)


def who_waits_least(target: Target, axes: str | None, seconds: float) -> Asked:
    """Return who makes a run or a job slow, by looks at its ranks for so many seconds; `axes` is its topology, if the
    user named one.

    Raises:
        BslError: it cannot be looked at.
    """
    target = replace(target, topology=axes or target.topology)
    topology = Topology.parse(target.topology) if target.topology else None
    return Asked(answer_by_looks(target, seconds), topology)


def _uneven_topology(argument: str | None) -> Topology | None:
    """Return the pipelines of a run, if they have different depths: a ring may lack the room for them."""
    try:
        records = read_layouts(find_attempt(find_run(argument), None))
    except RunDirError:
        return None
    return uneven_topology(records[-1]) if records else None


def _nodes(argument: str | None) -> dict[int, str]:
    """Return the node of each rank of a run; nothing for a folder."""
    try:
        attempt = find_attempt(find_run(argument), None)
    except RunDirError:
        return {}
    records = {rank: read_record(path) for rank, path in rank_files(attempt.pids, ".json").items()}
    return {rank: str(record["node"]) for rank, record in records.items() if record and record.get("node")}


def judged_rings(
    ranks: Sequence[RankCalls], nodes: Mapping[int, str], topology: Topology | None = None
) -> tuple[SlowAnswer, PlayedJob | None]:
    """Return who makes a job slow, as far as the rings of its ranks show, and its steps; None where they hold none.

    `nodes` is where ranks are, if known; `topology` replaces that of the rings.
    """
    known = {each.rank: each for each in ranks if each.rank is not None and each.ring is not None}
    rings = {rank: each.ring for rank, each in sorted(known.items()) if each.ring is not None}
    missing = [f"{each.name}: {each.why}" for each in ranks if each.why is not None]
    unknown = partial(SlowAnswer, RINGS, num_steps=None, seconds=0.0, step_ms=None, missing=tuple(missing))
    if len(rings) < 2:
        return unknown(undecided=NO_RINGS if not rings else "one ring alone compares with nothing"), None
    if not all(ring.are_blocking for ring in rings.values()):
        return unknown(undecided=ON_DEVICE), None
    timelines = [timeline_of(rank, ring) for rank, ring in rings.items()]
    missing += _unseen(timelines)
    ring = next(iter(rings.values()))
    topology = topology or ring.topology
    if topology is None and ring.is_uneven:
        return unknown(undecided=UNEVEN_UNKNOWN), None
    silent = [each.rank for each in timelines if not each.pieces]
    if silent:
        why = f"{name_ranks(silent)} {agree('has recorded no communication', silent)}"
        return unknown(missing=tuple(missing), undecided=why), None
    try:
        job = PlayedJob(timelines, topology, nodes)
    except ValueError as error:
        return unknown(missing=tuple(missing), undecided=str(error)), None
    alone = [rank for rank in job.ranks if not job.has_stages and not job.peers(rank)]
    if len(alone) == len(job.ranks):
        return unknown(undecided=not_compared(alone)), None
    missing += [not_compared(alone)] if alone else []
    count = len(job.numbers)
    if not count:
        return unknown(num_steps=0, missing=tuple(missing), undecided=too_few(0)), None
    found = judge(job, nodes)
    if not found.stragglers and count >= 2 * NUM_NEWEST:
        newest = PlayedJob(timelines, topology, nodes, NUM_NEWEST)
        if (late := judge(newest, nodes)).stragglers:
            job, found, count = newest, late, NUM_NEWEST
    answer = SlowAnswer(
        RINGS,
        count,
        job.step_s * count,
        job.step_s * 1e3,
        found.stragglers,
        found.imbalances,
        (*missing, *found.unclear),
        found.undecided,
    )
    return answer, job


def _unseen(timelines: Sequence[RankTimeline]) -> list[str]:
    several = [each.rank for each in timelines if each.threads > 1]
    return [f"{name_ranks(several)}: only one thread of those that communicate was followed"] if several else []

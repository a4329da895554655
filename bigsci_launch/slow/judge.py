"""Decides from the steps of a job who makes it slow: a rank, a stage, a link, or how the work is cut.

A rank is compared with those that do the same work, in the same steps. What it costs is what the steps would have
gained, had it worked as they did: time that others never waited for costs nothing. That has to be beyond chance, more
than `MIN_SHARE` of a step, and clearly more than any other rank would gain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from bigsci_launch.slow.chance import cost_of, is_surely_above
from bigsci_launch.slow.job import PASSES, PlayedJob, Seconds, WorkPart
from bigsci_launch.slow.links import SlowLink, doubt_of, find_links
from bigsci_launch.slow.straggler import Imbalance, SlowKind, StepPhase, Straggler
from bigsci_launch.slow.timeline import TimelinePiece

MIN_STEPS = 10
MIN_SHARE = 0.05
MIN_CUT_SHARE = 0.05
MIN_UNEVEN_SHARE = 0.1
MIN_PHASE_SHARE = 0.01
NUM_PARTS, MOST = 4, 0.75
SMALLEST_PART = 0.1
"""Of several that are slow at once, one that costs less than this part of all is left out."""
MAX_PLAYED = 8
"""Suspects, and as many others, whose steps are played again: in a large job each takes seconds."""
CLEARLY = 2.0
ALL_PHASES = 0.5
"""A rank is slow in all phases if the least slow one has at least this part of the excess of the slowest."""
CONTENDED = 1 / 3
"""A rank is not accused of its code if so much of what it works longer is a wait for a core: one that is shared is
slower as well while the rank has it."""
MIN_PHASE_SECONDS = 1e-4
"""A rank that needs less in a step only gets what another one has loaded."""
SMALL_PHASE = 0.1
"""Share of the usual work of a phase that is too short to tell."""
UNEVEN = "another rank is last in each step: the work is uneven, or the machines are busy"
BY_ONE_ALONE = {
    StepPhase.SAVE: "saves",
    StepPhase.EVALUATION: "evaluates",
    StepPhase.DATA: "loads data",
}

Other = dict[int, list[float]]
Steps = Mapping[int, Mapping[WorkPart, float]]


@dataclass(frozen=True, slots=True)
class JudgedSteps:
    """What was found in the steps of a job. `unclear` is what looks slow, and why that is not known."""

    stragglers: tuple[Straggler, ...] = ()
    imbalances: tuple[Imbalance, ...] = ()
    unclear: tuple[str, ...] = ()
    undecided: str | None = None


def judge(job: PlayedJob, nodes: Mapping[int, str]) -> JudgedSteps:
    """Return who makes a job slow, as far as its steps show."""
    if len(job.numbers) < MIN_STEPS:
        return JudgedSteps(undecided=too_few(len(job.numbers)))
    suspects = _suspects(job)
    units, alone = _slow_units(job, suspects), []
    stragglers: list[Straggler] = []
    for unit, gains in units:
        found = _straggler(job, unit, gains, nodes, waits=all(suspects[rank].waits for rank in unit))
        reason = _only_one(job, unit, found.phase)
        if reason is not None:
            alone.append(Imbalance(found.ranks, reason, found.cost))
        else:
            stragglers.append(found)
    named = {rank for unit, _ in units for rank in unit}
    accused = {rank for rank in named if not suspects[rank].waits}
    late = [link for link in find_links(job) if not accused & set(link.ranks) and _lasts(job, link.gains)]
    doubts = [doubt_of(job, link, nodes) for link in late]
    stragglers += [_slow_link(job, link, nodes) for link, doubt in zip(late, doubts, strict=True) if doubt is None]
    cut = list(_uneven_cut(job, named, nodes)) if job.has_stages else []
    stragglers += [each for each in cut if isinstance(each, Straggler)]
    imbalances = [*alone, *(each for each in cut if isinstance(each, Imbalance))]
    if not stragglers and not imbalances:
        imbalances += _uneven_work(job)
    ordered = sorted(stragglers, key=lambda each: -(each.cost.ms_per_step or 0.0))
    return JudgedSteps(tuple(ordered), tuple(imbalances), tuple(doubt for doubt in doubts if doubt is not None))


def too_few(count: int) -> str:
    steps = "1 complete step is" if count == 1 else f"{count or 'no'} complete steps are"
    return f"{steps} in the rings of all ranks, apart from the first of the program; {MIN_STEPS} are needed"


def _matters(job: PlayedJob, gains: Sequence[float], share: float = MIN_SHARE) -> bool:
    return fmean(gains) > share * job.step_s and is_surely_above(gains, 0.0)


def _lasts(job: PlayedJob, gains: Sequence[float]) -> bool:
    """Whether gains matter in most steps: one message that was late for seconds is an episode."""
    return _matters(job, gains) and median(gains) > MIN_SHARE * median(job.base)


# ----------------------------------------------------------------------------------------------- ranks and stages


@dataclass(frozen=True, slots=True)
class LateRank:
    """A rank that works longer than its peers, in which phases, the slowest first, and by how many seconds a step.

    One that `waits` for a core does the same as they do: it is ready without one, or a quota holds it up.
    """

    rank: int
    phases: tuple[StepPhase, ...]
    excess: float
    waits: bool


def _slow_units(job: PlayedJob, suspects: Mapping[int, LateRank]) -> list[tuple[tuple[int, ...], list[float]]]:
    """Return the ranks that are slower than their peers, with what each costs; all ranks of a stage as one."""
    if not suspects:
        return []
    units = _units(job, suspects)
    other = {unit: {rank: _as_usual(job, rank, suspects) for rank in unit} for unit in units}
    everyone = job.gains({rank: times for each in other.values() for rank, times in each.items()})
    costs = {unit: _cost(job, unit, other, everyone) for unit in units}
    for unit, gains in costs.items():
        held = max((_held_in_transfers(job, rank) for rank in unit if suspects[rank].waits), key=fmean, default=None)
        if held is not None:
            costs[unit] = [gain + more for gain, more in zip(gains, held, strict=True)]
    innocent = [rank for rank in job.ranks if job.peers(rank) and rank not in suspects][:MAX_PLAYED]
    chance = max((fmean(job.gains({rank: _as_usual(job, rank, suspects)})) for rank in innocent), default=0.0)
    least = max(MIN_SHARE * job.step_s, CLEARLY * chance, SMALLEST_PART * fmean(everyone))
    return [(unit, gains) for unit, gains in costs.items() if fmean(gains) > least]


def _suspects(job: PlayedJob) -> dict[int, LateRank]:
    """Return ranks that work longer than their peers."""
    found = []
    for rank in job.ranks:
        if not job.peers(rank):
            continue
        usual, own = job.usual(rank, job.peers(rank)), job.work[rank]
        excess = {phase: fmean(_excess(own, usual, phase)) for phase in StepPhase if _is_longer(job, own, usual, phase)}
        (waits, _), worked, least = job.waits_for_core(rank), sum(excess.values()), MIN_SHARE * job.step_s
        if fmean(waits) > max(least / 2, CONTENDED * worked) and _lasts_beyond_chance(job, waits, [1.0] * len(waits)):
            found.append(LateRank(rank, tuple(StepPhase), max(worked, fmean(waits)), waits=True))
        elif worked - max(0.0, fmean(waits)) > least:
            in_all = slow_phase(usual, own)[0] is StepPhase.OUTSIDE_PYTHON
            phases = tuple(StepPhase) if in_all else tuple(sorted(excess, key=lambda phase: -excess[phase]))
            found.append(LateRank(rank, phases, worked, waits=False))
    return {each.rank: each for each in sorted(found, key=lambda each: -each.excess)[:MAX_PLAYED]}


def _excess(own: Steps, usual: Steps, phase: StepPhase) -> list[float]:
    """Return by how many seconds a rank worked longer than its peers in each step."""
    return [_of_phase(own[step], phase) - _of_phase(usual[step], phase) for step in own]


def _is_longer(job: PlayedJob, own: Steps, usual: Steps, phase: StepPhase) -> bool:
    """Whether a rank works longer in a phase, beyond chance and all the time: an episode is no straggler.

    What it does in some steps only, such as saves, has to be longer in these steps, and in three of four parts of the
    time.
    """
    times = [max(_of_phase(own[step], phase), _of_phase(usual[step], phase)) for step in own]
    return _lasts_beyond_chance(job, _excess(own, usual, phase), times)


def _lasts_beyond_chance(job: PlayedJob, excess: Sequence[float], times: Sequence[float]) -> bool:
    if fmean(excess) <= MIN_PHASE_SHARE * job.step_s:
        return False
    there = [more for more, time in zip(excess, times, strict=True) if time > 0]
    is_rare = len(there) < len(excess) / 2
    size = len(excess) / NUM_PARTS if is_rare else 1.0
    parts = [excess[round(at * size) : round((at + 1) * size)] for at in range(round(len(excess) / size))]
    lasts = sum(fmean(part) > fmean(excess) / NUM_PARTS for part in parts) >= MOST * len(parts)
    return lasts and is_surely_above(there, MIN_PHASE_SHARE * job.step_s)


def _cost(
    job: PlayedJob, unit: tuple[int, ...], other: Mapping[tuple[int, ...], Other], everyone: Sequence[float]
) -> list[float]:
    """Return what a unit costs: alone, or on top of the others, who may hide it."""
    if len(other) == 1:
        return list(everyone)
    alone = job.gains(other[unit])
    rest = job.gains({rank: times for each, them in other.items() if each != unit for rank, times in them.items()})
    on_top = [every - without for every, without in zip(everyone, rest, strict=True)]
    return max(alone, on_top, key=fmean)


def _held_in_transfers(job: PlayedJob, rank: int) -> list[float]:
    """Return for how long a rank made collectives longer, for all of their ranks, because it had no core."""
    usual, own = job.usual(rank, job.peers(rank)), job.work[rank]
    worked = [sum(own[step].values()) - sum(usual[step].values()) for step in job.numbers]
    lasted = dict.fromkeys(job.numbers, 0.0)
    for _, piece, seconds in job.transfers(rank):
        lasted[piece.step] += seconds
    rows = zip(job.waits_for_core(rank)[0], worked, lasted.values(), strict=True)
    return [min(max(0.0, waits - max(0.0, more)), transfers) for waits, more, transfers in rows]


def _units(job: PlayedJob, suspects: Mapping[int, LateRank]) -> list[tuple[int, ...]]:
    """Return the suspects, those of one stage of one pipeline together where all of its ranks are, for one reason."""
    blocks: dict[tuple[int | None, int | None], list[int]] = {}
    for rank in job.ranks:
        blocks.setdefault((job.places[rank].stage, job.places[rank].replica), []).append(rank)
    whole = [
        tuple(block)
        for block in blocks.values()
        if len(block) > 1 and set(block) <= suspects.keys() and len({suspects[rank].waits for rank in block}) == 1
    ]
    inside = {rank for block in whole for rank in block}
    return [*whole, *((rank,) for rank in suspects if rank not in inside)]


def _as_usual(job: PlayedJob, rank: int, suspects: Mapping[int, LateRank]) -> list[float]:
    """Return the times of a rank, had it worked as its peers who are no suspects, where it is slow."""
    peers = job.peers(rank)
    phases = suspects[rank].phases if rank in suspects else tuple(StepPhase)
    return job.as_usual(rank, [each for each in peers if each not in suspects] or peers, phases)


def _straggler(
    job: PlayedJob, unit: tuple[int, ...], gains: Sequence[float], nodes: Mapping[int, str], *, waits: bool
) -> Straggler:
    if waits:
        phase, site, causes = StepPhase.OUTSIDE_PYTHON, None, [_why_without_core(job, unit[0])]
    else:
        peers = [each for each in job.peers(unit[0]) if each not in unit]
        (phase, site), causes = slow_phase(job.usual(unit[0], peers), job.work[unit[0]]), []
    kind = SlowKind.STAGE if len(unit) > 1 else SlowKind.RANK
    return Straggler(kind, unit, _nodes_of(unit, nodes), phase, cost_of(gains, job.step_s), site, tuple(causes))


def _why_without_core(job: PlayedJob, rank: int) -> str:
    waits, by_quota = job.waits_for_core(rank)
    words = "a CPU quota holds it up" if by_quota else "it waits for a CPU: it is ready without one"
    return f"{words} for {fmean(waits) * 1e3:.3g} ms of a step more than its peers"


def _nodes_of(ranks: Iterable[int], nodes: Mapping[int, str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(nodes[rank] for rank in ranks if rank in nodes))


def slow_phase(usual: Steps, own: Steps) -> tuple[StepPhase, str | None]:
    """Return in which phase a rank is slow, and where in the code; slow in all of them is outside of Python."""
    expected, spent = _sums(usual), _sums(own)
    excess = {part: spent.get(part, 0.0) - expected.get(part, 0.0) for part in {*expected, *spent}}
    phases = {phase: sum(more for part, more in excess.items() if part[0] is phase) for phase in StepPhase}
    slowest = max(phases, key=lambda phase: phases[phase])
    if _is_slow_in_all(expected, phases):
        return StepPhase.OUTSIDE_PYTHON, None
    sites = {part[1]: more for part, more in excess.items() if part[0] is slowest}
    site = max(sites, key=lambda each: sites[each])
    return slowest, site if sites[site] > phases[slowest] / 2 else None


def _sums(steps: Steps) -> dict[WorkPart, float]:
    found: dict[WorkPart, float] = {}
    for parts in steps.values():
        for part, seconds in parts.items():
            found[part] = found.get(part, 0.0) + seconds
    return found


def _is_slow_in_all(expected: Mapping[WorkPart, float], excess: Mapping[StepPhase, float]) -> bool:
    times = {phase: sum(s for part, s in expected.items() if part[0] is phase) for phase in StepPhase}
    whole = sum(times.values())
    slower = [excess[phase] / time for phase, time in times.items() if time > SMALL_PHASE * whole]
    explained = sum(excess[phase] for phase, time in times.items() if time > SMALL_PHASE * whole)
    is_most = explained > ALL_PHASES * sum(max(0.0, each) for each in excess.values())
    return len(slower) > 1 and is_most and min(slower) >= ALL_PHASES * max(slower) > 0


def _only_one(job: PlayedJob, unit: tuple[int, ...], phase: StepPhase) -> str | None:
    """Return why it is no fault that a rank is late: no other does what it does. Others may save something else."""
    words = BY_ONE_ALONE.get(phase)
    if words is None or len(unit) > 1:
        return None
    spent = {rank: _sums(job.work[rank]) for rank in job.ranks}
    parts = [part for part in spent[unit[0]] if part[0] is phase]
    if phase is StepPhase.SAVE:
        parts = [max(parts, key=lambda part: spent[unit[0]][part])]
    others = max((sum(spent[rank].get(part, 0.0) for part in parts) for rank in job.peers(unit[0])), default=0.0)
    return f"it alone {words}, and the others wait" if others < MIN_PHASE_SECONDS * len(job.numbers) else None


def _of_phase(parts: Mapping[WorkPart, float], phase: StepPhase) -> float:
    return sum(seconds for part, seconds in parts.items() if part[0] is phase)


# ----------------------------------------------------------------------------------------------- links


def _slow_link(job: PlayedJob, link: SlowLink, nodes: Mapping[int, str]) -> Straggler:
    cost = cost_of(link.gains, job.step_s)
    return Straggler(SlowKind.LINK, link.ranks, _nodes_of(link.ranks, nodes), StepPhase.UNKNOWN, cost, link.site)


# ----------------------------------------------------------------------------------------------- the cut


def _uneven_cut(job: PlayedJob, named: set[int], nodes: Mapping[int, str]) -> Iterable[Straggler | Imbalance]:
    """Yield the stage that has more work than the others in every pipeline; the last one has the loss as well."""
    stages: dict[int, list[int]] = {}
    for rank in job.ranks:
        if (stage := job.places[rank].stage) is not None and rank not in named:
            stages.setdefault(stage, []).append(rank)
    if len(stages) < 2:
        return
    passes = {stage: fmean(median(job.passes(rank)) for rank in ranks) for stage, ranks in stages.items()}
    heaviest, mean = max(passes, key=lambda stage: passes[stage]), fmean(passes.values())
    other = {
        rank: job.changed(rank, _scaled(mean / passes[stage]))
        for stage, ranks in stages.items()
        for rank in ranks
        if passes[stage]
    }
    gains = job.gains(other)
    if not _matters(job, gains, MIN_CUT_SHARE):
        return
    ranks, cost = tuple(stages[heaviest]), cost_of(gains, job.step_s)
    has_replicas = len(ranks) > len({job.places[rank].replica for rank in ranks} - {None}) or len(ranks) > 1
    if heaviest == max(stages):
        yield Imbalance(ranks, "the last stage also computes the loss", cost)
    elif has_replicas:
        yield Straggler(SlowKind.CUT, ranks, _nodes_of(ranks, nodes), StepPhase.UNKNOWN, cost)
    else:
        yield Straggler(SlowKind.STAGE, ranks, _nodes_of(ranks, nodes), StepPhase.UNKNOWN, cost)


def _scaled(factor: float) -> Seconds:
    return lambda piece, lasted: lasted * factor if piece.phase in PASSES else lasted


# ----------------------------------------------------------------------------------------------- uneven work


def _uneven_work(job: PlayedJob) -> list[Imbalance]:
    """Return that ranks have more work in turn, such as longer sequences, if that makes steps longer. What is even in a
    whole step may be uneven in its parts, as with experts."""
    other: Other = {}
    for rank in job.ranks:
        group = [rank, *job.peers(rank)]
        if len(group) < 2:
            continue
        other[rank] = job.changed(rank, _evened(job, rank, group))
    if not other:
        return []
    gains = job.gains(other)
    if not _matters(job, gains, MIN_UNEVEN_SHARE):
        return []
    return [Imbalance(tuple(other), UNEVEN, cost_of(gains, job.step_s))]


def _evened(job: PlayedJob, rank: int, group: Sequence[int]) -> Seconds:
    def seconds(piece: TimelinePiece, lasted: float) -> float:
        part = piece.phase, piece.site
        own = job.work[rank][piece.step].get(part, 0.0)
        return lasted * fmean(job.work[each][piece.step].get(part, 0.0) for each in group) / own if own else lasted

    return seconds

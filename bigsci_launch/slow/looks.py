"""Which rank the others wait for, from looks at random moments: it is the one that waits least. Pure but for the look.

Ranks are compared in segments of the look, in which all of them are seen: a change of the whole job cancels. A rank is
named if it waits less than each of its peers, with a chance of 5 % in all that it would be named by accident. Peers do
the same work: all ranks, or those of one stage of a pipeline.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest

from bigsci_launch.errors import CollectError
from bigsci_launch.slow.causes import causes_by_rank
from bigsci_launch.slow.looks_read import LookedRank, read_looks
from bigsci_launch.slow.straggler import Cost, Imbalance, SlowAnswer, SlowKind, StepPhase, Straggler
from bigsci_launch.slow.words import LOOKS, not_compared
from bigsci_launch.spy.evidence.bundle import Bundle
from bigsci_launch.spy.look.collect import collect
from bigsci_launch.spy.look.target import Target

ALPHA, POWER = 0.05, 0.8
LEAST_SEGMENTS = 6
"""Fewer do not show how much is chance."""
LEAST_SHARE = 0.02
"""A difference that is not surely above this share of the time is left alone: ranks differ a little by nature."""
WANTED_SHARE = 0.1
"""A rank that costs this share of a step must be found before it is said that none is slow."""
MOST_SLOW = 4
"""At most one rank of so many peers is slow: else it is unclear who holds up whom."""
MOST_OF_IT = 0.5
AS_MUCH = 1.5
MOSTLY_ALIKE = 0.9


@dataclass(frozen=True, slots=True)
class WaitGap:
    """How much longer some ranks wait than others, as a share of the time, with its least value; `noise` is the
    standard deviation between segments."""

    mean: float
    least: float
    most: float
    noise: float


def answer_by_looks(target: Target, seconds: float) -> SlowAnswer:
    """Look at a job for so many seconds, without any preparation of it, and return what makes it slow.

    Raises:
        CollectError: it has ended, or no node answered.
        SlurmUnavailable: srun is missing.
    """
    return answer_of_bundle(look_at(target, seconds))


def look_at(target: Target, seconds: float) -> Bundle:
    """Look at a job for so many seconds, and return what was seen."""
    if target.is_over:
        raise CollectError(
            f"{target.label} has ended: only living ranks can be looked at", hint=f"bsl slow {target.asked}"
        )
    return collect(replace(target, request={**target.request, "looks_s": seconds}))


def answer_of_bundle(bundle: Bundle) -> SlowAnswer:
    """Return what a look that lasted has shown."""
    ranks, missing, looked_s = read_looks(bundle)
    answer = judge_looks(ranks, looked_s)
    answer = replace(answer, missing=(*missing, *answer.missing))
    causes = causes_by_rank(bundle)
    stragglers = tuple(
        replace(each, causes=tuple(dict.fromkeys(cause for rank in each.ranks for cause in causes.get(rank, ()))))
        for each in answer.stragglers
    )
    return replace(answer, stragglers=stragglers)


def judge_looks(ranks: Sequence[LookedRank], seconds: float) -> SlowAnswer:
    """Return what the looks at all ranks show."""
    answer = SlowAnswer(how=LOOKS, num_steps=None, seconds=seconds, step_ms=None)
    why_not = _why_none_can_be_named(ranks, seconds)
    counts = Counter(each.stage for each in ranks)
    alone = [each.rank for each in ranks if each.is_uneven and counts[each.stage] < 2]
    if why_not or len(alone) == len(ranks):
        return replace(answer, undecided=why_not or not_compared(alone))
    found = [slow for group in peers(ranks) if (slow := find_slow(group)) is not None]
    stragglers = tuple(each for each in found if isinstance(each, Straggler))
    imbalances = tuple(each for each in found if isinstance(each, Imbalance)) + uneven_stages(ranks)
    needed_s = max((seconds_needed(group, seconds) for group in peers(ranks)), default=0.0)
    undecided = None if found or needed_s <= seconds else _too_short(needed_s, seconds)
    missing = (not_compared(alone),) if alone else ()
    return replace(answer, stragglers=stragglers, imbalances=imbalances, undecided=undecided, missing=missing)


def _why_none_can_be_named(ranks: Sequence[LookedRank], seconds: float) -> str | None:
    if len(ranks) < 2:
        return f"{len(ranks)} ranks were seen: one that waits less than others takes at least two"
    segments = min(each.num_segments for each in ranks)
    if segments < LEAST_SEGMENTS:
        return _too_short(seconds * LEAST_SEGMENTS / segments, seconds)
    if not any(each.waited for each in ranks):
        return "no rank was seen waiting for others: it is not known who does"
    if all(each.stays_put for each in ranks):
        return (
            f"in {seconds:.0f} s no rank was seen to begin or end a wait, or to leave its place: no step is known to "
            "have ended, and the job may hang: see `bsl spy`"
        )
    if any(each.passes_messages and each.stage is None for each in ranks):
        return "ranks pass messages to each other, as stages of a pipeline do: name the layout with --topology"
    return None


def _too_short(needed_s: float, seconds: float) -> str:
    return (
        f"{seconds:.0f} s are too short to find a rank that costs {WANTED_SHARE:.0%} of a step: look for "
        f"{math.ceil(needed_s / 10) * 10} s (--for)"
    )


def peers(ranks: Sequence[LookedRank]) -> list[list[LookedRank]]:
    """Return the ranks that do the same work; only groups of two or more."""
    groups: dict[int | None, list[LookedRank]] = defaultdict(list)
    for each in ranks:
        groups[each.stage].append(each)
    return [group for group in groups.values() if len(group) > 1]


def find_slow(group: Sequence[LookedRank]) -> Straggler | Imbalance | None:
    """Return the ranks of a group that wait less than each of the others; None if that may be chance."""
    by_wait = sorted(group, key=lambda each: each.waited)
    most = max(1, len(group) // MOST_SLOW)
    gaps = [later.waited - earlier.waited for earlier, later in pairwise(by_wait)][:most]
    slow, others = by_wait[: (count := gaps.index(max(gaps)) + 1)], by_wait[count:]
    pairs = [compare(each.waits, other.waits, len(group)) for each in slow for other in others]
    if min(pair.least for pair in pairs) <= LEAST_SHARE:
        return None
    closest = min(pairs, key=lambda pair: pair.mean)
    cost = Cost(None, None, None, closest.mean, max(0.0, closest.least), min(1.0, closest.most))
    return _describe(slow, others, cost)


def _describe(slow: Sequence[LookedRank], others: Sequence[LookedRank], cost: Cost) -> Straggler | Imbalance:
    phase, site = phase_of_excess(slow, others)
    ranks = tuple(sorted(each.rank for each in slow))
    if phase in (StepPhase.SAVE, StepPhase.EVALUATION) and not any(each.in_phase(phase) for each in others):
        return Imbalance(ranks, f"{phase} is the work of no other rank, and the others wait for it", cost)
    nodes = tuple(sorted({each.node for each in slow}))
    return Straggler(SlowKind.RANK, ranks, nodes, phase, cost, site)


def phase_of_excess(slow: Sequence[LookedRank], others: Sequence[LookedRank]) -> tuple[StepPhase, str | None]:
    """Return what slow ranks do for longer than the others, and where: nothing if it is spread over phases."""
    if is_without_core(slow, others):
        return StepPhase.OUTSIDE_PYTHON, None
    excess: dict[tuple[StepPhase, str | None], float] = {}
    for key in {key for each in slow for key in each.work}:
        usual = statistics.median(each.work.get(key, 0.0) for each in others)
        excess[key] = statistics.fmean(each.work.get(key, 0.0) for each in slow) - usual
    of_phase: dict[StepPhase, float] = defaultdict(float)
    for (phase, _), share in excess.items():
        of_phase[phase] += share
    phase = max(of_phase, key=lambda each: of_phase[each], default=StepPhase.UNKNOWN)
    if of_phase[phase] < MOST_OF_IT * sum(max(0.0, share) for share in of_phase.values()):
        return StepPhase.UNKNOWN, None
    sites = {site: share for (each, site), share in excess.items() if each is phase}
    return phase, max(sites, key=lambda site: sites[site])


def is_without_core(slow: Sequence[LookedRank], others: Sequence[LookedRank]) -> bool:
    """Whether slow ranks do not work more than the others, but are longer ready to run without a core."""
    known = [each for each in (*slow, *others) if each.late is not None and each.ran]
    if len(known) < len(slow) + len(others):
        return False

    def median_of(ranks: Sequence[LookedRank]) -> tuple[float, float]:
        return statistics.median(each.late or 0.0 for each in ranks), statistics.median(
            each.ran or 0.0 for each in ranks
        )

    (late, ran), (usual_late, usual_ran) = median_of(slow), median_of(others)
    gap = min(each.waited for each in others) - max(each.waited for each in slow)
    return late - usual_late > MOST_OF_IT * gap and ran < AS_MUCH * usual_ran


def uneven_stages(ranks: Sequence[LookedRank]) -> tuple[Imbalance, ...]:
    """Return the stage whose ranks all wait less than those of every other stage: its layers take longer."""
    stages: dict[int, list[LookedRank]] = defaultdict(list)
    for each in ranks:
        if each.stage is not None and not each.is_uneven:
            stages[each.stage].append(each)
    if len(stages) < 2:
        return ()
    means = {stage: _mean_waits(group) for stage, group in stages.items()}
    busiest = min(means, key=lambda stage: statistics.fmean(each.waited for each in stages[stage]))
    pairs = [compare(means[busiest], waits, len(stages)) for stage, waits in means.items() if stage != busiest]
    if min(pair.least for pair in pairs) <= LEAST_SHARE:
        return ()
    closest = min(pairs, key=lambda pair: pair.mean)
    cost = Cost(None, None, None, closest.mean, closest.least, min(1.0, closest.most))
    members = tuple(sorted(each.rank for each in stages[busiest]))
    return (Imbalance(members, f"stage {busiest} has more work than the others", cost),)


def _mean_waits(group: Sequence[LookedRank]) -> tuple[float | None, ...]:
    """Return the mean of the ranks in each segment in which one of them was seen."""
    segments = zip_longest(*(each.waits for each in group))
    known = ([share for share in segment if share is not None] for segment in segments)
    return tuple(statistics.fmean(shares) if shares else None for shares in known)


def compare(less: Sequence[float | None], more: Sequence[float | None], num_candidates: int) -> WaitGap:
    """Return how much longer the second waits than the first. Any of `num_candidates` could have been the first.

    Only segments in which both were seen count.
    """
    pairs = zip(less, more, strict=False)
    differences = [after - before for before, after in pairs if before is not None and after is not None]
    if len(differences) < LEAST_SEGMENTS:
        return WaitGap(0.0, -1.0, 1.0, 1.0)
    mean, noise = statistics.fmean(differences), spread(differences)
    half = student(ALPHA / num_candidates, len(differences) - 1) * noise / math.sqrt(len(differences))
    return WaitGap(mean, mean - half, mean + half, noise)


def spread(values: Sequence[float]) -> float:
    """Return the standard deviation, larger where neighbours are alike: segments inside one long step are not
    independent."""
    deviation = statistics.stdev(values)
    if not deviation:
        return 0.0
    mean = statistics.fmean(values)
    together = sum((before - mean) * (after - mean) for before, after in pairwise(values))
    alike = min(MOSTLY_ALIKE, max(0.0, together / sum((value - mean) ** 2 for value in values)))
    return deviation * math.sqrt((1 + alike) / (1 - alike))


def seconds_needed(group: Sequence[LookedRank], seconds: float) -> float:
    """Return how long to look at this group to find a rank that costs WANTED_SHARE of a step, four times of five.

    The noise is that of these looks: of the counts alone, which are binomial, or of the segments if that is more.
    """
    segments = min(each.num_segments for each in group)
    counts = [2 * each.waited * (1 - each.waited) * segments / each.num_looks for each in group]
    least = min(group, key=lambda each: each.waited)
    noises = [compare(least.waits, other.waits, len(group)).noise for other in group if other is not least]
    noise = max(statistics.median(noises), math.sqrt(statistics.median(counts)))
    quantiles = student(ALPHA / len(group), segments - 1) + statistics.NormalDist().inv_cdf(POWER)
    needed = max(LEAST_SEGMENTS, math.ceil((quantiles * noise / (WANTED_SHARE - LEAST_SHARE)) ** 2))
    return seconds / segments * needed


def student(tail: float, freedom: int) -> float:
    """Return the quantile of Student's distribution that is exceeded with a probability of `tail` (Hill's expansion in
    powers of 1 / freedom; good to 1 % from 5 degrees of freedom on)."""
    z = statistics.NormalDist().inv_cdf(1 - tail)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    fourth = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160
    return z + first / freedom + second / freedom**2 + third / freedom**3 + fourth / freedom**4

"""Which ranks take longer to send the same: groups, or pairs of ranks, next to others that do what they do.

A busy machine makes single messages late, on any link. A slow link makes them late in all steps: in three of four they
last longer together than in three of four steps of any other. Single ones may not, as they were not needed before.

A host that is busy all the time does that too: the threads that send wait for a core as the rank's own thread does. So
a link is slow only if its messages cost clearly more than each of its ranks was kept from a core, or if they are never
fast: a thread gets its core at once now and then, and a cable with too low a rate never is faster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, quantiles

from bigsci_launch.slow.chance import is_surely_above
from bigsci_launch.slow.job import PlayedJob
from bigsci_launch.slow.timeline import Doing, TimelinePiece
from bigsci_launch.topology.naming import name_ranks

LinkEnds = tuple[int, ...]
Use = tuple[tuple[int | None, ...], str]
"""What a link is used for: the stages of its ranks, the call and the size."""
Messages = Sequence[tuple[int, float]]
"""Of one link: the step and the seconds of each."""
MIN_STEPS, MANY_STEPS = 4, 10
MAX_LINKS = 4
"""Links whose steps are played again."""
BEYOND_HOST = 1.5


@dataclass(frozen=True, slots=True)
class SlowLink:
    """Ranks whose messages are slow, and what each step would have gained, had they been as fast as others.

    `is_always`: even their fastest step is slower than nine of ten steps of any other.
    """

    ranks: LinkEnds
    gains: list[float]
    site: str | None
    is_always: bool


def find_links(job: PlayedJob) -> list[SlowLink]:
    """Return links that are slower than others of the same use, the slowest first."""
    uses = _uses(job)
    usual = _usual_seconds(uses)
    more: dict[LinkEnds, dict[int, float]] = {}
    for piece, seconds in _transfers(job):
        ranks = _ends(piece)
        if (normal := usual.get((ranks, _use(job, piece)))) is not None:
            steps = more.setdefault(ranks, dict.fromkeys(job.numbers, 0.0))
            steps[piece.step] += (seconds - normal) / len(ranks)
    slow = [ranks for ranks, steps in more.items() if is_surely_above(list(steps.values()), 0.0)]
    slow.sort(key=lambda ranks: -fmean(more[ranks].values()))
    return [
        SlowLink(ranks, job.gains(_as_usual(job, ranks, usual)), _site(job, ranks), _is_always_late(uses, ranks))
        for ranks in slow[:MAX_LINKS]
    ]


def doubt_of(job: PlayedJob, link: SlowLink, nodes: Mapping[int, str]) -> str | None:
    """Return why late messages show no slow link; None if they do."""
    late, homes = fmean(link.gains), {nodes.get(rank) for rank in link.ranks}
    kept = [(job.without(rank), rank) for rank in link.ranks]
    known = [(seconds, rank) for seconds, rank in kept if seconds is not None]
    longest, rank = max(known, default=(0.0, 0))
    if len(homes) == 1 and None not in homes:
        why = f"no link is between them, as all are on {homes.pop()}"
    elif len(known) < len(kept):
        why = "for how long they were kept from a CPU is not known"
    elif late <= BEYOND_HOST * longest and not link.is_always:
        why = f"rank {rank} was kept from a CPU for {longest * 1e3:.3g} ms of a step"
    else:
        return None
    return f"why messages between {name_ranks(link.ranks)} cost {late * 1e3:.3g} ms of a step: {why}"


def _transfers(job: PlayedJob) -> Iterator[tuple[TimelinePiece, float]]:
    for rank in job.lanes:
        for _, piece, seconds in job.transfers(rank):
            yield piece, seconds


def _ends(piece: TimelinePiece) -> LinkEnds:
    return tuple(sorted(piece.needs))


def _use(job: PlayedJob, piece: TimelinePiece) -> Use:
    return tuple(job.places[rank].stage for rank in _ends(piece)), piece.size


def _uses(job: PlayedJob) -> dict[Use, dict[LinkEnds, list[tuple[int, float]]]]:
    """Return {use: {ranks: (step, seconds) of each transfer}}."""
    found: dict[Use, dict[LinkEnds, list[tuple[int, float]]]] = {}
    for piece, seconds in _transfers(job):
        found.setdefault(_use(job, piece), {}).setdefault(_ends(piece), []).append((piece.step, seconds))
    return found


def _usual_seconds(uses: Mapping[Use, Mapping[LinkEnds, Messages]]) -> dict[tuple[LinkEnds, Use], float]:
    """Return {(slow ranks, use): how long it takes others}."""
    usual: dict[tuple[LinkEnds, Use], float] = {}
    for use, links in uses.items():
        for ranks, own in links.items():
            others = [theirs for other, theirs in links.items() if other != ranks]
            if others and all(_are_longer(own, theirs) for theirs in others):
                usual[ranks, use] = median(seconds for theirs in others for _, seconds in theirs)
    return usual


def _are_longer(own: Messages, others: Messages) -> bool:
    """Whether messages last longer than others: three of four of their steps than three of four."""
    mine, theirs = _sums(own), _sums(others)
    return min(len(mine), len(theirs)) >= MIN_STEPS and quantiles(mine)[0] > quantiles(theirs)[2]


def _is_always_late(uses: Mapping[Use, Mapping[LinkEnds, Messages]], ranks: LinkEnds) -> bool:
    """Whether messages of one use are, in each step, slower than in nine of ten steps of any other link."""
    return any(
        len(links) > 1
        and all(_are_never_faster(links[ranks], theirs) for other, theirs in links.items() if other != ranks)
        for links in uses.values()
        if ranks in links
    )


def _are_never_faster(own: Messages, others: Messages) -> bool:
    mine, theirs = _sums(own), _sums(others)
    return min(len(mine), len(theirs)) >= MANY_STEPS and min(mine) > quantiles(theirs, n=10)[-1]


def _sums(messages: Messages) -> list[float]:
    found: dict[int, float] = {}
    for step, seconds in messages:
        found[step] = found.get(step, 0.0) + seconds
    return list(found.values())


def _as_usual(job: PlayedJob, ranks: LinkEnds, usual: dict[tuple[LinkEnds, Use], float]) -> dict[int, list[float]]:
    """Return the seconds of the pieces of ranks, had their messages to each other lasted as long as usual."""
    found = {rank: list(job.lanes[rank].seconds) for rank in ranks if rank in job.lanes}
    for rank, seconds in found.items():
        for at, piece, lasted in job.transfers(rank):
            if _ends(piece) == ranks:
                seconds[at] = min(lasted, usual.get((ranks, _use(job, piece)), lasted))
    return found


def _site(job: PlayedJob, ranks: LinkEnds) -> str | None:
    pieces = (piece for rank in ranks if rank in job.lanes for piece in job.lanes[rank].timeline.pieces)
    sites = Counter(piece.site for piece in pieces if piece.doing is Doing.WAIT and _ends(piece) == ranks)
    return sites.most_common(1)[0][0] if sites else None

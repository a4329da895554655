"""Ranks about which only a number is known: how many collectives they have launched, or finished, as NCCL counts them.

Numbers show who is behind, and neither where a rank is nor whether it waits: no rank is accused, and no class is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from bigsci_launch.spy.evidence.ranks import Evidence, RankEvidence
from bigsci_launch.spy.judge.case import JobCase
from bigsci_launch.spy.judge.conclusion import Conclusion, Pointer, Reason, Side, Strength
from bigsci_launch.spy.judge.facts import is_only_counted
from bigsci_launch.spy.taxonomy import State
from bigsci_launch.topology.naming import agree, count_ranks

MAX_SIDES = 3
MAX_OTHER_OPERATIONS = 3
SAME_AGAIN = "whether the numbers still rise: they differ for a moment in a healthy job, too"
ORDER = "the order of the collectives, and which of them have ended: numbers do not show it"
ASK_AGAIN = "ncclras -v  # again in 10 s: a number that no longer rises belongs to a rank that is stuck"


@dataclass(frozen=True, slots=True)
class CountSide:
    """Ranks of a group with the same number; `ranks` are those of them that are known, of `many`."""

    number: int
    many: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CountSplit:
    """An operation of a group whose ranks have different numbers, the smallest side first."""

    group: str
    operation: str
    verb: str
    sides: tuple[CountSide, ...]

    @property
    def many(self) -> int:
        """How many ranks of the group are counted."""
        return sum(side.many for side in self.sides)

    @property
    def order(self) -> tuple[float, int, str, str]:
        """The most telling first: few ranks against many."""
        return (self.sides[0].many / self.many, -self.many, self.group, self.operation)


def counts_differ(case: JobCase) -> Conclusion | None:
    """Only numbers of collectives are known, and they differ between ranks, or a rank does not answer."""
    counted = _counted(case)
    splits = sorted(find_splits(counted), key=lambda split: split.order)
    silent = [seen.rank for seen in case.alive if seen.samples and not is_only_counted(seen)]
    if not counted or not (splits or silent):
        return None
    evidence = case.evidence
    claims = [_silent_text(case, silent)] if silent else []
    claims += [_split_text(evidence, split) for split in splits[:1]]
    found = Conclusion(
        state=State.HANG,
        claim="; ".join(claims),
        strength=Strength.GUESS,
        sides=_sides(evidence, splits[:1]),
        evidence=(
            *(f"these are the {split.many} ranks of NCCL's communicator {split.group}" for split in splits[:1]),
            *(_split_text(evidence, split) for split in splits[1 : MAX_OTHER_OPERATIONS + 1]),
        ),
        missing=(*((SAME_AGAIN,) if splits else ()), ORDER),
        next=(ASK_AGAIN,),
        look_first=(*_silent_pointers(case, silent), *_split_pointers(splits[:1])),
    )
    return found if case.was_seen_twice else replace(found, state=State.UNKNOWN, if_hang=found)


def counts_alike(case: JobCase) -> Conclusion | None:
    """Only numbers of collectives are known, and they are the same on all ranks."""
    counted = _counted(case)
    if len(counted) < 2 or len(counted) < len(case.alive) or any(find_splits(counted)):
        return None
    verbs = {seen.recorder.counts.verb for seen in counted if seen.recorder and seen.recorder.counts}
    return Conclusion(
        state=State.UNKNOWN,
        claim=f"all {count_ranks(counted)} have {' or '.join(sorted(verbs))} the same number of collectives in each of "
        "their groups: the numbers do not show what they wait for",
        strength=Strength.NOTHING,
        missing=(SAME_AGAIN, ORDER),
        next=(ASK_AGAIN,),
    )


def _counted(case: JobCase) -> list[RankEvidence]:
    """The ranks about which only numbers are known; none if more is known about any rank."""
    counted = [seen for seen in case.alive if is_only_counted(seen)]
    is_all = all(is_only_counted(seen) or not (seen.threads or seen.recorder) for seen in case.alive)
    return counted if is_all else []


def find_splits(counted: Sequence[RankEvidence]) -> Iterator[CountSplit]:
    """Yield every operation of a group whose ranks have different numbers."""
    named: dict[tuple[str, str, str], dict[int, list[int]]] = {}
    unnamed: dict[tuple[str, str, str], dict[int, int]] = {}
    for seen in counted:
        counts = seen.recorder.counts if seen.recorder else None
        if counts is None:
            continue
        for group, numbers in counts.of_rank.items():
            for operation, number in numbers.items():
                named.setdefault((group, operation, counts.verb), {}).setdefault(number, []).append(seen.rank)
        for group, tallies in counts.of_others.items():
            for operation, tally in tallies.items():
                unnamed.setdefault((group, operation, counts.verb), dict(tally))
    for (group, operation, verb), more in ((key, unnamed.get(key, {})) for key in {**named, **unnamed}):
        by_number = named.get((group, operation, verb), {})
        sides = [
            CountSide(number, len(ranks) + more.get(number, 0), tuple(ranks))
            for number, ranks in {**dict.fromkeys(more, ()), **by_number}.items()
        ]
        if len(sides) > 1:
            in_order = sorted(sides, key=lambda side: (side.many, side.number))
            yield CountSplit(group, operation, verb, tuple(in_order))


def _silent_text(case: JobCase, silent: Sequence[int]) -> str:
    """`rank 21 (n3): it does not answer NCCL's RAS`."""
    reasons: dict[str, list[int]] = {}
    for rank in silent:
        reasons.setdefault(case.by_rank[rank].why_unreadable or "it does not answer", []).append(rank)
    names = case.evidence.names
    texts = [
        f"{names(ranks) if len(ranks) > 1 else case.evidence.name(ranks[0])}: {why}" for why, ranks in reasons.items()
    ]
    return "; ".join(texts[:MAX_SIDES])


def _split_text(evidence: Evidence, split: CountSplit) -> str:
    """`rank 1 (n1) has launched 100 all_reduces, and 3 others 101`."""
    first, *others = split.sides
    several = _count_text(split.operation, first.number, split.verb)
    ranks = range(first.many)
    text = f"{_side_text(evidence, first)} {agree('has', ranks)} {split.verb} {several}"
    up_to = "up to number " if split.verb == "finished" else ""
    rest = [f"{_side_text(evidence, side)} {up_to}{side.number}" for side in others[:-1][: MAX_SIDES - 2]]
    left = len(others) - 1 - len(rest)
    rest += [f"{left} more numbers between"] if left > 0 else []
    rest.append(f"and {others[-1].many} other{'' if others[-1].many == 1 else 's'} {up_to}{others[-1].number}")
    return f"{text}, {', '.join(rest)}"


def _count_text(operation: str, number: int, verb: str) -> str:
    if verb == "finished":
        return f"{operation} up to number {number}"
    return f"{number or 'no'} {operation}{'' if number == 1 else 's'}"


def _side_text(evidence: Evidence, side: CountSide) -> str:
    if not side.ranks or len(side.ranks) < side.many:
        return f"{side.many} {'rank' if side.many == 1 else 'ranks'}"
    return evidence.name(side.ranks[0]) if len(side.ranks) == 1 else evidence.names(side.ranks)


def _sides(evidence: Evidence, splits: Sequence[CountSplit]) -> tuple[Side, ...]:
    return tuple(
        Side(side.ranks, f"{split.verb} {_count_text(split.operation, side.number, split.verb)} of group {split.group}")
        for split in splits
        for side in split.sides
        if side.ranks
    )


def _silent_pointers(case: JobCase, silent: Sequence[int]) -> Iterator[Pointer]:
    for rank in silent:
        why = case.by_rank[rank].why_unreadable or "it does not answer"
        yield Pointer(rank, why, Reason.NOT_READ)


def _split_pointers(splits: Sequence[CountSplit]) -> Iterator[Pointer]:
    for split in splits:
        first, last = split.sides[0], split.sides[-1]
        others = f"{last.many} other{' has' if last.many == 1 else 's have'}"
        for rank in first.ranks:
            did = _count_text(split.operation, first.number, split.verb)
            yield Pointer(rank, f"it has {split.verb} {did}, {others} {last.number}", Reason.COUNTED)

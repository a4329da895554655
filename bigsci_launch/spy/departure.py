"""Which rank left the common schedule: against its own past, and against ranks with the same part.

Both need the recorder. A rank's collectives repeat from step to step: what always followed the same collectives before,
and does not now, is a surprise. Ranks of the same pipeline stage issue the same collectives: the one that differs from
most is odd. What most peers did alike (a checkpoint, an evaluation) is no departure, and where most ranks surprise
their past while one does not, nobody is accused: both sides are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from bigsci_launch.spy.evidence import Evidence, RankEvidence
from bigsci_launch.spy.groups import group_kind
from bigsci_launch.spy.recorder import Token
from bigsci_launch.spy.waits import recorded_members

CONTEXTS = (256, 96, 32, 8)
"""So many collectives before one are compared with the past, the longest first."""
MIN_TIMES = 2
"""A context that came less often tells nothing."""
RECENT = 400
LOOK_AHEAD = 64
MAX_PLACES = 32
_BASE, _PRIME = 1_000_003, (1 << 61) - 1
_POWERS = {length: pow(_BASE, length, _PRIME) for length in CONTEXTS}
Kind = tuple[str, str, str, str]
"""A collective as other ranks know it: what the group is, operation, sizes, types."""


@dataclass(frozen=True, slots=True)
class Departure:
    """At `position` of its stream a rank did `did` where `expected` was due. `form`: skip, extra or other.

    `expected_group` and `did_group` are torch's names of the rank's own groups, where it has used such a one.
    """

    rank: int
    position: int
    expected: Kind
    did: Kind
    form: str
    expected_group: str | None = None
    did_group: str | None = None


@dataclass(frozen=True, slots=True)
class Departures:
    """Departures from a rank's own past, and from its peers, by rank. `compared` could be judged in either way."""

    from_past: Mapping[int, Departure]
    from_peers: Mapping[int, Departure]
    compared: frozenset[int]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({*self.from_past, *self.from_peers}))

    def of(self, rank: int) -> Departure:
        return self.from_past.get(rank) or self.from_peers[rank]


def find_departures(evidence: Evidence) -> Departures:
    """Every departure that the recorders show."""
    streams = {seen.rank: kinds_of(seen, evidence) for seen in evidence.ranks if seen.recorder and seen.recorder.stream}
    firsts = {seen.rank: seen.recorder.first_record for seen in evidence.ranks if seen.recorder}
    groups = peer_groups(streams, evidence)
    surprises = {rank: find_surprises(rank, stream) for rank, stream in streams.items()}
    views = [PeerView(group, streams, firsts) for group in groups]
    past = [found for view in views for rank in view.group for found in view.unusual(surprises[rank])[-1:]]
    peers = [found for view in views for found in view.odd_ones() if not view.is_due_to_others(found, surprises)]
    return Departures(
        from_past={found.rank: _with_groups(found, streams, evidence) for found in past},
        from_peers={found.rank: _with_groups(found, streams, evidence) for found in peers},
        compared=frozenset(streams),
    )


def _with_groups(departure: Departure, streams: Mapping[int, Sequence[Kind]], evidence: Evidence) -> Departure:
    """`departure` with the names of the rank's own groups."""
    recorder = next(seen.recorder for seen in evidence.ranks if seen.rank == departure.rank)
    stream = streams[departure.rank]
    assert recorder is not None
    groups = {kind: recorder.tokens[index].group for kind, index in zip(stream, recorder.stream, strict=True)}
    return replace(departure, expected_group=groups.get(departure.expected), did_group=groups.get(departure.did))


def kinds_of(seen: RankEvidence, evidence: Evidence) -> list[Kind]:
    """The collectives of a rank as other ranks know them, oldest first."""
    assert seen.recorder is not None
    kinds = [_kind(token, seen, evidence) for token in seen.recorder.tokens]
    return [kinds[index] for index in seen.recorder.stream]


def _kind(token: Token, seen: RankEvidence, evidence: Evidence) -> Kind:
    members = recorded_members(seen, token.group, evidence) or ()
    what = group_kind(members, evidence.world_size, evidence.topology) or f"{len(members)} ranks"
    if evidence.topology is None and what != "world":
        # Groups of one size can still be two kinds; torch numbers them in the order in which a rank made them.
        mine = [group for group in seen.recorder.last_sequence if group != token.group] if seen.recorder else []
        what += f" #{sum(_order(group) < _order(token.group) for group in mine)}"
    return (what, *token.shape)


def _order(group: str) -> tuple[int, str]:
    return (int(group), "") if group.isdigit() else (1 << 60, group)


def peer_groups(ranks: Iterable[int], evidence: Evidence) -> list[tuple[int, ...]]:
    """Ranks that should issue the same collectives: those of one pipeline stage; without a topology, all."""
    stages: dict[int, list[int]] = {}
    for rank in ranks:
        coordinate = evidence.coordinate(rank)
        stages.setdefault(coordinate.pp_rank if coordinate else -1, []).append(rank)
    return [tuple(sorted(group)) for group in stages.values()]


def find_surprises(rank: int, stream: Sequence[Kind]) -> list[Departure]:
    """Where a rank did what it never did after the same collectives, before or since, the newest last.

    The longest run of collectives before it that came twice or more decides: within a row of equal collectives only a
    long one tells the last but one from the last. Only what happened shortly before the end counts.
    """
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(stream), start=1)}
    ids = [numbers[kind] for kind in stream]
    hashes = _prefix_hashes(ids)
    followers: list[dict[int, list[int]]] = [{} for _ in CONTEXTS]
    found: list[tuple[Departure, list[int]]] = []
    for at, number in enumerate(ids):
        decided = False
        for length, seen in zip(CONTEXTS, followers, strict=True):
            if at < length:
                continue
            places = seen.setdefault((hashes[at] - hashes[at - length] * _POWERS[length]) % _PRIME, [])
            if len(places) >= MIN_TIMES and not decided:
                decided = True
                if at >= len(ids) - RECENT and all(ids[place] != number for place in places):
                    due = [stream[place : place + LOOK_AHEAD] for place in places[-MAX_PLACES:]]
                    found.append((_departure(rank, at, due, stream[at:]), places))
            places.append(at)
    # What was new once and came again is part of the schedule: a check every few steps.
    return [each for each, places in found if sum(ids[place] == ids[each.position] for place in places) == 1]


def _prefix_hashes(ids: Sequence[int]) -> list[int]:
    hashes = [0]
    for number in ids:
        hashes.append((hashes[-1] * _BASE + number) % _PRIME)
    return hashes


def _departure(rank: int, position: int, due: Sequence[Sequence[Kind]], did: Sequence[Kind]) -> Departure:
    """`due` are ways in which it went on at other times, the newest last; `did` is what came at `position`."""
    for expected in reversed(due):
        if _agree(did, expected[1:]):
            return Departure(rank, position, expected[0], did[0], "skip")
    for expected in reversed(due):
        if len(did) > 1 and _agree(did[1:], expected):
            return Departure(rank, position, expected[0], did[0], "extra")
    return Departure(rank, position, due[-1][0], did[0], "other")


def _agree(did: Sequence[Kind], due: Sequence[Kind]) -> bool:
    shared = min(len(did), len(due))
    return shared > 0 and list(did[:shared]) == list(due[:shared])


class PeerView:
    """Ranks with the same part, side by side. Peers issue equal numbers of collectives: equal record numbers are equal
    places of the schedule."""

    def __init__(self, group: Sequence[int], streams: Mapping[int, Sequence[Kind]], firsts: Mapping[int, int]) -> None:
        self.group = group
        self._streams = streams
        self._firsts = firsts

    def _did(self, rank: int, record: int) -> Kind | None:
        """What `rank` did as its collective number `record`; None where that has not happened or has left the ring."""
        at = record - self._firsts[rank]
        return self._streams[rank][at] if 0 <= at < len(self._streams[rank]) else None

    def unusual(self, surprises: Sequence[Departure]) -> list[Departure]:
        """Those of one rank's surprises that most of its peers do not share."""
        return [found for found in surprises if not self._is_usual(found)]

    def _is_usual(self, found: Departure) -> bool:
        record = found.position + self._firsts[found.rank]
        others = [self._did(rank, record) for rank in self.group if rank != found.rank]
        alike = sum(kind == found.did for kind in others)
        return alike > 0 and alike >= sum(kind == found.expected for kind in others)

    def is_due_to_others(self, found: Departure, surprises: Mapping[int, Sequence[Departure]]) -> bool:
        """Whether it was the peers who surprised their past there, and not the one that differs from them."""
        record = found.position + self._firsts[found.rank]
        surprised = [
            rank for rank in self.group if any(each.position + self._firsts[rank] == record for each in surprises[rank])
        ]
        return bool(surprised) and found.rank not in surprised

    def odd_ones(self) -> list[Departure]:
        """Members that differ from most others at the same place.

        Where the first common place differs already, places are not equal, and nobody is odd; where no majority
        exists, nobody is either.
        """
        start = record = max(self._firsts[rank] for rank in self.group)
        together = [rank for rank in self.group if self._did(rank, record) is not None]
        found: list[Departure] = []
        while len(together) > 1:
            kinds: dict[Kind, list[int]] = {}
            for rank in together:
                if (kind := self._did(rank, record)) is not None:
                    kinds.setdefault(kind, []).append(rank)
            most = max(kinds.values(), key=len, default=[])
            others = [rank for members in kinds.values() if members is not most for rank in members]
            if others and (record == start or len(most) <= len(others)):
                return []
            found += [self._differs(rank, most, record) for rank in others]
            together = most
            record += 1
        return found

    def _differs(self, rank: int, most: Sequence[int], record: int) -> Departure:
        model = max(most, key=lambda other: len(self._streams[other]) + self._firsts[other])
        due, did = (self._streams[each][record - self._firsts[each] :] for each in (model, rank))
        return _departure(rank, record - self._firsts[rank], [due[:LOOK_AHEAD]], did)

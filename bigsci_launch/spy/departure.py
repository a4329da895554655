"""Which rank left the common schedule: against its own past first, then against ranks with the same part.

Both need the recorder. A rank's collectives repeat from step to step: the first that differs from the step before is a
departure. Ranks of the same pipeline stage issue the same collectives: the one that differs from most is a departure
too. What all of them did alike (a checkpoint, an evaluation) is none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from bigsci_launch.spy.evidence import Evidence, RankEvidence
from bigsci_launch.spy.groups import group_kind
from bigsci_launch.spy.recorder import Token
from bigsci_launch.spy.waits import recorded_members

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
    peers = [
        departure for group in peer_groups(streams, evidence) for departure in depart_from_peers(group, streams, firsts)
    ]
    own = {rank: departure for rank, stream in streams.items() if (departure := depart_from_past(rank, stream))}
    alike = {rank for rank in own if _all_did_alike(rank, own, streams, evidence)}
    return Departures(
        from_past={rank: _with_groups(own[rank], streams, evidence) for rank in own if rank not in alike},
        from_peers={departure.rank: _with_groups(departure, streams, evidence) for departure in peers},
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


def depart_from_past(rank: int, stream: Sequence[Kind]) -> Departure | None:
    """The first collective that differs from the step before, once two steps in a row were equal."""
    for anchor in _by_rarity(stream):
        found = _repeated_step(stream, anchor)
        if found is not None:
            base, period = found
            differing = (at for at in range(base, len(stream)) if stream[at] != stream[at - period])
            position = next(differing, None)
            if position is None:
                return None
            return _departure(rank, position, stream[position - period : position], stream[position:])
    return None


def _by_rarity(stream: Sequence[Kind]) -> list[Kind]:
    """Kinds that came three times or more, rarest first: what happens once a step finds the step."""
    counts = Counter(stream)
    return sorted((kind for kind, count in counts.items() if count >= 3), key=lambda kind: counts[kind])


def _repeated_step(stream: Sequence[Kind], anchor: Kind) -> tuple[int, int] | None:
    """(position, period): the `period` entries before `position` equal those before them, the newest such place."""
    places = [at for at, kind in enumerate(stream) if kind == anchor]
    for before, here in zip(reversed(places[:-1]), reversed(places[1:]), strict=True):
        period = here - before
        if before >= period and stream[before - period : before] == stream[before:here]:
            return here, period
    return None


def _departure(rank: int, position: int, due: Sequence[Kind], did: Sequence[Kind]) -> Departure:
    """`due` are the collectives that should have come at `position`, `did` those that came."""
    form = "other"
    if _agree(did, due[1:]):
        form = "skip"
    elif len(did) > 1 and _agree(did[1:], due):
        form = "extra"
    return Departure(rank, position, due[0], did[0], form)


def _agree(did: Sequence[Kind], due: Sequence[Kind]) -> bool:
    shared = min(len(did), len(due))
    return shared > 0 and list(did[:shared]) == list(due[:shared])


def depart_from_peers(
    group: Sequence[int], streams: Mapping[int, Sequence[Kind]], firsts: Mapping[int, int]
) -> list[Departure]:
    """Members of `group` that differ from most others at the same place of their streams.

    Peers issue equal numbers of collectives, so equal record numbers are equal places. Where the first common place
    differs already, that does not hold, and nobody is accused; where no majority exists, nobody is either.
    """
    start = max(firsts[rank] for rank in group)
    offsets = {rank: start - firsts[rank] for rank in group}
    together = [rank for rank in group if offsets[rank] < len(streams[rank])]
    found: list[Departure] = []
    step = 0
    while len(together) > 1:
        kinds: dict[Kind, list[int]] = {}
        for rank in together:
            if offsets[rank] + step < len(streams[rank]):
                kinds.setdefault(streams[rank][offsets[rank] + step], []).append(rank)
        if not kinds:
            break
        most = max(kinds.values(), key=len)
        others = [rank for members in kinds.values() if members is not most for rank in members]
        if others and (step == 0 or len(most) <= len(others)):
            return []
        model = max(most, key=lambda rank: len(streams[rank]))
        due = streams[model][offsets[model] + step :]
        found += [_departure(rank, offsets[rank] + step, due, streams[rank][offsets[rank] + step :]) for rank in others]
        together = most
        step += 1
    return found


def _all_did_alike(
    rank: int, own: Mapping[int, Departure], streams: Mapping[int, Sequence[Kind]], evidence: Evidence
) -> bool:
    """Whether every peer of `rank` left its past in the same way, or has not come to that place yet."""
    departure = own[rank]
    group = next(group for group in peer_groups(streams, evidence) if rank in group)
    others = [other for other in group if other != rank]
    alike = [other for other in others if other in own and own[other].did == departure.did]
    alike = [other for other in alike if own[other].expected == departure.expected]
    unlike = [other for other in others if other in own and other not in alike]
    went_on = [other for other in others if other not in own and len(streams[other]) > departure.position]
    return bool(alike) and not unlike and not went_on

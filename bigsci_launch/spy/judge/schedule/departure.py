"""Which rank left the common schedule, compared with its own past and with ranks that have the same part.

Both need the recorder. A rank's collectives repeat from step to step: it is a surprise if another collective follows
where the same one always did. Ranks of the same pipeline stage issue the same collectives: one that differs from most
is odd. What most peers did too (a checkpoint, an evaluation) is not a departure. If most ranks surprise their past
while one does not, no rank is accused, and both sides are shown.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple

from bigsci_launch.spy.evidence.calls.flight_recorder import Token
from bigsci_launch.spy.evidence.groups import scope_of
from bigsci_launch.spy.evidence.ranks import Evidence, RankEvidence
from bigsci_launch.spy.judge.schedule.sizes import ended_unevenly
from bigsci_launch.spy.judge.waits import SETUP_OPERATIONS, recorded_members

CONTEXTS = (256, 96, 32, 8, 4)
"""Lengths of context: how many collectives before one are compared with the past, the longest first."""
MIN_TIMES = 2
"""A context that occurred less often proves nothing."""
RECENT, LAST_ROWS = 400, 4
LOOK_AHEAD = 64
MAX_PLACES = 32


class Collective(NamedTuple):
    """A collective as other ranks know it: the scope of its group, or what is known of it (`4 ranks #1`), and what all
    members must agree on. It is a tuple because thousands of ranks compare thousands of them."""

    group: str
    operation: str
    sizes: str
    types: str


@dataclass(frozen=True, slots=True)
class Departure:
    """At `position` of its stream a rank issued `did` where `expected` was due. `form` is skip, extra or other.

    `expected_group` and `did_group` are torch's names for the rank's own groups, if it has used such groups.
    """

    rank: int
    position: int
    expected: Collective
    did: Collective
    form: str
    expected_group: str | None = None
    did_group: str | None = None


@dataclass(frozen=True, slots=True)
class Departures:
    """Departures from a rank's own past, and from its peers, by rank. `compared` are the ranks with a recorder.

    `surprised` ranks did what they had never done at this point, whether or not their peers did so too. Where none did,
    `unlike_once` are those that did otherwise than the only time before: no past to accuse by, but one to look by.
    """

    from_past: Mapping[int, Departure]
    from_peers: Mapping[int, Departure]
    compared: frozenset[int]
    surprised: frozenset[int] = frozenset()
    unlike_once: frozenset[int] = frozenset()

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({*self.from_past, *self.from_peers}))

    def of(self, rank: int) -> Departure:
        return self.from_past.get(rank) or self.from_peers[rank]


def find_departures(evidence: Evidence) -> Departures:
    """Return every departure that the recorders show."""
    known: dict[Collective, Collective] = {}  # equal ones share one object: they are compared millions of times
    streams = {
        seen.rank: collectives_of(seen, evidence, known)
        for seen in evidence.ranks
        if seen.recorder and seen.recorder.stream
    }
    firsts = {seen.rank: seen.recorder.first_record for seen in evidence.ranks if seen.recorder}
    surprises = {rank: find_surprises(rank, stream, is_whole=firsts[rank] == 0) for rank, stream in streams.items()}
    groups = peer_groups([seen.rank for seen in evidence.ranks], evidence)
    views = [PeerView(group, streams, firsts) for group in groups if not streams.keys().isdisjoint(group)]
    past = [found for view in views for rank in view.group for found in view.unusual(surprises[rank])[-1:]]
    peers = [found for view in views for found in view.odd_ones() if not view.is_due_to_others(found, surprises)]
    differs = partial(_differs_in_kind, evidence=evidence)
    surprised = frozenset(rank for rank, found in surprises.items() if found)
    rare = () if surprised else streams
    return Departures(
        from_past={found.rank: _with_groups(found, streams, evidence) for found in filter(differs, past)},
        from_peers={found.rank: _with_groups(found, streams, evidence) for found in filter(differs, peers)},
        compared=frozenset(streams),
        surprised=surprised,
        unlike_once=frozenset(rank for rank in rare if firsts[rank] == 0 and _is_unlike_once(rank, streams)),
    )


def _is_unlike_once(rank: int, streams: Mapping[int, Sequence[Collective]]) -> bool:
    """Whether one of the last rows of equal collectives has another length than the only one before it, and not every
    rank did the same there. The stream begins with the rank's first collective: else there may have been other rows."""
    stream = streams[rank]
    places = {at for at, _ in _broken_rows(stream, _text_of(stream), is_whole=True, least=1)}
    return any(other[at : at + 1] != stream[at : at + 1] for at in places for other in streams.values())


def _differs_in_kind(found: Departure, evidence: Evidence) -> bool:
    """Whether the rank departed by more than a size that may differ from rank to rank."""
    if found.did._replace(sizes="") != found.expected._replace(sizes=""):
        return True
    recorders = {seen.rank: seen.recorder for seen in evidence.ranks if seen.recorder}
    call = recorders[found.rank].call(found.position)
    return not ended_unevenly(recorders.values(), found.did.operation, (call.token.group, call.sequence))


def _with_groups(departure: Departure, streams: Mapping[int, Sequence[Collective]], evidence: Evidence) -> Departure:
    """`departure` with the names of the rank's own groups."""
    recorder = next(seen.recorder for seen in evidence.ranks if seen.rank == departure.rank)
    stream = streams[departure.rank]
    assert recorder is not None
    # The stream may end with a call that no recorder lists.
    groups = {each: recorder.tokens[index].group for each, index in zip(stream, recorder.stream, strict=False)}
    return replace(departure, expected_group=groups.get(departure.expected), did_group=groups.get(departure.did))


def collectives_of(seen: RankEvidence, evidence: Evidence, known: dict[Collective, Collective]) -> list[Collective]:
    """Return the collectives of a rank as other ranks know them, oldest first.

    The recorder does not list the creation of a group: a rank that is in it reached it after everything recorded.
    """
    assert seen.recorder is not None
    found = (_collective(token, seen, evidence) for token in seen.recorder.tokens)
    of_tokens = [known.setdefault(each, each) for each in found]
    stream = [of_tokens[index] for index in seen.recorder.stream]
    operation = seen.thread.operation if seen.thread else None
    if operation not in SETUP_OPERATIONS:
        return stream
    setup = Collective("world", operation, "", "")
    return [*stream, known.setdefault(setup, setup)]


def _collective(token: Token, seen: RankEvidence, evidence: Evidence) -> Collective:
    members = recorded_members(seen, token.group, evidence) or ()
    what = scope_of(members, evidence.world_size, evidence.topology) or f"{len(members)} ranks"
    if evidence.topology is None and what != "world":
        # Groups of one size may still differ; torch numbers them in the order in which a rank made them.
        mine = [group for group in seen.recorder.last_sequence if group != token.group] if seen.recorder else []
        what += f" #{sum(_order(group) < _order(token.group) for group in mine)}"
    return Collective(what, *token.shape)


def _order(group: str) -> tuple[int, str]:
    return (int(group), "") if group.isdigit() else (1 << 60, group)


def peer_groups(ranks: Iterable[int], evidence: Evidence) -> list[tuple[int, ...]]:
    """Group ranks that should issue the same collectives: those of one pipeline stage; without a topology, all."""
    kinds: dict[int, list[int]] = {}
    for rank in ranks:
        kind = evidence.topology.kind_of(rank) if evidence.topology and evidence.coordinate(rank) else -1
        kinds.setdefault(kind, []).append(rank)
    return [tuple(sorted(group)) for group in kinds.values()]


def find_surprises(rank: int, stream: Sequence[Collective], *, is_whole: bool = False) -> list[Departure]:
    """Find where a rank did what it never did after the same collectives, before or since; the newest is last.

    The longest context that occurred at least twice decides: within a run of equal collectives, only a long one tells
    the last but one from the last. Only what happened shortly before the end counts. `is_whole`: nothing came before.
    """
    text = _text_of(stream)
    found = []
    for at, length, places in _new_followers(text):
        due = [stream[place : place + LOOK_AHEAD] for place in places if place < at]
        departure = _departure(rank, at, due[-MAX_PLACES:], stream[at:])
        if _is_surprise_in_full(departure, length, stream, text):
            found.append(departure)
    rows = [_departure(rank, at, due, stream[at:]) for at, due in _broken_rows(stream, text, is_whole=is_whole)]
    return sorted((*found, *rows), key=lambda each: each.position)


def _text_of(stream: Sequence[Collective]) -> str:
    """A letter for each collective."""
    letters = {each: chr(number) for number, each in enumerate(dict.fromkeys(stream))}
    return "".join(letters[each] for each in stream)


def _broken_rows(
    stream: Sequence[Collective], text: str, *, is_whole: bool, least: int = MIN_TIMES
) -> Iterator[tuple[int, list[Sequence[Collective]]]]:
    """Yield (position, what followed there before) where one of the last rows of equal collectives has another length
    than all before it had, at least `least` of them: it ended too early, or went on."""
    ends = [match.span() for match in re.finditer(r"(.)\1*", text, re.DOTALL)]
    for number in range(max(0, len(ends) - LAST_ROWS), len(ends)):
        start, end = ends[number]
        past = [row for row in ends[0 if is_whole else 1 : number] if text[row[0]] == text[start]]
        lengths = {row_end - row_start for row_start, row_end in past}
        if len(past) < least or len(lengths) > 1:
            continue
        at = start + min(lengths.pop(), end - start)
        follows = {text[row_end] for _, row_end in past}
        ends_early = at == end < len(text) and end - start < past[0][1] - past[0][0] and text[end] in follows
        if ends_early or at < end:
            yield at, [stream[row_start + at - start :][:LOOK_AHEAD] for row_start, _ in past]


def _is_surprise_in_full(found: Departure, length: int, stream: Sequence[Collective], text: str) -> bool:
    """Whether it is still a surprise given the whole repetition that the `length` collectives before it belong to.

    Within a repetition, the last part looks like any other: only the way from where it began shows whether it is over.
    If no other repetition began like this, it has to be the whole schedule that repeats: a group that it does not hold
    may be what always follows at its end.
    """
    at = found.position
    start = _start_of_row(text, at, length)
    window = text[max(start, 0) : at]
    ends = _ends_of(window, text, at)
    if ends:
        return all(text[end] != text[at] for end in ends)
    groups = {each.group for each in stream[at - length : at]}
    return len(set(stream[at - length : at])) > 1 and (
        found.did.group in groups or found.did.operation in SETUP_OPERATIONS
    )


def is_as_before(stream: Sequence[int], position: int) -> bool:
    """Whether a rank has done the same after the same collectives before. `stream` has a number for each collective."""
    text = "".join(map(chr, stream[: position + 1]))
    for length in CONTEXTS:
        if position >= length:
            ends = _ends_of(text[position - length : position], text, position)
            if len(ends) >= MIN_TIMES:
                return any(text[end] == text[position] for end in ends)
    return False


def _ends_of(window: str, text: str, before: int) -> list[int]:
    """The positions in `text` right after each occurrence of `window` that ends before position `before`."""
    ends, start = [], text.find(window)
    while 0 <= start < before - len(window):
        ends.append(start + len(window))
        start = text.find(window, start + 1)
    return ends


def _start_of_row(text: str, at: int, length: int) -> int:
    """Where the repetition of equal parts that ends at `at` begins; -1 if the text does not reach back so far.

    Goes back at least `length` collectives; includes the one just before the repetition starts.
    """
    window = text[at - length : at]
    part = next((size for size in range(1, length // 2 + 1) if window[size:] == window[:-size]), None)
    if part is None:
        return at - length
    start = at - length
    while start >= 0 and text[start] == text[start + part]:
        start -= 1
    return start


@lru_cache(maxsize=1 << 12)
def _new_followers(text: str) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    """Recent positions where a collective follows its context for the first and only time.

    Each comes as (position, length of the context, all positions after that context). What was new once and occurred
    again is part of the schedule, such as a check every few steps. The streams of many ranks are the same text, so the
    answer is cached.
    """
    found = []
    left: Sequence[int] = range(max(0, len(text) - RECENT), len(text))
    for length in CONTEXTS:
        places = _places(text, length)
        told = {at: here for at in left if bisect_left(here := places.get(text[at - length : at], ()), at) >= MIN_TIMES}
        for at, here in told.items():
            if all(text[place] != text[at] for place in here if place != at):
                found.append((at, length, tuple(here)))
        left = [at for at in left if at not in told]
        if not left:
            break
    return tuple(sorted(found))


def _places(text: str, length: int) -> dict[str, list[int]]:
    """For each run of `length` letters, the positions right after it, in order."""
    found: dict[str, list[int]] = {}
    for at in range(length, len(text)):
        found.setdefault(text[at - length : at], []).append(at)
    return found


def _departure(rank: int, position: int, due: Sequence[Sequence[Collective]], did: Sequence[Collective]) -> Departure:
    """Describe a departure: `due` are the continuations at other times, the newest last; `did` came at `position`."""
    for expected in reversed(due):
        if _agree(did, expected[1:]):
            return Departure(rank, position, expected[0], did[0], "skip")
    for expected in reversed(due):
        if len(did) > 1 and _agree(did[1:], expected):
            return Departure(rank, position, expected[0], did[0], "extra")
    return Departure(rank, position, due[-1][0], did[0], "other")


def _first_difference(one: Sequence[Collective], other: Sequence[Collective]) -> int:
    return next(at for at, (mine, theirs) in enumerate(zip(one, other, strict=True)) if mine != theirs)


def _agree(did: Sequence[Collective], due: Sequence[Collective]) -> bool:
    shared = min(len(did), len(due))
    return shared > 0 and list(did[:shared]) == list(due[:shared])


class PeerView:
    """Ranks with the same part, side by side. Peers issue equal numbers of collectives, so equal record numbers are the
    same place in the schedule. Members without a recorder may have done the same as any one that differs."""

    def __init__(
        self, group: Sequence[int], streams: Mapping[int, Sequence[Collective]], firsts: Mapping[int, int]
    ) -> None:
        self.group = tuple(rank for rank in group if rank in streams)
        self._num_unknown = len(group) - len(self.group)
        self._streams = streams
        self._firsts = firsts

    def _did(self, rank: int, record: int) -> Collective | None:
        """What `rank` did as its collective number `record`; None if that has not happened or has left the ring."""
        at = record - self._firsts[rank]
        return self._streams[rank][at] if 0 <= at < len(self._streams[rank]) else None

    def unusual(self, surprises: Sequence[Departure]) -> list[Departure]:
        """Return those of one rank's surprises that most of its peers do not share."""
        return [found for found in surprises if not self._is_usual(found)]

    def _is_usual(self, found: Departure) -> bool:
        record = found.position + self._firsts[found.rank]
        others = [self._did(rank, record) for rank in self.group if rank != found.rank]
        alike = sum(did == found.did for did in others) + self._num_unknown
        return alike > 0 and alike >= sum(did == found.expected for did in others)

    def is_due_to_others(self, found: Departure, surprises: Mapping[int, Sequence[Departure]]) -> bool:
        """Whether it was the peers who surprised their past there, and not the rank that differs from them."""
        record = found.position + self._firsts[found.rank]
        surprised = [
            rank for rank in self.group if any(each.position + self._firsts[rank] == record for each in surprises[rank])
        ]
        return bool(surprised) and found.rank not in surprised

    def odd_ones(self) -> list[Departure]:
        """Return the members that differ from most others at the same place.

        No rank is odd if the members differ at the first common place already, since places are then not comparable, or
        if there is no majority.
        """
        start = record = max(self._firsts[rank] for rank in self.group)
        together = [rank for rank in self.group if self._did(rank, record) is not None]
        found: list[Departure] = []
        while len(together) > 1:
            record = self._alike_until(together, record)
            by_collective: dict[Collective, list[int]] = {}
            for rank in together:
                if (did := self._did(rank, record)) is not None:
                    by_collective.setdefault(did, []).append(rank)
            most = max(by_collective.values(), key=len, default=[])
            others = [rank for members in by_collective.values() if members is not most for rank in members]
            if others and (record == start or len(most) <= len(others) + self._num_unknown):
                return []
            found += [self._differs(rank, most, record) for rank in others]
            together = most
            record += 1
        return found

    def _alike_until(self, ranks: Sequence[int], record: int) -> int:
        """The first record, from `record` on, at which `ranks` did not all do the same, or one of them did nothing."""
        end = min(self._firsts[rank] + len(self._streams[rank]) for rank in ranks)
        parts = [self._streams[rank][record - self._firsts[rank] : end - self._firsts[rank]] for rank in ranks]
        others = [part for part in parts[1:] if part != parts[0]]
        return record + min((_first_difference(parts[0], part) for part in others), default=len(parts[0]))

    def _differs(self, rank: int, most: Sequence[int], record: int) -> Departure:
        model = max(most, key=lambda other: len(self._streams[other]) + self._firsts[other])
        due, did = (self._streams[each][record - self._firsts[each] :] for each in (model, rank))
        return _departure(rank, record - self._firsts[rank], [due[:LOOK_AHEAD]], did)

"""What torch's flight recorder holds about one rank: its collectives, in order, with group and sequence number.

On gloo the recorder lists collectives but no point-to-point calls, and no member lists: those come from the run.
NCCL's RAS and Inspector know less: how many collectives a rank has launched or finished, and not in which order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from bigsci_launch.spy.evidence.groups import share
from bigsci_launch.topology import expand_ranks

UNEVEN_OPERATIONS = frozenset(
    {
        *("all_to_all", "all_to_allv", "all_to_all_single", "all_to_all_v_single", "alltoall", "alltoallv"),
        *("alltoall_base", "all_gather", "all_gather_v", "allgather", "allgatherv", "reduce_scatter"),
        *("reduce_scatter_v", "gather", "scatter"),
    }
)
"""Operations in which each rank may give another size: those with sizes for each peer, and those of lists of tensors.
The names of torch's backends and of torchcomms."""


@dataclass(frozen=True, slots=True)
class Token:
    """What a collective is, regardless of when: group, operation, sizes and element types as text."""

    group: str
    operation: str
    sizes: str
    types: str

    @property
    def shape(self) -> tuple[str, str, str]:
        """What all members of the group must agree on."""
        return (self.operation, "" if self.operation in UNEVEN_OPERATIONS else self.sizes, self.types)


@dataclass(frozen=True, slots=True)
class Call:
    """One recorded collective of a rank: its token, its number in the group, its place in the rank's stream."""

    token: Token
    sequence: int
    position: int

    def __str__(self) -> str:
        return f"{self.token.operation} number {self.sequence}"


@dataclass(frozen=True, slots=True)
class CallCounts:
    """How many collectives of each operation a rank has launched, or finished, in each group: {group: {operation:
    number}}.

    `verb` is one of these two words. `of_others` are other members, whose ranks are not known: {group: {operation:
    {number: how many of them}}}.
    """

    verb: str
    of_rank: Mapping[str, Mapping[str, int]]
    of_others: Mapping[str, Mapping[str, Mapping[int, int]]]


@dataclass(frozen=True, slots=True)
class Recorder:
    """The collectives of one rank, oldest first.

    `stream` indexes `tokens`; its first entry was the rank's collective number `first_record` (the buffer is a ring).
    `last_sequence` is the newest number in each group, `open_positions` are entries that have not ended. `members` are
    the ranks of each group, if the run lists them.
    """

    first_record: int
    tokens: tuple[Token, ...]
    stream: tuple[int, ...]
    last_sequence: Mapping[str, int]
    open_positions: tuple[int, ...]
    members: Mapping[str, tuple[int, ...]]
    lists_all: bool = True
    """Whether it lists every collective of the rank, also those that C++ began."""
    counts: CallCounts | None = None
    """What is known in place of a list of calls; None if there is a list."""
    open_messages: int | None = None
    """How many messages between two ranks have not ended; None if messages are not recorded."""

    def call(self, position: int) -> Call:
        """Return the entry at `position` with its number. The numbers of a group's entries have no gaps."""
        token = self.tokens[self.stream[position]]
        later = sum(self.tokens[index].group == token.group for index in self.stream[position + 1 :])
        return Call(token, self.last_sequence[token.group] - later, position)

    @property
    def open_calls(self) -> tuple[Call, ...]:
        """The collectives that the rank has started and not finished."""
        return tuple(self.call(position) for position in self.open_positions)

    def find(self, group: str, sequence: int) -> Call | None:
        """Return the entry with this number in `group`, or None if it has not happened or has left the ring."""
        back = self.last_sequence.get(group, 0) - sequence
        if back < 0:
            return None
        for position in range(len(self.stream) - 1, -1, -1):
            if self.tokens[self.stream[position]].group == group:
                if back == 0:
                    return Call(self.tokens[self.stream[position]], sequence, position)
                back -= 1
        return None


def _parse_members(ranks: str | list[int]) -> tuple[int, ...]:
    """Ranks as a list, or as the text `0-383` of a stored bundle; the same tuple for the same ranks."""
    return _expand_members(ranks) if isinstance(ranks, str) else share(tuple(int(rank) for rank in ranks))


@lru_cache(maxsize=1 << 14)
def _expand_members(text: str) -> tuple[int, ...]:
    return share(expand_ranks(text))


def parse_recorder(document: Mapping[str, Any], *, lists_all: bool = True) -> Recorder:
    """Parse a recorder as the node agent writes it.

    Raises:
        ValueError: it refers to a collective or a group that is not in it.
    """
    members = document.get("members") or {}
    counts = parse_counts(document["counts"]) if document.get("counts") else None
    return _require_whole(
        Recorder(
            first_record=int(document["first_record"]),
            tokens=tuple(
                Token(group, operation, sizes, types) for group, _, operation, sizes, types in document["tokens"]
            ),
            stream=tuple(int(index) for index in document["stream"]),
            last_sequence={group: int(number) for group, number in document["last_sequence"].items()},
            open_positions=tuple(int(position) for position in document["open"]),
            members={group: _parse_members(ranks) for group, ranks in members.items()},
            lists_all=lists_all and counts is None,
            counts=counts,
            open_messages=document.get("open_messages"),
        )
    )


def parse_counts(document: Mapping[str, Any]) -> CallCounts:
    """Parse what a reader of counts writes: {verb, of_rank, of_others}. A number that is a key is text there."""
    return CallCounts(
        verb=str(document["verb"]),
        of_rank={
            group: {operation: int(number) for operation, number in counts.items()}
            for group, counts in document["of_rank"].items()
        },
        of_others={
            group: {
                operation: {int(number): int(many) for number, many in tally.items()}
                for operation, tally in tallies.items()
            }
            for group, tallies in (document.get("of_others") or {}).items()
        },
    )


def _require_whole(recorder: Recorder) -> Recorder:
    """Return a recorder in which everything that it refers to is there.

    Raises:
        ValueError: names what is missing.
    """
    for name, numbers, size in (
        ("call", recorder.stream, len(recorder.tokens)),
        ("open call", recorder.open_positions, len(recorder.stream)),
    ):
        if numbers and not (min(numbers) >= 0 and max(numbers) < size):
            raise ValueError(f"the recorder has {size} collectives, and its {name} refers to another one")
    used = {recorder.tokens[index].group for index in set(recorder.stream)}
    if missing := used - set(recorder.last_sequence):
        raise ValueError(f"the recorder has no last number of group {min(missing)!r}")
    return recorder

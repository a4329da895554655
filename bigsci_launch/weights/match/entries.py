"""Pairs tensors and values by their names."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from bigsci_launch.weights.files.sources import Contents
from bigsci_launch.weights.files.tensors import StoredTensor, StoredValue
from bigsci_launch.weights.match.batches import EntryPair, StoredEntry
from bigsci_launch.weights.match.names import Renaming, shortened, through_wrappers, unwrapped

E = TypeVar("E")
EntryT = TypeVar("EntryT", StoredTensor, StoredValue, StoredEntry)


def entries_of(held: Contents) -> list[StoredEntry]:
    """Return the tensors and the values of a file."""
    return [*held.tensors, *held.values]


def kind_of(entry: StoredEntry) -> str:
    """Return what must agree, with the name, for two entries to be one; weights and other tensors are of one kind."""
    if isinstance(entry, StoredValue):
        return "value"
    return "tensor" if entry.role in ("weight", "other") else entry.role


def is_parameter(entry: StoredEntry) -> bool:
    """Whether an entry is a parameter, its master, or a moment of it."""
    return isinstance(entry, StoredTensor) and entry.role not in ("other", "padding")


def by_role(entry: StoredEntry) -> Hashable:
    """Return the key of an entry that has one role on both sides."""
    return (entry.role if isinstance(entry, StoredTensor) else "value", entry.name)


def by_kind(entry: StoredEntry) -> Hashable:
    """Return the key of an entry that may be a weight on one side and another tensor on the other."""
    return (kind_of(entry), entry.name)


def join(
    a: Iterable[E], b: Iterable[E], key_a: Callable[[E], Hashable], key_b: Callable[[E], Hashable]
) -> tuple[list[tuple[E, E]], list[E], list[E]]:
    """Pair entries of one key, in their order; return the pairs, and what is left over on each side."""
    waiting: dict[Hashable, deque[E]] = {}
    for y in b:
        waiting.setdefault(key_b(y), deque()).append(y)
    pairs, rest = [], []
    for x in a:
        if found := waiting.get(key_a(x)):
            pairs.append((x, found.popleft()))
        else:
            rest.append(x)
    return pairs, rest, [y for found in waiting.values() for y in found]


def join_renamed(
    a: Iterable[StoredEntry],
    b: Iterable[StoredEntry],
    renaming: Renaming,
    key: Callable[[StoredEntry], Hashable] = by_kind,
) -> tuple[list[tuple[StoredEntry, StoredEntry]], list[StoredEntry], list[StoredEntry]]:
    """Pair entries by their new names, which the pairs then have; what is left over keeps its own."""

    def new_a(entry: StoredEntry) -> StoredEntry:
        return renamed(entry, renaming.a.get(entry.name))

    def new_b(entry: StoredEntry) -> StoredEntry:
        return renamed(entry, renaming.b.get(entry.name))

    pairs, rest_a, rest_b = join(a, b, lambda x: key(new_a(x)), lambda y: key(new_b(y)))
    return [(new_a(x), new_b(y)) for x, y in pairs], rest_a, rest_b


def renamed(entry: EntryT, name: str | None) -> EntryT:
    """Return an entry under a new name; None keeps its own."""
    return entry if name is None or name == entry.name else replace(entry, name=name)


def pair_files(
    a: Sequence[StoredEntry], b: Sequence[StoredEntry]
) -> tuple[list[tuple[StoredEntry, StoredEntry]], list[StoredEntry], list[StoredEntry], Renaming]:
    """Pair the entries of two files; return the pairs, what is left over on each side, and what had other names.

    An entry's partner has its role and name; otherwise its name; otherwise its name without wrappers.
    """
    if len(a) == len(b) and all(by_role(x) == by_role(y) for x, y in zip(a, b, strict=True)):
        return list(zip(a, b, strict=True)), [], [], Renaming()
    renaming = Renaming()
    pairs, rest_a, rest_b = join(a, b, by_role, by_role)
    if rest_a and rest_b:
        more, rest_a, rest_b = join(rest_a, rest_b, by_kind, by_kind)
        pairs += more
    if rest_a and rest_b:
        renaming = through_wrappers({entry.name for entry in a}, {entry.name for entry in b})
        more, rest_a, rest_b = join_renamed(rest_a, rest_b, renaming)
        pairs += more
    return pairs, rest_a, rest_b, renaming


def unwrapped_tensors(tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
    """Return the tensors of a file with their names without wrappers, unless two would have one name."""
    short = shortened((tensor.name for tensor in tensors), unwrapped)
    return [renamed(tensor, short.get(tensor.name)) for tensor in tensors]


def shown(pairs: Sequence[EntryPair], names: Iterable[str]) -> list[EntryPair]:
    """Return pairs with the names that the answer shows: without wrappers, unless two of `names` would become one."""
    short = shortened(names, unwrapped)
    if not short:
        return list(pairs)
    return [(x and renamed(x, short.get(x.name)), y and renamed(y, short.get(y.name))) for x, y in pairs]

"""Entries that have no partner in the file of the same name: they are paired across files once all files were read."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Lock

from bigsci_launch.weights.files.sources import Contents
from bigsci_launch.weights.files.tensors import StoredTensor
from bigsci_launch.weights.match.batches import (
    LOST,
    NOT_READ,
    OF_PROGRAM,
    OUTSIDE,
    EntryPair,
    LeftOut,
    StoredEntry,
    left_out,
)
from bigsci_launch.weights.match.entries import (
    by_kind,
    by_role,
    entries_of,
    is_parameter,
    join_renamed,
    pair_files,
    renamed,
    shown,
)
from bigsci_launch.weights.match.names import Renaming, renaming_notes, through_prefix, through_wrappers
from bigsci_launch.weights.match.storages import SAFETENSORS, Storages

# What torch says about the modules of a state dict, and what a .safetensors file says about itself.
ABOUT_MODULES, ABOUT_FILE = re.compile(r"(?:^|\.)_metadata(?:\..+)?\.version$"), re.compile(r"^__metadata__\.")
MODULE_VERSIONS = "versions of modules that the other side does not state"


def is_about(entry: StoredEntry) -> re.Pattern[str] | None:
    """Return which kind of metadata a value belongs to; None for anything else."""
    if isinstance(entry, StoredTensor):
        return None
    return next((kind for kind in (ABOUT_MODULES, ABOUT_FILE) if kind.search(entry.name)), None)


@dataclass
class Seen:
    """What the files of one side contained so far."""

    storages: Storages
    names: set[str] = field(default_factory=set)
    about: set[re.Pattern[str] | None] = field(default_factory=set)
    # Entries that were not read: they are not missing.
    not_read: set[str] = field(default_factory=set)
    suffixes: set[str] = field(default_factory=set)
    # What this side's names have and the other side's lack.
    words: set[str] = field(default_factory=set)
    # By the number of its pair of files: what has no partner in the other file.
    lone: dict[int, list[StoredEntry]] = field(default_factory=dict)
    # By the identity of a lone entry: why it is not compared if it has no partner in the end.
    whys: dict[int, str] = field(default_factory=dict)

    def see(self, contents: Contents) -> None:
        """Note the entries of a file."""
        self.not_read |= {entry.name for entry in contents.not_read}
        paths = set()
        for entry in entries_of(contents):
            self.names.add(entry.name)
            self.about.add(is_about(entry))
            paths.add(entry.path)
        self.suffixes.update(path.suffix for path in paths)

    def keep(self, number: int, contents: Contents, lone: list[StoredEntry], why: str | None) -> None:
        """Keep what has no partner in the other file of a pair; `why` it may have none anywhere."""
        self.storages.add(contents.tensors)
        self.lone[number] = lone
        for entry in lone:
            if why is not None and (why == LOST or not is_parameter(entry)):
                self.whys[id(entry)] = why

    def all_lone(self) -> list[StoredEntry]:
        """Return what has no partner, in the order of the files."""
        return [entry for number in sorted(self.lone) for entry in self.lone[number]]

    def could_not_read(self, entry: StoredEntry) -> bool:
        """Whether this side has an entry of the other side too, but its reader could not read it."""
        titles = {entry.name, f"{entry.name} {entry.role}"} if isinstance(entry, StoredTensor) else {entry.name}
        return not self.not_read.isdisjoint(titles)

    def why_alone(self, entry: StoredEntry, other: Seen) -> str | None:
        """Return why an entry without a partner is not compared; None: it differs."""
        if other.could_not_read(entry):
            return NOT_READ
        about = is_about(entry)
        if about == ABOUT_MODULES and (self.words or other.words or about not in other.about):
            return MODULE_VERSIONS
        if about == ABOUT_FILE and about not in other.about and SAFETENSORS not in other.suffixes:
            return OUTSIDE
        return self.whys.get(id(entry))


class Leftovers:
    """Pairs the entries of pairs of files, and keeps those without a partner. Threads may share it."""

    def __init__(self) -> None:
        self._a, self._b = Seen(Storages("A")), Seen(Storages("B"))
        self._has_paired_parameters = False
        self._lock = Lock()

    def pair(
        self, number: int, a: Contents, b: Contents, *, are_of_one_kind: bool, is_lost: bool
    ) -> tuple[list[EntryPair], bool]:
        """Pair the entries of two files; return the pairs, and whether they contain all entries.

        `number` gives the order of the pairs of files. If a file is one of parameters only, a file of another kind may
        contain more. `is_lost`: one of the two could not be read.
        """
        entries_a, entries_b = entries_of(a), entries_of(b)
        pairs, rest_a, rest_b, renaming = pair_files(entries_a, entries_b)
        is_complete = not rest_a and not rest_b
        with self._lock:
            self._a.see(a)
            self._b.see(b)
            self._a.words |= renaming.words_a
            self._b.words |= renaming.words_b
            if not is_complete:
                self._a.keep(number, a, rest_a, LOST if is_lost else _why(a, rest_b, are_of_one_kind))
                self._b.keep(number, b, rest_b, LOST if is_lost else _why(b, rest_a, are_of_one_kind))
            self._note(pairs)
        return shown(pairs, (entry.name for entry in (*entries_a, *entries_b))), is_complete

    def _note(self, pairs: Iterable[tuple[StoredEntry, StoredEntry]]) -> None:
        for x, y in pairs:
            if isinstance(x, StoredTensor) and isinstance(y, StoredTensor):
                self._a.storages.pair(x, y)
                self._b.storages.pair(y, x)
                self._has_paired_parameters |= is_parameter(x)

    def finish(self) -> tuple[list[EntryPair], list[LeftOut], list[str]]:
        """Pair what has no partner in its own pair of files: across files, through other names, and through storages.

        The pairs contain every entry that no pair had so far, except those left out.
        """
        pairs, rest_a, rest_b = self._through_names(self._a.all_lone(), self._b.all_lone())
        lone_a, left_out_a = _alone(rest_a, self._a, self._b)
        lone_b, left_out_b = _alone(rest_b, self._b, self._a)
        pairs += lone_a
        pairs += [(x, y) for y, x in lone_b]
        notes = [
            *renaming_notes(self._a.words, self._b.words),
            *self._a.storages.notes(),
            *self._b.storages.notes(),
        ]
        return shown(pairs, self._a.names | self._b.names), [*left_out_a, *left_out_b], notes

    def _through_names(
        self, a: list[StoredEntry], b: list[StoredEntry]
    ) -> tuple[list[EntryPair], list[StoredEntry], list[StoredEntry]]:
        pairs: list[EntryPair] = []
        steps = ((_as_they_are, by_role), (_as_they_are, by_kind), (self._wrappers, by_kind), (self._prefix, by_kind))
        for find, key in steps:
            if not a or not b:
                break
            renaming = find(a, b)
            found, a, b = join_renamed(a, b, renaming, partial(_at_place, key))
            pairs += found
            self._note(found)
            self._a.words |= renaming.words_a
            self._b.words |= renaming.words_b
        return pairs, a, b

    def _wrappers(self, a: Sequence[StoredEntry], b: Sequence[StoredEntry]) -> Renaming:
        return through_wrappers(self._a.names, self._b.names)

    def _prefix(self, a: Sequence[StoredEntry], b: Sequence[StoredEntry]) -> Renaming:
        if self._has_paired_parameters:
            return Renaming()
        parameters_a, parameters_b = ({entry.name for entry in side if is_parameter(entry)} for side in (a, b))
        return through_prefix(parameters_a, parameters_b, {entry.name for entry in a}, {entry.name for entry in b})


def _why(own: Contents, rest: Iterable[StoredEntry], are_of_one_kind: bool) -> str | None:
    """Return why a file's extras are not compared: the other one, of another kind, has none (`rest`) of its own."""
    if are_of_one_kind or any(not is_parameter(entry) and is_about(entry) is None for entry in rest):
        return None
    return OF_PROGRAM if own.is_program else OUTSIDE


def _at_place(key: Callable[[StoredEntry], Hashable], entry: StoredEntry) -> Hashable:
    return (key(entry), entry.place)


def _as_they_are(a: Sequence[StoredEntry], b: Sequence[StoredEntry]) -> Renaming:
    return Renaming()


def _alone(
    entries: Iterable[StoredEntry], own: Seen, other: Seen
) -> tuple[list[tuple[StoredEntry, StoredEntry | None]], list[LeftOut]]:
    """Return entries that no name leads to, each with the partner of its storage or None; and what is left out."""
    pairs: list[tuple[StoredEntry, StoredEntry | None]] = []
    omitted: list[LeftOut] = []
    for entry in entries:
        partner = own.storages.partner_of(entry) if isinstance(entry, StoredTensor) else None
        why = None if partner else own.why_alone(entry, other)
        if why is None:
            pairs.append((entry, partner and renamed(partner, entry.name)))
        else:
            omitted.append(left_out(own.storages.side, why, entry))
    return pairs, omitted

"""Pairs all entries of two sides by name, because their files or their topologies differ."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bigsci_launch.weights.files.mapped import UnreadableFile
from bigsci_launch.weights.files.sources import Source, Unreadable, Weights, WeightsLayout
from bigsci_launch.weights.files.tensors import NotRead, StoredTensor, StoredValue, TensorRole
from bigsci_launch.weights.formats.contents import read_contents
from bigsci_launch.weights.match.batches import (
    NOT_READ,
    OF_SINGLE_RANKS,
    OUTSIDE,
    PADDING,
    EntryPair,
    LeftOut,
    PairBatch,
    StoredEntry,
    in_batches,
    left_out,
    summed,
)
from bigsci_launch.weights.match.entries import by_kind, is_parameter, join, renamed, shown
from bigsci_launch.weights.match.leftovers import Seen, is_about
from bigsci_launch.weights.match.logical import as_weights, join_dp, pair_logically
from bigsci_launch.weights.match.names import renaming_notes, through_prefix, through_wrappers
from bigsci_launch.weights.match.sharding import ShardingHints
from bigsci_launch.weights.match.single_ranks import of_single_ranks
from bigsci_launch.weights.match.storages import Storages
from bigsci_launch.weights.match.zero import is_of_zero
from bigsci_launch.weights.match.zero_pair import ZeroSide, pair_zero

# Layouts with a file for each rank: what is no parameter in such a file belongs to its rank.
RANKED: tuple[WeightsLayout, ...] = ("deepspeed", "rank dumps", "text dumps", "digests")


@dataclass
class _Everything:
    """All entries of one side."""

    weights: Weights
    seen: Seen
    tensors: list[StoredTensor] = field(default_factory=list)
    values: list[StoredValue] = field(default_factory=list)
    not_read: list[NotRead] = field(default_factory=list)
    unreadable: list[Unreadable] = field(default_factory=list)

    @property
    def entries(self) -> list[StoredEntry]:
        return [*self.tensors, *self.values]

    @property
    def parameters(self) -> list[StoredTensor]:
        return [tensor for tensor in self.tensors if is_parameter(tensor)]

    @property
    def roles(self) -> set[TensorRole]:
        return {tensor.role for tensor in self.parameters}

    @property
    def names(self) -> set[str]:
        return {entry.name for entry in self.entries}

    @property
    def extras(self) -> list[StoredEntry]:
        """The entries that are no parameters."""
        return [*(tensor for tensor in self.tensors if tensor.role == "other"), *self.values]

    @property
    def is_more_than_weights(self) -> bool:
        return any(is_about(entry) is None for entry in self.extras)

    def rename(self, names: Mapping[str, str], words: Iterable[str]) -> None:
        """Give new names to some entries; `words` are what the names lose."""
        if names:
            self.tensors = [renamed(tensor, names.get(tensor.name)) for tensor in self.tensors]
            self.values = [renamed(value, names.get(value.name)) for value in self.values]
        self.seen.words.update(words)

    def drop(self, whys: Mapping[int, str]) -> list[LeftOut]:
        """Leave out entries, given why by identity; return their counts."""
        out = [entry for entry in self.entries if id(entry) in whys]
        self.tensors = [tensor for tensor in self.tensors if id(tensor) not in whys]
        self.values = [value for value in self.values if id(value) not in whys]
        return summed(left_out(self.seen.storages.side, whys[id(entry)], entry) for entry in out)


def pair_by_name(a: Weights, b: Weights) -> tuple[Iterator[PairBatch], tuple[str, ...]]:
    """Pair all entries of both sides by name; return the pairs, and a note if shards of two topologies are joined.

    Every copy of a tensor is in at least one pair.
    """
    left, right = _everything(a, Storages("A")), _everything(b, Storages("B"))
    _rename_alike(left, right)
    omitted = [total for side in (left, right) for total in _drop_padding(side)]
    hints = ShardingHints.of_metadata(a.metadata if a.metadata.universal_info else b.metadata)
    if is_of_zero(a, b):
        found = pair_zero(_zero_side(left), _zero_side(right), hints)
        pairs, lost = found.pairs, found.lost
        omitted += found.omitted
    else:
        pairs, lost = _pair_entries(left, right, hints, omitted)
    pairs = list(_through_storages(pairs, left.seen.storages, right.seen.storages))
    renamings = renaming_notes(left.seen.words, right.seen.words)
    about_storages = (*left.seen.storages.notes(), *right.seen.storages.notes())
    batches = in_batches(
        shown(pairs, left.names | right.names),
        omitted,
        (*renamings, *about_storages),
        not_read=(*left.not_read, *right.not_read),
        unreadable=(*left.unreadable, *right.unreadable, *_cut_otherwise(lost)),
    )
    return batches, _topology_note(a, b)


def _zero_side(side: _Everything) -> ZeroSide:
    is_broken = bool(side.weights.broken or side.unreadable)
    return ZeroSide(side.seen.storages.side, side.weights, side.parameters, side.extras, is_broken)


def _pair_entries(
    left: _Everything, right: _Everything, hints: ShardingHints, omitted: list[LeftOut]
) -> tuple[list[EntryPair], list[StoredTensor]]:
    """Pair what both sides have in the same roles; return the pairs, and tensors that cannot be joined."""
    a, b = left.weights, right.weights
    _cast_alike(left, right)
    omitted += [*_drop_not_read(left, right), *_drop_not_read(right, left)]
    omitted += [*_drop_lone_roles(left, right), *_drop_lone_roles(right, left)]
    is_strict = (
        a.topology == b.topology and a.layout == b.layout and left.is_more_than_weights and right.is_more_than_weights
    )
    omitted += [*_drop_of_single_ranks(left, right), *_drop_of_single_ranks(right, left)]
    omitted += _drop_of_other_ranks(left, right)
    omitted += [*_drop_extras(left, right, is_strict=is_strict), *_drop_extras(right, left, is_strict=is_strict)]
    lost: list[StoredTensor] = []
    pairs: list[EntryPair] = list(pair_logically(left.tensors, right.tensors, hints, lost))
    return [*pairs, *_pair_values(left, right, is_strict=is_strict)], lost


def _everything(weights: Weights, storages: Storages) -> _Everything:
    found = _Everything(weights, Seen(storages))
    # The order of the files is that of shards whose names do not say which they are.
    for source in sorted(weights.sources, key=_natural):
        try:
            contents = read_contents(source, weights.metadata)
        except UnreadableFile as error:
            found.unreadable.append(Unreadable(error.path, error.why))
            continue
        found.seen.see(contents)
        storages.add(contents.tensors)
        found.tensors += contents.tensors
        found.values += contents.values
        found.not_read += contents.not_read
        found.unreadable += contents.unreadable
    found.tensors = join_dp(found.tensors, weights.metadata)
    return found


def _natural(source: Source) -> list[str | int]:
    parts = re.split(r"([0-9]+)", source.path.as_posix())
    return [int(part) if index % 2 else part for index, part in enumerate(parts)]


def _rename_alike(a: _Everything, b: _Everything) -> None:
    """Give the entries of both sides one name where wrappers or a common prefix are all that differs."""
    renaming = through_wrappers(a.names, b.names)
    a.rename(renaming.a, renaming.words_a)
    b.rename(renaming.b, renaming.words_b)
    parameters_a, parameters_b = ({tensor.name for tensor in side.parameters} for side in (a, b))
    renaming = through_prefix(parameters_a, parameters_b, a.names, b.names)
    a.rename(renaming.a, renaming.words_a)
    b.rename(renaming.b, renaming.words_b)


def _cast_alike(a: _Everything, b: _Everything) -> None:
    """Give tensors of one name one role: what one file keeps among other things may be all of another."""
    weights_a, weights_b = ({tensor.name for tensor in side.tensors if tensor.role == "weight"} for side in (a, b))
    for side, only in ((a, weights_b - weights_a), (b, weights_a - weights_b)):
        side.tensors = [
            replace(tensor, role="weight") if tensor.role == "other" and tensor.name in only else tensor
            for tensor in side.tensors
        ]
    if not a.roles & b.roles & {"weight", "fp32"}:
        a.tensors, b.tensors = as_weights(a.tensors), as_weights(b.tensors)


def _drop_padding(side: _Everything) -> list[LeftOut]:
    return side.drop({id(tensor): PADDING for tensor in side.tensors if tensor.role == "padding"})


def _drop_not_read(own: _Everything, other: _Everything) -> list[LeftOut]:
    held = {by_kind(tensor) for tensor in other.tensors} if other.not_read else set()
    lacking = (tensor for tensor in own.tensors if other.seen.could_not_read(tensor) and by_kind(tensor) not in held)
    return own.drop({id(tensor): NOT_READ for tensor in lacking})


def _drop_lone_roles(own: _Everything, other: _Everything) -> list[LeftOut]:
    """Leave out the roles that only one side has, unless the other side has no parameters at all."""
    lone = own.roles - other.roles if other.roles else set()
    why = f"in roles that only {own.seen.storages.side} has ({', '.join(sorted(lone))})"
    return own.drop({id(tensor): why for tensor in own.tensors if tensor.role in lone})


def _drop_of_single_ranks(own: _Everything, other: _Everything) -> list[LeftOut]:
    """Leave out random states, loss scales and the like that belong to ranks which the other side does not have."""
    if own.weights.topology == other.weights.topology:
        return []
    is_ranked = own.weights.layout in RANKED
    whys = {id(entry): OF_SINGLE_RANKS for entry in own.extras if is_ranked or entry.place.is_known}
    return own.drop(whys)


def _drop_of_other_ranks(a: _Everything, b: _Everything) -> list[LeftOut]:
    """Leave out what belongs to single ranks by its name, if the two sides have it for other ranks."""
    out = of_single_ranks(a.entries, b.entries)
    sides = zip((a, b), out, strict=True)
    return [total for side, entries in sides for total in side.drop({id(entry): OF_SINGLE_RANKS for entry in entries})]


def _drop_extras(own: _Everything, other: _Everything, *, is_strict: bool) -> list[LeftOut]:
    """Leave out what only one side has, and what the other side cannot be expected to have."""
    held = {by_kind(entry) for entry in other.extras}
    whys = {}
    for entry in own.extras:
        if by_kind(entry) not in held:
            why = own.seen.why_alone(entry, other.seen)
            if why is not None or not is_strict:
                whys[id(entry)] = why or OUTSIDE
    return own.drop(whys)


def _through_storages(pairs: Sequence[EntryPair], a: Storages, b: Storages) -> Iterator[EntryPair]:
    """Yield pairs; a tensor without a partner gets that of another name of its storage."""
    for x, y in pairs:
        if isinstance(x, StoredTensor) and isinstance(y, StoredTensor):
            a.pair(x, y)
            b.pair(y, x)
    for x, y in pairs:
        if isinstance(x, StoredTensor) and y is None and (partner := a.partner_of(x)):
            yield x, renamed(partner, x.name)
        elif isinstance(y, StoredTensor) and x is None and (partner := b.partner_of(y)):
            yield renamed(partner, y.name), y
        else:
            yield x, y


def _pair_values(a: _Everything, b: _Everything, *, is_strict: bool) -> Iterator[EntryPair]:
    """Pair values by name and place; unless strict, a value may have its partner at another place, and share it."""
    pairs, rest_a, rest_b = join(a.values, b.values, _by_place, _by_place)
    yield from pairs
    if is_strict:
        yield from (*((x, None) for x in rest_a), *((None, y) for y in rest_b))
        return
    more, rest_a, rest_b = join(rest_a, rest_b, by_kind, by_kind)
    yield from more
    first_a, first_b = ({value.name: value for value in reversed(side.values)} for side in (a, b))
    yield from ((x, first_b.get(x.name)) for x in rest_a)
    yield from ((first_a.get(y.name), y) for y in rest_b)


def _by_place(entry: StoredEntry) -> Hashable:
    return (by_kind(entry), entry.place)


def _cut_otherwise(lost: Sequence[StoredTensor]) -> Iterator[Unreadable]:
    """Yield the files of digests or printed tensors whose shards the other side does not have."""
    names: dict[Path, set[str]] = {}
    for tensor in lost:
        names.setdefault(tensor.path, set()).add(tensor.name)
    for path, held in names.items():
        known = "digests" if next(t for t in lost if t.path == path).digest is not None else "printed edges"
        count = f"{len(held)} tensor{'s' if len(held) > 1 else ''}"
        yield Unreadable(path, f"{known} of {count} that the other side stores in another form: not compared")


def _topology_note(a: Weights, b: Weights) -> tuple[str, ...]:
    if a.topology is None or b.topology is None or a.topology == b.topology:
        return ()
    return (f"A is {a.topology}, B is {b.topology}: shards are joined before comparison",)

"""Decides which tensor of one side is compared with which of the other, a bounded number at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from bigsci_launch.weights.files.mapped import UnreadableFile
from bigsci_launch.weights.files.sources import CheckpointMetadata, Contents, Source, Unreadable, Weights
from bigsci_launch.weights.files.tensors import StoredValue, TensorPair, ValuePair
from bigsci_launch.weights.formats.contents import read_contents
from bigsci_launch.weights.locate.locate import labels
from bigsci_launch.weights.match.batches import (
    LeftOut,
    PairBatch,
    in_batches,
    tensor_pairs,
    value_pairs,
)
from bigsci_launch.weights.match.entries import by_kind, join
from bigsci_launch.weights.match.leftovers import Leftovers
from bigsci_launch.weights.match.single_ranks import without_single_ranks


@dataclass(frozen=True, slots=True)
class FilePair:
    """Two files that are compared with each other and are not yet parsed. None: only the other side has it.

    What has no partner in the other file goes to `leftovers`, under the `number` of the pair. `is_lost`: a side has
    no such file, because it could not be read.
    """

    name: str
    a: Source | None
    b: Source | None
    metadata_a: CheckpointMetadata
    metadata_b: CheckpointMetadata
    has_one_metadata: bool
    leftovers: Leftovers
    number: int
    is_lost: bool = False

    @property
    def paths(self) -> tuple[Path, Path] | None:
        """The two files, if the same bytes in both would have the same contents; otherwise None."""
        if self.a is None or self.b is None or not self.has_one_metadata:
            return None
        return (self.a.path, self.b.path) if _traits(self.a) == _traits(self.b) else None

    def read_a(self) -> Contents | Unreadable:
        """Parse A's file."""
        return _parsed(self.a, self.metadata_a)

    def read(self, left: Contents | Unreadable | None = None) -> PairBatch:
        """Parse both files and pair their entries; `left` is what `read_a` returned, if it was called."""
        found = (left or self.read_a(), _parsed(self.b, self.metadata_b))
        lost = [one for one in found if isinstance(one, Unreadable)]
        contents = [Contents(()) if isinstance(one, Unreadable) else one for one in found]
        lost += (item for held in contents for item in held.unreadable)
        return self._paired(contents[0], contents[1], tuple(lost))

    def read_twin(self, left: Contents | Unreadable) -> PairBatch | None:
        """Pair A's contents with those of B, whose file has the same bytes and is not parsed.

        Returns None if the contents are not all inside the file, so that the same bytes prove nothing.
        """
        assert self.a is not None and self.b is not None
        if isinstance(left, Unreadable):
            both = (left, replace(left, path=self.b.path))
            return self._paired(Contents(()), Contents(()), both) if left.path == self.a.path else None
        segments = [tensor.segments for tensor in left.tensors]
        paths = {entry.path for entry in left.values} | {entry.path for entry in left.not_read}
        paths |= {segment.path for each in segments for segment in each}
        is_inside = all(segments) and paths <= {self.a.path}
        if not is_inside:
            return None
        not_read = tuple(replace(entry, path=self.b.path) for entry in left.not_read)
        return self._paired(left, replace(left, not_read=not_read))

    def _paired(self, left: Contents, right: Contents, unreadable: tuple[Unreadable, ...] = ()) -> PairBatch:
        source = self.a or self.b
        assert source is not None
        omitted: list[LeftOut] = []
        if source.format == "dcp":
            left, right, omitted = without_single_ranks(left, right)
        pairs, is_complete = self.leftovers.pair(
            self.number,
            left,
            right,
            are_of_one_kind=self._are_of_one_kind(left, right),
            is_lost=bool(unreadable) or self.is_lost,
        )
        has_groups = not unreadable and (left.groups or right.groups)
        return PairBatch(
            self.name,
            tensor_pairs(pairs),
            (*value_pairs(pairs), *_other_places(left, right, source)),
            (*left.not_read, *right.not_read),
            unreadable,
            groups=((source.place, left.groups, right.groups),) if has_groups else (),
            owns_files=is_complete,
            left_out=tuple(omitted),
        )

    def _are_of_one_kind(self, left: Contents, right: Contents) -> bool:
        if self.a is None or self.b is None:
            return True
        if left.is_program != right.is_program:
            return False
        return self.a.path.suffix == self.b.path.suffix and left.container == right.container


def _parsed(source: Source | None, metadata: CheckpointMetadata) -> Contents | Unreadable:
    try:
        return read_contents(source, metadata) if source else Contents(())
    except UnreadableFile as error:
        return Unreadable(error.path, error.why)


def _traits(source: Source) -> tuple[object, ...]:
    """Return what the contents of a file depend on, other than its bytes and the metadata of its checkpoint."""
    listed = source.index.shards.get(source.path.name) if source.index else None
    return source.format, source.component, source.label, source.place, source.path.suffix, listed


@dataclass(frozen=True, slots=True)
class Pairing:
    """The pairs to compare, and notes about them for the answer.

    `rest` gives the batches of what no pair of files settles; it is called once all `batches` were read.
    """

    batches: Iterator[PairBatch | FilePair]
    rest: Callable[[], Iterator[PairBatch]]
    notes: tuple[str, ...] = ()
    is_by_file: bool = False


def pair_weights(a: Weights, b: Weights) -> Pairing:
    """Pair all entries of two sides; files that no reader knows are compared by their bytes."""
    pairing = _pair_sources(a, b)
    if not a.others and not b.others:
        return pairing
    from bigsci_launch.weights.match.others import compare_others

    others = compare_others(a, b)
    first = PairBatch("", not_read=others.not_read, owns_files=False)
    return replace(pairing, batches=chain((first,), pairing.batches), notes=(*pairing.notes, *others.notes))


def _pair_sources(a: Weights, b: Weights) -> Pairing:
    """Pair file by file if both sides are split alike, otherwise by the names of the parameters."""
    left, right = labels(a.sources), labels(b.sources)
    notes = (*a.notes, *b.notes)
    is_cut_alike = a.layout == b.layout and a.topology == b.topology and not _are_other_models(a, b)
    if is_cut_alike and left.keys() & right.keys():
        names = list(dict.fromkeys([*left, *right]))
        leftovers = Leftovers()
        pairs = _by_file(a, b, left, right, names, leftovers)
        return Pairing(pairs, lambda: in_batches(*leftovers.finish()), notes, is_by_file=True)
    from bigsci_launch.weights.match.by_name import pair_by_name

    batches, about_names = pair_by_name(a, b)
    return Pairing(batches, lambda: iter(()), (*notes, *about_names))


def _are_other_models(a: Weights, b: Weights) -> bool:
    """Whether ZeRO cuts the two sides differently: they have other parameters or groups, or are of two stages."""
    zero_a, zero_b = a.metadata.zero, b.metadata.zero
    if None not in (zero_a.stage, zero_b.stage) and zero_a.stage != zero_b.stage:
        return True
    is_known = a.metadata.shapes.keys() == b.metadata.shapes.keys() and not (a.broken or b.broken)
    return is_known and (a.metadata.shapes != b.metadata.shapes or zero_a.groups != zero_b.groups)


def _by_file(
    a: Weights,
    b: Weights,
    left: dict[str, Source],
    right: dict[str, Source],
    names: Sequence[str],
    leftovers: Leftovers,
) -> Iterator[PairBatch | FilePair]:
    metadata_a, metadata_b = _metadata_of_both(a, b)
    has_one_metadata = metadata_a == metadata_b
    lost = {item.path.stem for item in (*a.broken, *b.broken) if item.path.exists()}
    for number, name in enumerate(names):
        source_a, source_b = left.get(name), right.get(name)
        if source_a and source_b and source_a.format == source_b.format == "digests":
            yield _digest_batch(name, source_a, source_b)
        else:
            is_lost = name in lost and not (source_a and source_b)
            yield FilePair(
                name, source_a, source_b, metadata_a, metadata_b, has_one_metadata, leftovers, number, is_lost
            )


def _metadata_of_both(a: Weights, b: Weights) -> tuple[CheckpointMetadata, CheckpointMetadata]:
    """Return the metadata of both sides. If one lost files that name its parameters, use the other's for both."""
    if len(a.metadata.shapes) == len(b.metadata.shapes):
        return a.metadata, b.metadata
    fuller = max(a.metadata, b.metadata, key=lambda metadata: len(metadata.shapes))
    return fuller, fuller


def _other_places(a: Contents, b: Contents, source: Source) -> Iterator[ValuePair]:
    """Yield the coordinates of the ranks that dumped two files of one name, if they are not the same rank's."""
    if source.format == "dump" and a.tensors and b.tensors and a.tensors[0].place != b.tensors[0].place:
        left, right = (
            StoredValue("coordinate", tensor.place, tensor.path, str(tensor.place).encode(), str(tensor.place))
            for tensor in (a.tensors[0], b.tensors[0])
        )
        yield left, right


def _paired_values(a: Sequence[StoredValue], b: Sequence[StoredValue]) -> tuple[ValuePair, ...]:
    pairs, rest_a, rest_b = join(a, b, by_kind, by_kind)
    return (*pairs, *((x, None) for x in rest_a), *((None, y) for y in rest_b))


def _digest_batch(name: str, a: Source, b: Source) -> PairBatch:
    """Pair one rank's digests on both sides. Only tensors that differ become pairs."""
    from bigsci_launch.weights.formats.digests import digest_tensor, digest_values, read_two_digests

    try:
        left, right = read_two_digests(a.path, b.path)
    except UnreadableFile as error:
        return PairBatch(name, unreadable=(Unreadable(error.path, error.why),))
    values = _paired_values(digest_values(left), digest_values(right)) if left.others != right.others else ()
    if left.entries is right.entries:
        return PairBatch(name, values=values, equal=tuple(left.entries), place=left.place)
    equal = tuple(name for name, entry in left.entries.items() if right.entries.get(name) == entry)
    known = set(equal)
    pairs: list[TensorPair] = [
        (digest_tensor(left, name), digest_tensor(right, name) if name in right.entries else None)
        for name in left.entries
        if name not in known
    ]
    pairs += [(None, digest_tensor(right, name)) for name in right.entries if name not in left.entries]
    return PairBatch(name, tuple(pairs), values, equal=equal, place=left.place)

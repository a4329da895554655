"""Decides which tensor of one side is compared with which of the other, a bounded number at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from bigsci_launch.weights.files.sources import (
    CheckpointMetadata,
    Contents,
    OptimizerGroup,
    Source,
    Unreadable,
    Weights,
)
from bigsci_launch.weights.files.tensors import (
    NOWHERE,
    NotRead,
    Place,
    StoredTensor,
    StoredValue,
    TensorPair,
    UnreadableFile,
    ValuePair,
)
from bigsci_launch.weights.formats.contents import read_contents
from bigsci_launch.weights.locate.locate import labels

# Size of a batch whose pairs do not come from one file.
PAIRS_AT_A_TIME = 256


@dataclass(frozen=True, slots=True)
class PairBatch:
    """Pairs that are compared together. None on one side means that only the other side has the tensor.

    `equal` names tensors at `place` that are already known to be equal. `not_read` are entries of either side that
    cannot be compared. `owns_files`: no other batch needs its files.
    """

    title: str
    pairs: tuple[TensorPair, ...] = ()
    values: tuple[ValuePair, ...] = ()
    not_read: tuple[NotRead, ...] = ()
    unreadable: tuple[Unreadable, ...] = ()
    groups: tuple[tuple[Place, tuple[OptimizerGroup, ...], tuple[OptimizerGroup, ...]], ...] = ()
    equal: tuple[str, ...] = ()
    place: Place = NOWHERE
    owns_files: bool = True


@dataclass(frozen=True, slots=True)
class FilePair:
    """Two files that are compared with each other and are not yet parsed. None: only the other side has it."""

    name: str
    a: Source | None
    b: Source | None
    metadata_a: CheckpointMetadata
    metadata_b: CheckpointMetadata
    has_one_metadata: bool

    @property
    def paths(self) -> tuple[Path, Path] | None:
        """The two files, if the same bytes in both would have the same contents; otherwise None."""
        if self.a is None or self.b is None or not self.has_one_metadata:
            return None
        return (self.a.path, self.b.path) if _traits(self.a) == _traits(self.b) else None

    def read_a(self) -> Contents:
        """Parse A's file. Raises UnreadableFile."""
        return read_contents(self.a, self.metadata_a) if self.a else Contents(())

    def read(self) -> PairBatch:
        """Parse both files and pair their entries."""
        unreadable = []
        contents = []
        for source, metadata in ((self.a, self.metadata_a), (self.b, self.metadata_b)):
            try:
                contents.append(read_contents(source, metadata) if source else Contents(()))
            except UnreadableFile as error:
                unreadable.append(Unreadable(error.path, error.why))
        if unreadable:
            return PairBatch(self.name, unreadable=tuple(unreadable))
        return self._paired(contents[0], contents[1])

    def read_twin(self, left: Contents) -> PairBatch | None:
        """Pair A's contents with those of B, whose file has the same bytes and is not parsed.

        Returns None if the contents are not all inside the file, so that the same bytes prove nothing.
        """
        assert self.a is not None and self.b is not None
        segments = [tensor.segments for tensor in left.tensors]
        paths = {entry.path for entry in left.values} | {entry.path for entry in left.not_read}
        paths |= {segment.path for each in segments for segment in each}
        is_inside = all(segments) and paths <= {self.a.path}
        if not is_inside:
            return None
        not_read = tuple(replace(entry, path=self.b.path) for entry in left.not_read)
        return self._paired(left, replace(left, not_read=not_read))

    def _paired(self, left: Contents, right: Contents) -> PairBatch:
        source = self.a or self.b
        assert source is not None
        groups = ((source.place, left.groups, right.groups),) if left.groups or right.groups else ()
        return PairBatch(
            self.name,
            tuple(pair_tensors(left.tensors, right.tensors)),
            (*pair_values(left.values, right.values), *_other_places(left, right, source)),
            (*left.not_read, *right.not_read),
            groups=groups,
        )


def _traits(source: Source) -> tuple[object, ...]:
    """Return what the contents of a file depend on, other than its bytes and the metadata of its checkpoint."""
    listed = source.index.shards.get(source.path.name) if source.index else None
    return source.format, source.component, source.label, source.place, source.path.suffix, listed


@dataclass(frozen=True, slots=True)
class Pairing:
    """The pairs to compare, and notes about them for the answer."""

    batches: Iterator[PairBatch | FilePair]
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
        return Pairing(_by_file(a, b, left, right, names), notes, is_by_file=True)
    return _by_name(a, b, notes)


def _are_other_models(a: Weights, b: Weights) -> bool:
    """Whether the sides have different parameters, so that ZeRO splits their flat shards at different places."""
    is_known = a.metadata.shapes.keys() == b.metadata.shapes.keys() and not (a.broken or b.broken)
    return is_known and a.metadata.shapes != b.metadata.shapes


def _by_file(
    a: Weights, b: Weights, left: dict[str, Source], right: dict[str, Source], names: Sequence[str]
) -> Iterator[PairBatch | FilePair]:
    metadata_a, metadata_b = _metadata_of_both(a, b)
    has_one_metadata = metadata_a == metadata_b
    lost = {item.path.stem for item in (*a.broken, *b.broken) if item.path.exists()}
    for name in names:
        source_a, source_b = left.get(name), right.get(name)
        if (source_a is None or source_b is None) and name in lost:
            continue
        if source_a and source_b and source_a.format == source_b.format == "digests":
            yield _digest_batch(name, source_a, source_b)
        else:
            yield FilePair(name, source_a, source_b, metadata_a, metadata_b, has_one_metadata)


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


def pair_tensors(a: Sequence[StoredTensor], b: Sequence[StoredTensor]) -> Iterator[TensorPair]:
    """Pair by role and name, in the order of `a`, then the tensors that only `b` has."""
    right = {(tensor.role, tensor.name): tensor for tensor in b}
    for tensor in a:
        yield tensor, right.pop((tensor.role, tensor.name), None)
    for tensor in right.values():
        yield None, tensor


def pair_values(a: Sequence[StoredValue], b: Sequence[StoredValue]) -> Iterator[ValuePair]:
    """Pair by name, in the order of `a`, then the values that only `b` has."""
    right = {value.name: value for value in b}
    for value in a:
        yield value, right.pop(value.name, None)
    for value in right.values():
        yield None, value


def _digest_batch(name: str, a: Source, b: Source) -> PairBatch:
    """Pair one rank's digests on both sides. Only tensors that differ become pairs."""
    from bigsci_launch.weights.formats.digests import digest_tensor, digest_values, read_two_digests

    try:
        left, right = read_two_digests(a.path, b.path)
    except UnreadableFile as error:
        return PairBatch(name, unreadable=(Unreadable(error.path, error.why),))
    values = tuple(pair_values(digest_values(left), digest_values(right))) if left.others != right.others else ()
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


def _by_name(a: Weights, b: Weights, notes: tuple[str, ...]) -> Pairing:
    """Pair all tensors of both sides by name, because their files or topologies differ."""
    from bigsci_launch.weights.match.logical import as_weights, pair_logically, shared_roles
    from bigsci_launch.weights.match.sharding import ShardingHints

    left, right = _everything(a), _everything(b)
    held = {tensor.role for tensor in left.tensors} & {tensor.role for tensor in right.tensors} & {"weight", "fp32"}
    tensors_a, tensors_b = left.tensors, right.tensors
    if not held:
        tensors_a, tensors_b = as_weights(tensors_a), as_weights(tensors_b)
    roles, lacking = shared_roles(tensors_a, tensors_b)
    are_alike = (
        a.topology == b.topology and a.layout == b.layout and left.is_more_than_weights and right.is_more_than_weights
    )
    if are_alike:
        roles = roles | {"other"}
    else:
        lacking += _left_out(left, right)
    tensors_a, tensors_b = ([t for t in side if t.role in roles] for side in (tensors_a, tensors_b))
    lost: list[StoredTensor] = []
    hints = ShardingHints.of_metadata(a.metadata if a.metadata.universal_info else b.metadata)
    pairs = list(pair_logically(tensors_a, tensors_b, hints, lost))
    first = PairBatch(
        "",
        values=tuple(pair_values(left.values, right.values)) if are_alike else (),
        not_read=(*left.not_read, *right.not_read),
        unreadable=(*left.unreadable, *right.unreadable, *_cut_otherwise(lost)),
        owns_files=False,
    )
    return Pairing(_cut(pairs, first), (*notes, *_topology_note(a, b), *lacking))


def _left_out(a: Everything, b: Everything) -> Iterator[str]:
    """Yield a note for each side that has entries which only a checkpoint of the same layout can have."""
    for side, held in (("A", a), ("B", b)):
        others = sum(tensor.role == "other" for tensor in held.tensors)
        counted = ((others, "other tensor"), (len(held.values), "value"))
        counts = [f"{number:,} {word}{'s' * (number != 1)}" for number, word in counted if number]
        if counts:
            yield f"{' and '.join(counts)} of {side}, outside the model's weights: not compared"


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


@dataclass(frozen=True, slots=True)
class Everything:
    """All entries of one side."""

    tensors: list[StoredTensor]
    values: list[StoredValue]
    not_read: list[NotRead]
    unreadable: list[Unreadable]

    @property
    def is_more_than_weights(self) -> bool:
        return bool(self.values) or any(tensor.role == "other" for tensor in self.tensors)


def _everything(weights: Weights) -> Everything:
    from bigsci_launch.weights.match.logical import join_dp

    found = Everything([], [], [], [])
    for source in weights.sources:
        try:
            contents = read_contents(source, weights.metadata)
        except UnreadableFile as error:
            found.unreadable.append(Unreadable(error.path, error.why))
            continue
        found.tensors.extend(contents.tensors)
        found.values.extend(contents.values)
        found.not_read.extend(contents.not_read)
    return replace(found, tensors=join_dp(found.tensors, weights.metadata), values=_told_apart(found.values))


def _told_apart(values: Sequence[StoredValue]) -> list[StoredValue]:
    """Return values with the file's name before theirs if several files have a value of that name."""
    counts = Counter(value.name for value in values)
    return [
        value if counts[value.name] == 1 else replace(value, name=f"{value.path.name}: {value.name}")
        for value in values
    ]


def _cut(pairs: Sequence[TensorPair], first: PairBatch) -> Iterator[PairBatch]:
    yield first
    for start in range(0, len(pairs), PAIRS_AT_A_TIME):
        yield PairBatch("", tuple(pairs[start : start + PAIRS_AT_A_TIME]), owns_files=False)

"""Which tensor of one side is compared with which of the other, a bounded number at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bigsci_launch.weights.contents import read_contents
from bigsci_launch.weights.locate import labels
from bigsci_launch.weights.sources import Contents, Model, OptimizerGroup, Source, Unreadable, Weights
from bigsci_launch.weights.tensors import Place, StoredTensor, UnreadableFile

Pair = tuple[StoredTensor | None, StoredTensor | None]


@dataclass(frozen=True, slots=True)
class Bundle:
    """Pairs that are compared together: those of a file of each side. None on one side: the other alone has it."""

    title: str
    pairs: tuple[Pair, ...] = ()
    unreadable: tuple[Unreadable, ...] = ()
    groups: tuple[tuple[Place, tuple[OptimizerGroup, ...], tuple[OptimizerGroup, ...]], ...] = ()


def bundles(a: Weights, b: Weights) -> tuple[int, Iterator[Bundle]]:
    """How many bundles there are, and the bundles: by file where the sides share file names, else all by name."""
    left, right = labels(a.sources), labels(b.sources)
    if left.keys() & right.keys():
        names = list(dict.fromkeys([*left, *right]))
        return len(names), _by_file(a, b, left, right, names)
    return 1, iter([_by_name(a, b)])


def _by_file(
    a: Weights, b: Weights, left: dict[str, Source], right: dict[str, Source], names: Sequence[str]
) -> Iterator[Bundle]:
    model_a, model_b = _models(a, b)
    lost = {item.path.stem for item in (*a.broken, *b.broken) if item.path.exists()}
    for name in names:
        source_a, source_b = left.get(name), right.get(name)
        if (source_a is None or source_b is None) and name in lost:
            continue
        yield _file_bundle(name, source_a, source_b, model_a, model_b)


def _models(a: Weights, b: Weights) -> tuple[Model, Model]:
    """The models of both sides; where one lost files that name its parameters, the other's stands in."""
    if a.topology != b.topology or len(a.model.shapes) == len(b.model.shapes):
        return a.model, b.model
    fuller = max(a.model, b.model, key=lambda model: len(model.shapes))
    return fuller, fuller


def _file_bundle(name: str, a: Source | None, b: Source | None, model_a: Model, model_b: Model) -> Bundle:
    unreadable = []
    contents = []
    for source, model in ((a, model_a), (b, model_b)):
        try:
            contents.append(read_contents(source, model) if source else Contents(()))
        except UnreadableFile as error:
            unreadable.append(Unreadable(error.path, error.why))
    if unreadable:
        return Bundle(name, unreadable=tuple(unreadable))
    left, right = contents
    source = a or b
    assert source is not None
    groups = ((source.place, left.groups, right.groups),) if left.groups or right.groups else ()
    return Bundle(name, tuple(pair_tensors(left.tensors, right.tensors)), groups=groups)


def pair_tensors(a: Sequence[StoredTensor], b: Sequence[StoredTensor]) -> Iterator[Pair]:
    """Pairs by role and name, in the order of `a`, then what `b` alone has."""
    right = {(tensor.role, tensor.name): tensor for tensor in b}
    for tensor in a:
        yield tensor, right.pop((tensor.role, tensor.name), None)
    for tensor in right.values():
        yield None, tensor


def _by_name(a: Weights, b: Weights) -> Bundle:
    """All tensors of both sides by name: for sides whose files are cut differently."""
    unreadable: list[Unreadable] = []
    left, right = _all_tensors(a, unreadable), _all_tensors(b, unreadable)
    return Bundle("", tuple(pair_tensors(left, right)), tuple(unreadable))


def _all_tensors(weights: Weights, unreadable: list[Unreadable]) -> list[StoredTensor]:
    tensors: list[StoredTensor] = []
    for source in weights.sources:
        try:
            tensors += read_contents(source, weights.model).tensors
        except UnreadableFile as error:
            unreadable.append(Unreadable(error.path, error.why))
    return tensors

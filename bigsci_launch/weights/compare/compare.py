"""Compares two sets of weights: first the bits, in mapped memory; then statistics for what differs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from bigsci_launch.errors import CheckpointError
from bigsci_launch.progress import Progress, no_progress
from bigsci_launch.weights.compare.comparison import (
    Comparison,
    Difference,
    DifferenceKind,
    Selection,
    ValueDifference,
    names_text,
    title_of,
)
from bigsci_launch.weights.compare.components import ComponentTally
from bigsci_launch.weights.compare.printed import PrintedTensors, measure_printed
from bigsci_launch.weights.compare.reading import EVERY_BYTE, ReadPlan, has_numpy, require_numpy
from bigsci_launch.weights.compare.work import Compared, Work, either, is_equal
from bigsci_launch.weights.files.boxes import chunks_of
from bigsci_launch.weights.files.mapped import UnreadableFile
from bigsci_launch.weights.files.pool import MANY_FILES, FilePool, many_open_files
from bigsci_launch.weights.files.sources import CheckpointMetadata, OptimizerGroup, Unreadable, Weights
from bigsci_launch.weights.files.tensors import NotRead, Place, StoredTensor, TensorPair, has_numbers
from bigsci_launch.weights.match.batches import PairBatch
from bigsci_launch.weights.match.copies import is_copied, tied_pairs, tp_pairs
from bigsci_launch.weights.match.logical import join_dp
from bigsci_launch.weights.match.pairing import Pairing, pair_weights
from bigsci_launch.weights.match.sharding import ShardingHints

if TYPE_CHECKING:
    from bigsci_launch.weights.compare.statistics import Statistics

EVERYTHING = Selection()


@dataclass
class _Tally:
    """What a running comparison has found so far."""

    num_compared: int = 0
    num_within_tolerance: int = 0
    num_bytes: int = 0
    differences: list[Difference] = field(default_factory=list)
    unreadable: list[Unreadable] = field(default_factory=list)
    num_values: int = 0
    value_differences: list[ValueDifference] = field(default_factory=list)
    not_read: list[NotRead] = field(default_factory=list)
    components: ComponentTally = field(default_factory=ComponentTally)
    notes: list[str] = field(default_factory=list)
    places: dict[str, set[Place]] = field(default_factory=dict)
    # Keyed by names, because ranks of a stage have the same names: the places where all of these are known to be equal.
    equal_at: dict[tuple[str, ...], set[Place]] = field(default_factory=dict)
    printed: PrintedTensors = field(default_factory=PrintedTensors)
    # What differs, but is no part of the state.
    padding: list[str] = field(default_factory=list)
    # What is not equal bit by bit, if numpy is not there to measure it.
    unmeasured: list[str] = field(default_factory=list)
    about_run: dict[str, str] = field(default_factory=dict)
    # Tensors of A that other ranks of A also have.
    copies: list[StoredTensor] = field(default_factory=list)
    groups_a: dict[Place, tuple[OptimizerGroup, ...]] = field(default_factory=dict)
    groups_b: dict[Place, tuple[OptimizerGroup, ...]] = field(default_factory=dict)


def compare_weights(
    a: Weights,
    b: Weights,
    *,
    selection: Selection = EVERYTHING,
    tolerance: float | None = None,
    plan: ReadPlan = EVERY_BYTE,
    report_progress: Progress = no_progress,
) -> Comparison:
    """Compare every tensor of `a` with its counterpart in `b`.

    A tensor whose relative L2 distance is at most `tolerance` counts as equal; with None, every bit counts. Files that
    cannot be read are listed, and the rest is compared. `report_progress` gets the bytes of A that are done.

    Raises:
        CheckpointError: the sides have no tensor in common, or none is selected; or their digests cannot be compared.
        BslError: something differs, and numpy, which measures the difference, is not installed.
    """
    tally = _Tally(unreadable=[*a.broken, *b.broken], components=ComponentTally.of_sides(a, b))
    files = FilePool(many_open_files(), in_samples=plan.sample is not None)
    hints = ShardingHints.of_metadata(a.metadata)
    pairing = pair_weights(a, b)
    if plan.digests and not pairing.is_by_file:
        raise CheckpointError(
            f"no digests to compare: {a.path} and {b.path} are split in different ways",
            hint="leave out --digests to compare the bytes",
        )
    with Work(files, selection, plan, report_progress=report_progress) as work:
        for batch, compared in _outcomes(work, pairing):
            _note(batch, selection, tally)
            for outcome in compared:
                _settle(outcome, tolerance, plan.sample, tally, files)
                tally.copies += (one for one in outcome.pair[:1] if one and is_copied(one, hints))
            if batch.owns_files:
                _close(batch, files)
    files.close_all()
    _require_something(a, b, tally)
    if tally.unmeasured:
        differing = names_text(tuple(dict.fromkeys(tally.unmeasured)))
        require_numpy(f"{len(tally.unmeasured)} tensors are not equal ({differing})")
    return Comparison(
        a=a.path,
        b=b.path,
        num_compared=tally.num_compared,
        num_within_tolerance=tally.num_within_tolerance,
        num_bytes=tally.num_bytes,
        differences=tuple(tally.differences),
        unreadable=tuple(tally.unreadable),
        places=_all_places(tally),
        groups_a=tally.groups_a,
        groups_b=tally.groups_b,
        notes=(*pairing.notes, *tally.notes, *tally.printed.notes(), *_asides(tally)),
        steps=(a.metadata.global_steps, b.metadata.global_steps),
        num_values=tally.num_values,
        value_differences=tuple(tally.value_differences),
        not_read=tuple(tally.not_read),
        components=tally.components.counts(
            tally.differences, tally.value_differences, tally.not_read, tally.unreadable
        ),
        is_printed=bool(tally.printed.found),
        apart=_names_apart(tally.copies, a.metadata, hints) if plan.is_of_every_byte else frozenset(),
        extent=work.extent,
    )


def _asides(tally: _Tally) -> Iterator[str]:
    """Yield notes about what differs and is no difference: it is no part of the state."""
    if tally.padding:
        behind = names_text(tuple(dict.fromkeys(tally.padding)))
        yield f"padding behind {behind} differs: the program that wrote it does not initialize it"
    if tally.about_run:
        differing = "; ".join(f"{name} is {text}" for name, text in tally.about_run.items())
        yield f"about the run, not its state: {differing}"


def _outcomes(work: Work, pairing: Pairing) -> Iterator[tuple[PairBatch, list[Compared]]]:
    yield from work.outcomes(pairing.batches)
    yield from work.outcomes(pairing.rest())


def _all_places(tally: _Tally) -> dict[str, frozenset[Place]]:
    for names, places in tally.equal_at.items():
        for name in names:
            tally.places.setdefault(name, set()).update(places)
    return {name: frozenset(places) for name, places in tally.places.items()}


def _names_apart(copies: Sequence[StoredTensor], metadata: CheckpointMetadata, hints: ShardingHints) -> frozenset[str]:
    held = join_dp(copies, metadata)
    files = FilePool(MANY_FILES)
    pairs = [*tied_pairs(held), *tp_pairs(held, hints)]
    names = frozenset(pair.other.name for pair in pairs if not is_equal((pair.first, pair.other), files))
    files.close_all()
    return names


def _require_something(a: Weights, b: Weights, tally: _Tally) -> None:
    """Require that at least one tensor was compared, or that a file could not be read.

    Raises:
        CheckpointError: no tensor of one side has a counterpart on the other, or none was selected.
    """
    if tally.num_compared or tally.num_values or tally.unreadable or tally.not_read:
        return
    only_a, only_b = (
        [difference.name for difference in tally.differences if difference.kind == kind]
        for kind in ("missing", "extra")
    )
    if not only_a and not only_b:
        raise CheckpointError(
            f"{a.path} and {b.path}: no tensor is left to compare", hint="see --include and --exclude"
        )
    raise CheckpointError(
        f"{a.path} and {b.path} have no tensor in common",
        hint=f"A contains {names_text(tuple(only_a)) or 'none'}, B contains {names_text(tuple(only_b)) or 'none'}",
    )


def _note(batch: PairBatch, selection: Selection, tally: _Tally) -> None:
    tally.unreadable += batch.unreadable
    tally.notes += (*map(str, batch.left_out), *batch.notes)
    equal = batch.equal if selection == EVERYTHING else tuple(filter(selection.takes, batch.equal))
    tally.num_compared += len(equal)
    tally.equal_at.setdefault(equal, set()).add(batch.place)
    tally.not_read += (entry for entry in batch.not_read if selection.takes(entry.name, "other"))
    for value_a, value_b in batch.values:
        value = value_a or value_b
        if value is None or not selection.takes(value.name, "other"):
            continue
        is_differing = value_a is None or value_b is None or value_a.content != value_b.content
        if is_differing and value.is_about_run:
            texts = ("nothing" if one is None else one.text for one in (value_a, value_b))
            tally.about_run[value.name] = "{} in A, {} in B".format(*texts)
            continue
        if value_a is not None and value_b is not None:
            tally.num_values += 1
            tally.components.add_value((value_a, value_b))
        if is_differing:
            tally.value_differences.append(ValueDifference(value.name, value.place, value_a, value_b))
    for place, groups_a, groups_b in batch.groups:
        tally.groups_a[place] = groups_a
        tally.groups_b[place] = groups_b


def _settle(outcome: Compared, tolerance: float | None, sample: float | None, tally: _Tally, files: FilePool) -> None:
    tensor = either(outcome.pair)
    if tensor.role == "padding":
        tally.padding += [tensor.name] * (not outcome.is_equal)
        return
    tally.places.setdefault(tensor.name, set()).add(tensor.place)
    tally.printed.add(outcome.pair)
    if None not in outcome.pair:
        tally.num_compared += 1
        tally.components.add_tensor(outcome.pair)
        tally.num_bytes += tensor.num_bytes if all(one and one.has_bytes for one in outcome.pair) else 0
    if outcome.is_equal:
        return
    if not has_numpy():
        tally.unmeasured.append(title_of(tensor.name, tensor.role))
        return
    try:
        difference = difference_of_pair(outcome.read, files)
    except UnreadableFile as error:
        tally.unreadable.append(Unreadable(error.path, error.why))
        return
    if difference is None:
        return
    if sample is not None and outcome.read is not outcome.pair:
        difference = _of_whole(difference, outcome.pair, sample)
    if _is_within(difference, tolerance):
        tally.num_within_tolerance += 1
    else:
        tally.differences.append(difference)


def _of_whole(difference: Difference, pair: TensorPair, share: float) -> Difference:
    """Return a difference between samples as one between the tensors; its figures remain those of the samples."""
    from bigsci_launch.weights.compare.sample import position_in_whole

    statistics = difference.statistics
    if statistics is not None:
        first, worst = (
            position_in_whole(position, either(pair).num_elements, share)
            for position in (statistics.first, statistics.worst)
        )
        statistics = replace(statistics, first=first, worst=worst)
    return replace(difference, a=pair[0], b=pair[1], statistics=statistics)


def _is_within(difference: Difference, tolerance: float | None) -> bool:
    statistics = difference.statistics
    if tolerance is None or statistics is None or statistics.num_nan_on_one_side or statistics.num_infinite_apart:
        return False
    if any(side is not None and not has_numbers(side.dtype) for side in (difference.a, difference.b)):
        return False
    relative = statistics.relative
    return statistics.num_unequal == 0 or (relative is not None and relative <= tolerance)


def difference_of_pair(pair: TensorPair, files: FilePool) -> Difference | None:
    """Return how a pair that is not known to be equal differs; None if it does not."""
    a, b = pair
    tensor = either(pair)
    if a is None or b is None:
        return Difference(tensor.name, tensor.role, tensor.place, "missing" if b is None else "extra", a, b)
    if a.has_shape and b.has_shape:
        if a.shape != b.shape:
            return Difference(a.name, a.role, a.place, "shape", a, b)
        if a.digest is not None or b.digest is not None:
            return Difference(a.name, a.role, a.place, "dtype" if a.dtype != b.dtype else "value", a, b)
    statistics = _measured(a, b, files)
    if statistics is None:
        return Difference(a.name, a.role, a.place, "shape", a, b)
    if statistics.num_differing == 0 and a.dtype == b.dtype:
        return None
    return Difference(a.name, a.role, a.place, _kind(a, b, statistics), a, b, statistics)


def _measured(a: StoredTensor, b: StoredTensor, files: FilePool) -> Statistics | None:
    """Return the statistics of a pair; None if the printed elements cannot belong to tensors of one shape."""
    if a.has_shape and b.has_shape:
        return measure_pair(a, b, files)
    return measure_printed(a, b, files)


def _kind(a: StoredTensor, b: StoredTensor, statistics: Statistics) -> DifferenceKind:
    if a.dtype != b.dtype:
        return "dtype"
    if statistics.num_nan_on_one_side:
        return "nan"
    return "value" if statistics.num_unequal else "bits"


def measure_pair(a: StoredTensor, b: StoredTensor, files: FilePool) -> Statistics:
    """Measure the difference between two tensors of equal shape.

    This uses one thread: numpy's calls on cache-sized pieces are so short that threads would wait for each other.
    """
    from bigsci_launch.weights.compare.statistics import measure

    return measure(a, b, files)


def _close(batch: PairBatch, files: FilePool) -> None:
    tensors = [tensor for pair in batch.pairs for tensor in pair if tensor]
    paths = {segment.path for tensor in tensors for chunk in chunks_of(tensor) for segment in chunk.tensor.segments}
    for path in paths:
        files.close(path)

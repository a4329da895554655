"""Describes copies within one checkpoint that drifted apart: how far, and why."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bigsci_launch.progress import Progress, no_progress
from bigsci_launch.topology.naming import agree
from bigsci_launch.weights.compare.compare import EVERYTHING, difference_of_pair, measure_pair
from bigsci_launch.weights.compare.comparison import (
    Difference,
    DifferenceKind,
    Selection,
    WeightsFinding,
    names_text,
)
from bigsci_launch.weights.compare.places import describe_places
from bigsci_launch.weights.compare.statistics import measure_rounded
from bigsci_launch.weights.compare.work import is_equal
from bigsci_launch.weights.explain.causes import Cause, CopyState, cause_of_constant, cause_of_drift
from bigsci_launch.weights.explain.patterns import constant_of
from bigsci_launch.weights.files.mapped import UnreadableFile
from bigsci_launch.weights.files.pool import MANY_FILES, FilePool
from bigsci_launch.weights.files.sources import OptimizerGroup, Unreadable, Weights
from bigsci_launch.weights.files.tensors import NotRead, Place, StoredTensor, StoredValue, TensorRole
from bigsci_launch.weights.formats.contents import read_contents
from bigsci_launch.weights.match.copies import TIED, CopyPair, Relation, tied_pairs, tp_pairs
from bigsci_launch.weights.match.entries import unwrapped_tensors
from bigsci_launch.weights.match.logical import join_dp
from bigsci_launch.weights.match.sharding import ShardingHints

AXIS: dict[str, str] = {"tied copies": "pp", "tp replicas": "tp", "dp replicas": "dp"}
MASTER: Relation = "16-bit and its master"
MOMENTS: tuple[TensorRole, TensorRole] = ("exp_avg", "exp_avg_sq")
# Causes of a copy without a gradient: a module tied by its weight can contain parameters that are not tied.
UNTIED = ("never trained", "decay only", "no gradient")
WORDS = {
    "tied copies": "differs from its tied copy",
    "tp replicas": "differs between tp ranks, but should be the same on every tp rank",
    "dp replicas": "differs between dp ranks, but should be the same on every dp rank",
    MASTER: "is not equal to its rounded fp32 master",
}


@dataclass(frozen=True, slots=True)
class Holdings:
    """All tensors and values of a checkpoint, its optimizer groups by place, and what could not be read.

    `steps` are the steps that files state.
    """

    tensors: tuple[StoredTensor, ...]
    groups: dict[Place, tuple[OptimizerGroup, ...]]
    unreadable: tuple[Unreadable, ...]
    not_read: tuple[NotRead, ...] = ()
    steps: Mapping[Path, int] = field(default_factory=dict)
    values: tuple[StoredValue, ...] = ()

    _first: dict[tuple[TensorRole, str, Place], StoredTensor] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        found: dict[tuple[TensorRole, str, Place], StoredTensor] = {}
        for tensor in self.tensors:
            found.setdefault((tensor.role, tensor.name, replace(tensor.place, dp=None)), tensor)
        object.__setattr__(self, "_first", found)

    def find(self, role: TensorRole, name: str, place: Place) -> StoredTensor | None:
        """Return the tensor at a place, ignoring the dp rank."""
        return self._first.get((role, name, replace(place, dp=None)))


def hold(weights: Weights, selection: Selection = EVERYTHING, report_progress: Progress = no_progress) -> Holdings:
    """Read the headers of all files; no tensor bytes are read."""
    tensors: list[StoredTensor] = []
    groups: dict[Place, tuple[OptimizerGroup, ...]] = {}
    unreadable = list(weights.broken)
    not_read: list[NotRead] = []
    steps: dict[Path, int] = {}
    values: list[StoredValue] = []
    for done, source in enumerate(weights.sources):
        try:
            contents = read_contents(source, weights.metadata)
        except UnreadableFile as error:
            unreadable.append(Unreadable(error.path, error.why))
            continue
        states = [tensor for tensor in contents.tensors if tensor.role != "padding"]
        held = unwrapped_tensors(states)
        tensors += (tensor for tensor in held if selection.takes(tensor.name, tensor.role))
        unreadable += contents.unreadable
        not_read += (entry for entry in contents.not_read if selection.takes(entry.name, "other"))
        values += (value for value in contents.values if selection.takes(value.name, "other"))
        if contents.groups:
            groups[source.place] = contents.groups
        if contents.step is not None:
            steps[source.path] = contents.step
        report_progress(done + 1, source.label)
    return Holdings(
        tuple(join_dp(tensors, weights.metadata)), groups, tuple(unreadable), tuple(not_read), steps, tuple(values)
    )


def copy_findings(weights: Weights, names: set[str], side: str) -> list[WeightsFinding]:
    """Find differences between the tied copies or tp replicas of some parameters within one side."""
    if not names:
        return []
    held = hold(weights, _named(names))
    holdings, source = with_moments(held, weights, names)
    files = FilePool(MANY_FILES)
    tied = [tensor for tensor in held.tensors if tensor.name.startswith(TIED)]
    pairs = [*tied_pairs(tied), *tp_pairs(held.tensors, ShardingHints.of_metadata(weights.metadata))]
    differences = compare_pairs(pairs, files)
    found = [
        replace(item, claim=f"in {side}, {item.claim}")
        for item in with_source(describe(differences, holdings, files), source)
    ]
    files.close_all()
    return found


def with_source(findings: Iterable[WeightsFinding], source: str) -> Iterator[WeightsFinding]:
    """Yield the findings; to the claims of those that name a cause, append its source."""
    for finding in findings:
        yield replace(finding, claim=f"{finding.claim}{source}") if ": " in finding.pattern else finding


def _named(names: set[str]) -> Selection:
    return Selection(include=(re.compile("|".join(f"^{re.escape(name)}$" for name in sorted(names))),))


def with_moments(held: Holdings, weights: Weights, names: set[str]) -> tuple[Holdings, str]:
    """Add the moments from the checkpoint that belongs to a dump, and return words that name the source."""
    if weights.moments_from is None or not names:
        return held, ""
    saved = hold(weights.moments_from, _named(names))
    moments = (tensor for tensor in saved.tensors if tensor.role in MOMENTS)
    source = f" (by the moments in {weights.moments_from.path.name})"
    return replace(held, tensors=(*held.tensors, *moments), groups=saved.groups), source


def compare_pairs(pairs: Sequence[CopyPair], files: FilePool) -> list[Difference]:
    """Return the differences of the pairs that are not equal, in order."""
    found = (difference_of_copies(pair, files) for pair in pairs)
    return [difference for difference in found if difference is not None]


def difference_of_copies(pair: CopyPair, files: FilePool) -> Difference | None:
    """Return how two copies differ; None if they are bit-identical."""
    if pair.relation == MASTER:
        return _difference_of_master(pair, files)
    if is_equal((pair.first, pair.other), files):
        return None
    difference = difference_of_pair((pair.first, pair.other), files)
    return difference and replace(difference, place=pair.other.place, relation=pair.relation)


def _difference_of_master(pair: CopyPair, files: FilePool) -> Difference | None:
    """Compare a weight with its rounded master. The place is the master's, as one weight file serves many ranks."""
    statistics = measure_rounded(pair.first, pair.other, files)
    if statistics is None or not statistics.num_differing:
        return None
    name, place = pair.other.name, pair.first.place
    kind: DifferenceKind = "value" if statistics.num_unequal else "bits"
    return Difference(name, "weight", place, kind, pair.first, pair.other, statistics, relation=pair.relation)


def describe(differences: Sequence[Difference], holdings: Holdings, files: FilePool) -> Iterator[WeightsFinding]:
    """Yield one finding per relation and cause. It also covers the moments and masters of the drifted copies."""
    causes = find_causes(differences, holdings, files)
    drifted = {d.name for d in differences if d.relation != MASTER and d.role in ("weight", "fp32")}
    groups: dict[tuple[str, str], list[Difference]] = {}
    for difference in differences:
        is_told = difference.name in drifted and (difference.relation == MASTER or difference.role in MOMENTS)
        if not is_told:
            cause = causes.get(_key(difference))
            groups.setdefault((difference.relation, cause.name if cause else ""), []).append(difference)
    everywhere = {tensor.place for tensor in holdings.tensors}
    for members in groups.values():
        yield _finding(members, causes, everywhere)


CopyKey = tuple[str, str, Place]


def _key(difference: Difference) -> CopyKey:
    return difference.relation, difference.name, replace(difference.place, dp=None)


def _finding(members: Sequence[Difference], causes: dict[CopyKey, Cause], everywhere: set[Place]) -> WeightsFinding:
    worst = max(members, key=lambda member: member.statistics.fraction if member.statistics else 1.0)
    names = tuple(dict.fromkeys(member.name for member in members))
    places = tuple(dict.fromkeys(member.place for member in members))
    where = describe_places(places, places, everywhere)
    cause = causes.get(_key(worst))
    subject = names_text(names) + (f" ({where})" if where else "")
    words = agree(WORDS[worst.relation], len(names)) + _against(worst)
    reason = f"; {f'in {worst.name}, ' if len(names) > 1 else ''}{cause.words}" if cause else ""
    claim = f"{subject} {words}: {_amount(worst, is_worst=len(members) > 1)}{reason}{_outlook(worst, cause)}"
    return WeightsFinding(_pattern(worst.relation, cause), names, places, claim)


def _against(difference: Difference) -> str:
    is_tied = difference.relation == "tied copies" and difference.a is not None
    return f" on pp{difference.a.place.pp}" if is_tied and difference.a else ""


def _pattern(relation: str, cause: Cause | None) -> str:
    if relation == "tied copies" and cause and cause.name in UNTIED:
        return "untied passenger"
    return f"{relation} apart" + (f": {cause.name}" if cause else "")


def _outlook(difference: Difference, cause: Cause | None) -> str:
    """Say what the next load will do: DeepSpeed saves and restores only the first stage's 16-bit copy."""
    if difference.relation != "tied copies" or difference.role != "fp32":
        return ""
    if cause and cause.name in UNTIED:
        return "; it is in the tied module but is not tied: no file of 16-bit weights contains it"
    return "; a load replaces its 16-bit weights with the first copy's"


def _amount(difference: Difference, *, is_worst: bool) -> str:
    statistics = difference.statistics
    if statistics is None:
        return "different shapes" if difference.kind == "shape" else "different digests"
    relative = "" if statistics.relative is None else f", rel {statistics.relative:.2g}"
    return f"{'up to ' if is_worst else ''}{statistics.fraction * 100:.3g} % of elements{relative}"


def find_causes(differences: Iterable[Difference], holdings: Holdings, files: FilePool) -> dict[CopyKey, Cause]:
    """Return the cause of each drift between copies: from the moments if known, otherwise from constant values."""
    causes: dict[CopyKey, Cause | None] = {}
    for difference in differences:
        key = _key(difference)
        if difference.role in ("fp32", "weight") and difference.relation != MASTER and key not in causes:
            causes[key] = _cause(difference, holdings, files)
    return {key: cause for key, cause in causes.items() if cause is not None}


def _cause(difference: Difference, holdings: Holdings, files: FilePool) -> Cause | None:
    if difference.a is None or difference.b is None:
        return None
    axis = AXIS[difference.relation]
    first, other = difference.a.place, difference.place
    at = (f"{axis}{getattr(first, axis)}", f"{axis}{getattr(other, axis)}")
    measured = []
    for role in MOMENTS:
        a, b = (holdings.find(role, difference.name, place) for place in (first, other))
        if a is None or b is None or a.num_elements != b.num_elements:
            constant = constant_of(difference.b, files)
            return None if constant is None else cause_of_constant(at[1], constant)
        measured.append(measure_pair(a, b, files))
    states = (_state(holdings, difference.a, files), _state(holdings, difference.b, files))
    return cause_of_drift(measured[0], measured[1], axis=axis, at=at, states=states)


def _state(holdings: Holdings, copy: StoredTensor, files: FilePool) -> CopyState:
    constant = constant_of(copy, files)
    for place, groups in holdings.groups.items():
        if (place.pp, place.tp) == (copy.place.pp, copy.place.tp):
            for group in groups:
                if copy.name in group.names:
                    return CopyState(constant, group.weight_decay, group.learning_rate, group.step)
    return CopyState(constant, None, None, None)

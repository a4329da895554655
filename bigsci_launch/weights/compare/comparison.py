"""The result of a comparison, as values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bigsci_launch.errors import ConfigError, Problem
from bigsci_launch.weights.compare.places import describe_places
from bigsci_launch.weights.compare.reading import Extent
from bigsci_launch.weights.files.sources import Component, OptimizerGroup, Unreadable
from bigsci_launch.weights.files.tensors import NotRead, Place, StoredTensor, StoredValue, TensorRole

if TYPE_CHECKING:  # numpy is loaded only once something differs
    from bigsci_launch.weights.compare.statistics import Statistics

DifferenceKind = Literal["value", "bits", "missing", "extra", "shape", "dtype", "nan"]


def title_of(name: str, role: TensorRole) -> str:
    """Return a tensor's name as the answer shows it: `layer.weight`, `layer.weight exp_avg`."""
    return name if role in ("weight", "other") else f"{name} {role}"


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor that differs between the two sides at one place.

    `missing`: only `a` has it; `extra`: only `b` has it. `bits`: equal values stored as different bits (0.0 and -0.0,
    NaN payloads). `nan`: NaN on one side where the other has a number. `likely` names the cause if one was found.
    In an audit, `relation` says how the two copies are related.
    """

    name: str
    role: TensorRole
    place: Place
    kind: DifferenceKind
    a: StoredTensor | None
    b: StoredTensor | None
    statistics: Statistics | None = None
    likely: str | None = None
    relation: str = ""

    @property
    def title(self) -> str:
        """The tensor's name, with its role and relation: `layer.weight`, `layer.weight exp_avg`."""
        named = title_of(self.name, self.role)
        return f"{named} ({self.relation})" if self.relation else named


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """A value that differs, or that only one side has (the other is then None)."""

    name: str
    place: Place
    a: StoredValue | None
    b: StoredValue | None


@dataclass(frozen=True, slots=True)
class ComponentCounts:
    """What was compared in one part of a checkpoint. `differing` and `alone` count tensors, then values.

    `alone` are those on one side only. `only_in` is the side that has this part, if the other has no such file.
    """

    name: Component
    num_tensors: int
    num_values: int
    differing: tuple[int, int]
    alone: tuple[int, int]
    num_not_read: int
    num_unreadable: int
    only_in: Literal["A", "B"] | None = None


@dataclass(frozen=True, slots=True)
class WeightsFinding:
    """One statement of the answer: a pattern, the tensors and places that show it, and a claim in words."""

    pattern: str
    tensors: tuple[str, ...]
    places: tuple[Place, ...]
    claim: str
    is_fault: bool = True


@dataclass(frozen=True, slots=True)
class Selection:
    """Which tensors are compared: those that match any of `include` (all if empty) and none of `exclude`.

    Masters and moments are matched by two names: the parameter's, and the one that the answer shows
    (`layer.weight exp_avg`).
    """

    include: tuple[re.Pattern[str], ...] = ()
    exclude: tuple[re.Pattern[str], ...] = ()

    def takes(self, name: str, role: TensorRole = "weight") -> bool:
        names = (name, title_of(name, role))
        if any(pattern.search(text) for pattern in self.exclude for text in names):
            return False
        return not self.include or any(pattern.search(text) for pattern in self.include for text in names)


def parse_selection(include: Sequence[str], exclude: Sequence[str]) -> Selection:
    """Parse a selection from regular expressions.

    Raises:
        ConfigError: an expression cannot be compiled.
    """
    compiled: dict[str, list[re.Pattern[str]]] = {"--include": [], "--exclude": []}
    for option, texts in (("--include", include), ("--exclude", exclude)):
        for text in texts:
            try:
                compiled[option].append(re.compile(text))
            except re.error as error:
                problem = Problem(option, "", f"{text!r} is not a valid regular expression ({error})")
                raise ConfigError(str(problem), problems=(problem,)) from error
    return Selection(tuple(compiled["--include"]), tuple(compiled["--exclude"]))


@dataclass(frozen=True)
class Comparison:
    """What was compared and what differs, in file order.

    `places` maps each tensor's name to all places where it was compared; `groups_a` and `groups_b` map places to the
    optimizer groups of the shards read there. `steps` are the steps that the two sides state. `apart` are the
    parameters whose copies inside A differ. `is_printed`: some tensors are known only as torch printed them.
    `num_values` values that are no tensors were compared; `not_read` are entries that could not be. `extent` says how
    many of the bytes were read; differences in a sample are certain, but their figures are those of the sample.
    `components` has the parts of the checkpoint, if a side has more than one.
    """

    a: Path
    b: Path
    num_compared: int
    num_within_tolerance: int
    num_bytes: int
    differences: tuple[Difference, ...]
    unreadable: tuple[Unreadable, ...]
    places: Mapping[str, frozenset[Place]]
    groups_a: Mapping[Place, tuple[OptimizerGroup, ...]]
    groups_b: Mapping[Place, tuple[OptimizerGroup, ...]]
    notes: tuple[str, ...] = ()
    findings: tuple[WeightsFinding, ...] = ()
    steps: tuple[int | None, int | None] = (None, None)
    apart: frozenset[str] = frozenset()
    num_values: int = 0
    value_differences: tuple[ValueDifference, ...] = ()
    not_read: tuple[NotRead, ...] = ()
    extent: Extent = field(default_factory=Extent)
    components: tuple[ComponentCounts, ...] = ()
    is_printed: bool = False
    is_audit: bool = False
    is_empty: bool = False

    @cached_property
    def all_places(self) -> set[Place]:
        """Every place that has any of the tensors."""
        return {place for places in self.places.values() for place in places}

    @property
    def is_other_step(self) -> bool:
        """Whether both sides state their step and the steps differ."""
        return None not in self.steps and self.steps[0] != self.steps[1]

    @property
    def is_equal(self) -> bool:
        is_read = self.is_complete and not self.extent.is_sample
        return is_read and not self.is_different and not any(finding.is_fault for finding in self.findings)

    @property
    def is_different(self) -> bool:
        """Whether a difference was found, whatever was not read."""
        return bool(self.differences or self.value_differences)

    @property
    def is_complete(self) -> bool:
        """Whether every file and every entry was read."""
        return not self.unreadable and not self.not_read

    @property
    def num_equal(self) -> int:
        compared = sum(difference.a is not None and difference.b is not None for difference in self.differences)
        return self.num_compared - compared

    @property
    def exit_code(self) -> int:
        """0: equal; 1: different; 4: something was not read, or only a sample, in which nothing differs."""
        is_open = not self.is_complete or (self.extent.is_sample and not self.is_different)
        return 4 if is_open else 0 if self.is_equal else 1


def where_text(comparison: Comparison, differences: Iterable[Difference]) -> str:
    """Describe the places of some differences, among all places that have these tensors."""
    chosen = list(differences)
    holders = {place for difference in chosen for place in comparison.places[difference.name]}
    return describe_places({difference.place for difference in chosen}, holders, comparison.all_places)


def with_finding(comparison: Comparison | None, finding: WeightsFinding) -> Comparison:
    """Return the comparison with `finding` appended; given None, a comparison that contains only the finding."""
    if comparison is None:
        comparison = Comparison(Path(), Path(), 0, 0, 0, (), (), {}, {}, {}, is_empty=True)
    return replace(comparison, findings=(*comparison.findings, finding))


def names_text(titles: tuple[str, ...], limit: int = 3) -> str:
    """Return `x.weight`, or `x.weight, y.weight and 7 more`."""
    if len(titles) <= limit:
        return ", ".join(titles)
    return f"{', '.join(titles[:limit])} and {len(titles) - limit} more"

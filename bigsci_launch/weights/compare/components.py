"""Counts what was compared and what differs in each part of a checkpoint: weights, optimizer, scheduler and others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bigsci_launch.weights.compare.comparison import ComponentCounts, Difference, ValueDifference
from bigsci_launch.weights.files.sources import COMPONENTS, Component, Unreadable, Weights
from bigsci_launch.weights.files.tensors import NotRead, StoredTensor, StoredValue, TensorPair, ValuePair


@dataclass
class ComponentTally:
    """What a running comparison has compared in each component. It counts nothing if no side has several.

    A pair is in the component of its file on the side that has more components (`is_by_b`); `elsewhere` are those of
    the files on the other side, if they are others.
    """

    components: dict[Path, Component] = field(default_factory=dict)
    only_in: dict[Component, Literal["A", "B"]] = field(default_factory=dict)
    is_by_b: bool = False
    elsewhere: set[Component] = field(default_factory=set)
    tensors: Counter[Component] = field(default_factory=Counter)
    values: Counter[Component] = field(default_factory=Counter)

    @classmethod
    def of_sides(cls, a: Weights, b: Weights) -> ComponentTally:
        left, right = ({source.path: source.component for source in side.sources} for side in (a, b))
        held_a, held_b = set(left.values()), set(right.values())
        if len(held_a) <= 1 and len(held_b) <= 1:
            return cls()
        only_in: dict[Component, Literal["A", "B"]] = dict.fromkeys(held_a - held_b, "A")
        only_in.update(dict.fromkeys(held_b - held_a, "B"))
        return cls(left | right, only_in, len(held_b) > len(held_a))

    def add_tensor(self, pair: TensorPair) -> None:
        if self.components:
            self.tensors[self._of_pair(*pair)] += 1

    def add_value(self, pair: ValuePair) -> None:
        if self.components:
            self.values[self._of_pair(*pair)] += 1

    def _of(self, path: Path) -> Component:
        if path not in self.components:
            # A source may be a folder. Whatever is in no source, such as a missing shard, belongs to the weights.
            known = (self.components[folder] for folder in path.parents if folder in self.components)
            self.components[path] = next(known, "weights")
        return self.components[path]

    def counts(
        self,
        differences: Sequence[Difference],
        values: Sequence[ValueDifference],
        not_read: Sequence[NotRead],
        unreadable: Sequence[Unreadable],
    ) -> tuple[ComponentCounts, ...]:
        """Return the counts of each component, given all that differs or was not read; none if there is only one."""
        if not self.components:
            return ()
        tensors_differ, tensors_alone, values_differ, values_alone = (Counter[Component]() for _ in range(4))
        for difference in differences:
            counter = tensors_alone if difference.a is None or difference.b is None else tensors_differ
            counter[self._of_pair(difference.a, difference.b)] += 1
        for item in values:
            counter = values_alone if item.a is None or item.b is None else values_differ
            counter[self._of_pair(item.a, item.b)] += 1
        entries = Counter(self._of(entry.path) for entry in not_read)
        files = Counter(self._of(file.path) for file in unreadable)
        counters = (self.tensors, self.values, tensors_alone, values_alone, entries, files)
        counted = {name for counter in counters for name in counter}
        held = counted | ({*self.components.values()} - self.elsewhere)
        return tuple(
            ComponentCounts(
                name,
                self.tensors[name],
                self.values[name],
                (tensors_differ[name], values_differ[name]),
                (tensors_alone[name], values_alone[name]),
                entries[name],
                files[name],
                self.only_in.get(name),
            )
            for name in COMPONENTS
            if name in held
        )

    def _of_pair(self, a: StoredTensor | StoredValue | None, b: StoredTensor | StoredValue | None) -> Component:
        one, other = (b, a) if self.is_by_b else (a, b)
        one, other = one or other, other or one
        assert one is not None and other is not None
        component = self._of(one.path)
        if self._of(other.path) != component:
            self.elsewhere.add(self._of(other.path))
        return component

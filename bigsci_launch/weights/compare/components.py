"""Counts what was compared and what differs in each part of a checkpoint: weights, optimizer, scheduler and others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bigsci_launch.weights.compare.comparison import ComponentCounts, Difference, ValueDifference
from bigsci_launch.weights.files.sources import COMPONENTS, Component, Unreadable, Weights
from bigsci_launch.weights.files.tensors import NotRead, StoredTensor, StoredValue


@dataclass
class ComponentTally:
    """What a running comparison has compared in each component. It counts nothing if no side has several."""

    components: dict[Path, Component] = field(default_factory=dict)
    only_in: dict[Component, Literal["A", "B"]] = field(default_factory=dict)
    tensors: Counter[Component] = field(default_factory=Counter)
    values: Counter[Component] = field(default_factory=Counter)

    @classmethod
    def of_sides(cls, a: Weights, b: Weights) -> ComponentTally:
        left, right = ({source.path: source.component for source in side.sources} for side in (a, b))
        held_a, held_b = set(left.values()), set(right.values())
        if len(held_a) <= 1 and len(held_b) <= 1:
            return cls()
        return cls(left | right, {**dict.fromkeys(held_a - held_b, "A"), **dict.fromkeys(held_b - held_a, "B")})

    def add_tensor(self, tensor: StoredTensor) -> None:
        if self.components:
            self.tensors[self._of(tensor.path)] += 1

    def add_value(self, value: StoredValue) -> None:
        if self.components:
            self.values[self._of(value.path)] += 1

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
            counter[self._of_either(difference.a, difference.b)] += 1
        for item in values:
            counter = values_alone if item.a is None or item.b is None else values_differ
            counter[self._of_either(item.a, item.b)] += 1
        entries = Counter(self._of(entry.path) for entry in not_read)
        files = Counter(self._of(file.path) for file in unreadable)
        held = {*self.components.values(), *entries, *files}
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

    def _of_either(self, a: StoredTensor | StoredValue | None, b: StoredTensor | StoredValue | None) -> Component:
        one = a or b
        assert one is not None
        return self._of(one.path)

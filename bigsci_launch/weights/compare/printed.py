"""Compares tensors that are known only as torch printed them.

To keep start-up short, numpy and the reader of such dumps are imported only when needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bigsci_launch.units import format_percent
from bigsci_launch.weights.files.pool import FilePool
from bigsci_launch.weights.files.tensors import StoredTensor, TensorPair

if TYPE_CHECKING:
    from bigsci_launch.weights.compare.statistics import Statistics
    from bigsci_launch.weights.formats.text_dump import PrintedElement


@dataclass
class PrintedTensors:
    """The printed tensors of a comparison by name, each with its number of elements if the other side has it."""

    found: dict[str, tuple[StoredTensor, int | None]] = field(default_factory=dict)

    def add(self, pair: TensorPair) -> None:
        """Record `pair` if one of its sides is printed."""
        printed = next((one for one in pair if one and one.printed is not None), None)
        if printed is not None:
            known = next((one.num_elements for one in pair if one and one.has_shape), None)
            self.found.setdefault(printed.name, (printed, known))

    def notes(self) -> tuple[str, ...]:
        """Return a note about how few elements are printed; nothing if there are no printed tensors."""
        if not self.found:
            return ()
        from bigsci_launch.weights.formats.text_dump import printed_elements

        counts = [len(printed_elements(tensor)) for tensor, _ in self.found.values()]
        totals = [total for _, total in self.found.values() if total is not None]
        if len(totals) == len(counts):
            share = f"{sum(counts):,} of {sum(totals):,} elements ({format_percent(sum(counts) / max(1, sum(totals)))})"
        else:
            cut = sum("..." in (tensor.printed or "") for tensor, _ in self.found.values())
            share = f"{cut} of {len(counts)} tensors are cut to {max(counts, default=0)} elements or fewer"
        return (f"printed dumps show little: {share}, at about 4 digits; equal means equal as far as printed",)


def measure_printed(a: StoredTensor, b: StoredTensor, files: FilePool) -> Statistics | None:
    """Measure two printed tensors, or a printed and a stored one, over the printed elements at that precision.

    Return None if the shapes cannot be the same.
    """
    pairs = _printed_pairs(a, b) if a.printed and b.printed else _pairs_with_bytes(a, b, files)
    return None if pairs is None else _measure(list(pairs))


def _printed_pairs(a: StoredTensor, b: StoredTensor) -> Iterator[tuple[PrintedElement, PrintedElement]] | None:
    """Pair the elements of two printed tensors; None if their indices differ, which means different shapes."""
    from bigsci_launch.weights.formats.text_dump import printed_elements

    left, right = printed_elements(a), printed_elements(b)
    if [element.index for element in left] != [element.index for element in right]:
        return None
    return zip(left, right, strict=True)


def _pairs_with_bytes(
    a: StoredTensor, b: StoredTensor, files: FilePool
) -> list[tuple[PrintedElement, PrintedElement]] | None:
    from bigsci_launch.weights.files.elements import as_floats, read_elements
    from bigsci_launch.weights.formats.text_dump import PrintedElement, printed_elements

    text, stored = (a, b) if a.printed is not None else (b, a)
    pairs = []
    for shown in printed_elements(text):
        at = flat_index(shown.index, stored.shape)
        if at is None:
            return None
        value = float(as_floats(read_elements(stored, at, at + 1, files), stored.dtype)[0])
        exact = PrintedElement(shown.index, value, 0.0)
        pairs.append((shown, exact) if text is a else (exact, shown))
    return pairs


def flat_index(index: Sequence[int], shape: Sequence[int]) -> int | None:
    """Return an element's position in row-major order; None if the shape has no such element."""
    if len(index) != len(shape) or any(not -size <= i < size for i, size in zip(index, shape, strict=True)):
        return None
    at = 0
    for i, size in zip(index, shape, strict=True):
        at = at * size + i % size
    return at


def _same_as_printed(x: PrintedElement, y: PrintedElement) -> bool:
    if math.isnan(x.value) or math.isnan(y.value):
        return math.isnan(x.value) and math.isnan(y.value)
    if math.isinf(x.value) or math.isinf(y.value):
        return x.value == y.value
    return abs(x.value - y.value) <= (x.slack + y.slack) * (1 + 1e-9)


def _measure(pairs: Sequence[tuple[PrintedElement, PrintedElement]]) -> Statistics:
    from bigsci_launch.weights.compare.statistics import Statistics

    apart = [(x, y) for x, y in pairs if not _same_as_printed(x, y)]
    numbers = [(x.value, y.value) for x, y in pairs if math.isfinite(x.value) and math.isfinite(y.value)]
    # Gaps within the printed precision are not differences and must not add up to one.
    gaps = [x.value - y.value for x, y in apart if math.isfinite(x.value) and math.isfinite(y.value)]
    nan_a, nan_b = ([math.isnan(pair[side].value) for pair in pairs] for side in (0, 1))
    return Statistics(
        num_elements=len(pairs),
        num_differing=len(apart),
        num_unequal=len(apart),
        num_nan_a=sum(nan_a),
        num_nan_b=sum(nan_b),
        num_nan_on_one_side=sum(x != y for x, y in zip(nan_a, nan_b, strict=True)),
        max_abs=max(map(abs, gaps), default=0.0),
        max_ulp=None,
        sum_squares_a=sum(x * x for x, _ in numbers),
        sum_squares_b=sum(y * y for _, y in numbers),
        sum_products=sum(x * y for x, y in numbers),
        sum_squared_differences=sum(gap * gap for gap in gaps),
    )

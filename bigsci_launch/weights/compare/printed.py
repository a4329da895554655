"""A printed tensor against another printed one, or against the bytes of a tensor, at the printed precision."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bigsci_launch.weights.compare.statistics import Statistics
from bigsci_launch.weights.files.elements import as_floats, read_elements
from bigsci_launch.weights.files.mapped import FilePool
from bigsci_launch.weights.files.tensors import StoredTensor
from bigsci_launch.weights.files.text_dump import PrintedElement, printed_elements, printed_pairs, same_as_printed


def measure_printed(a: StoredTensor, b: StoredTensor, files: FilePool) -> Statistics | None:
    """Statistics over the elements that are printed; None where the shapes cannot be the same."""
    pairs = printed_pairs(a, b) if a.printed and b.printed else _pairs_with_bytes(a, b, files)
    return None if pairs is None else _measure(list(pairs))


def _pairs_with_bytes(
    a: StoredTensor, b: StoredTensor, files: FilePool
) -> list[tuple[PrintedElement, PrintedElement]] | None:
    text, stored = (a, b) if a.printed is not None else (b, a)
    pairs = []
    for shown in printed_elements(text.printed or ""):
        at = flat_index(shown.index, stored.shape)
        if at is None:
            return None
        value = float(as_floats(read_elements(stored, at, at + 1, files), stored.dtype)[0])
        exact = PrintedElement(shown.index, value, 0.0)
        pairs.append((shown, exact) if text is a else (exact, shown))
    return pairs


def flat_index(index: Sequence[int], shape: Sequence[int]) -> int | None:
    """The position of an element in row-major order; None where the shape has no such element."""
    if len(index) != len(shape) or any(not -size <= i < size for i, size in zip(index, shape, strict=True)):
        return None
    at = 0
    for i, size in zip(index, shape, strict=True):
        at = at * size + i % size
    return at


def _measure(pairs: Sequence[tuple[PrintedElement, PrintedElement]]) -> Statistics:
    apart = [(x, y) for x, y in pairs if not same_as_printed(x, y)]
    numbers = [(x.value, y.value) for x, y in pairs if math.isfinite(x.value) and math.isfinite(y.value)]
    # What lies within the printed precision is no difference, and must not add up to one.
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

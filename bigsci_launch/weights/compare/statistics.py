"""Measures how far apart two tensors are, in one pass over both and in chunks that stay in the cache.

The ulp distance is the number of representable values between two numbers, counting 0.0 and -0.0 as one. Across zero
it is large even for close numbers, so read it together with the relative L2 distance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from bigsci_launch.weights.files.elements import COMPLEX, Array, Window, as_floats, round_to, windows
from bigsci_launch.weights.files.pool import FilePool
from bigsci_launch.weights.files.small_floats import SCALE, SMALL_FLOATS, ordered_codes
from bigsci_launch.weights.files.tensors import StoredTensor

# Keeps temporary float32 arrays below the size above which malloc requests pages from the system every time.
CHUNK = 1 << 14
# Second moments of 1e-15 are common, and their squares underflow float32.
SAFE_SQUARES = (1e-24, 1e36)
SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
FLOATS = ("F64", "F32", "F16", "BF16", *SMALL_FLOATS, SCALE)


@dataclass(frozen=True, slots=True)
class Statistics:
    """The difference between two tensors of equal shape. Sums and maxima cover elements that are finite on both sides.

    `num_differing` counts elements with different bits, `num_unequal` those with different values; NaN equals NaN.
    `num_infinite_apart` counts elements of different values that are infinite on a side: no sum contains them.
    `max_ulp` is None unless both are floats of the same dtype. `first` and `worst` are positions in row-major order
    of the whole tensor: of the first differing element, and of the one that `max_abs` is about, if there are any.
    """

    num_elements: int
    num_differing: int
    num_unequal: int
    num_nan_a: int
    num_nan_b: int
    num_nan_on_one_side: int
    max_abs: float
    max_ulp: int | None
    sum_squares_a: float
    sum_squares_b: float
    sum_products: float
    sum_squared_differences: float
    first: int | None = None
    worst: int | None = None
    num_infinite_apart: int = 0

    @property
    def fraction(self) -> float:
        """Share of elements with different bits, 0 to 1."""
        return self.num_differing / self.num_elements if self.num_elements else 0.0

    @property
    def relative(self) -> float | None:
        """L2 norm of the difference divided by that of `a`; None if `a` is zero, or too large for its squares."""
        is_usable = 0 < self.sum_squares_a < math.inf
        return math.sqrt(self.sum_squared_differences / self.sum_squares_a) if is_usable else None

    @property
    def cosine(self) -> float | None:
        """Cosine of the angle between the two; None if either is zero, or too large for its squares."""
        product = self.sum_squares_a * self.sum_squares_b
        return self.sum_products / math.sqrt(product) if 0 < product < math.inf else None

    @property
    def norm_ratio(self) -> float | None:
        """L2 norm of `b` divided by that of `a`; None if `a` is zero, or too large for its squares."""
        return math.sqrt(self.sum_squares_b / self.sum_squares_a) if 0 < self.sum_squares_a < math.inf else None

    def __add__(self, other: Statistics) -> Statistics:
        """Combine the statistics of two pieces."""
        ulps = [ulp for ulp in (self.max_ulp, other.max_ulp) if ulp is not None]
        return Statistics(
            num_elements=self.num_elements + other.num_elements,
            num_differing=self.num_differing + other.num_differing,
            num_unequal=self.num_unequal + other.num_unequal,
            num_nan_a=self.num_nan_a + other.num_nan_a,
            num_nan_b=self.num_nan_b + other.num_nan_b,
            num_nan_on_one_side=self.num_nan_on_one_side + other.num_nan_on_one_side,
            max_abs=max(self.max_abs, other.max_abs),
            max_ulp=max(ulps) if ulps else None,
            sum_squares_a=self.sum_squares_a + other.sum_squares_a,
            sum_squares_b=self.sum_squares_b + other.sum_squares_b,
            sum_products=self.sum_products + other.sum_products,
            sum_squared_differences=self.sum_squared_differences + other.sum_squared_differences,
            first=min((first for first in (self.first, other.first) if first is not None), default=None),
            worst=self.worst if self.max_abs >= other.max_abs else other.worst,
            num_infinite_apart=self.num_infinite_apart + other.num_infinite_apart,
        )


NOTHING = Statistics(0, 0, 0, 0, 0, 0, 0.0, None, 0.0, 0.0, 0.0, 0.0)


def ranges(num_elements: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield `[0, step)`, `[step, 2 * step)`, ... up to `num_elements`."""
    for start in range(0, num_elements, step):
        yield start, min(start + step, num_elements)


def measure(a: StoredTensor, b: StoredTensor, files: FilePool) -> Statistics:
    """Measure the difference between two tensors of equal shape (dtypes may differ).

    Raises:
        UnreadableFile: a file has been removed or has become shorter.
    """
    total = NOTHING
    for window in windows(a, b, files, CHUNK):
        found = _chunk(window.left, window.right, a.dtype, b.dtype, total.max_abs)
        total += found if found.first is None else _moved(found, window)
    return total


def _moved(found: Statistics, window: Window) -> Statistics:
    first, worst = (at if at is None else window.position(at) for at in (found.first, found.worst))
    return replace(found, first=first, worst=worst)


def measure_rounded(master: StoredTensor, weight: StoredTensor, files: FilePool) -> Statistics | None:
    """Compare a 16-bit weight with its fp32 master rounded to nearest even; None for other dtypes."""
    if master.dtype != "F32" or weight.dtype not in ("BF16", "F16"):
        return None
    total = NOTHING
    for window in windows(master, weight, files, CHUNK):
        found = _chunk(round_to(window.left, weight.dtype), window.right, weight.dtype, weight.dtype, total.max_abs)
        total += found if found.first is None else _moved(found, window)
    return total


@np.errstate(all="ignore")
def _chunk(a: Array, b: Array, dtype_a: str, dtype_b: str, known: float = 0.0) -> Statistics:
    """Measure a window. Its worst element is looked up only if its difference is larger than the `known` one."""
    if dtype_a not in FLOATS or dtype_b not in FLOATS:
        return _chunk_in_float64(a, b, dtype_a, dtype_b, known)
    values_a, values_b = as_floats(a, dtype_a), as_floats(b, dtype_b)
    difference = values_a - values_b
    num_unequal = int(np.count_nonzero(difference))
    squares_a, squares_b = float(np.dot(values_a, values_a)), float(np.dot(values_b, values_b))
    squares = float(np.dot(difference, difference))
    if not (_is_exact(squares_a, values_a) and _is_exact(squares_b, values_b) and _is_exact(squares, num_unequal)):
        return _chunk_in_float64(a, b, dtype_a, dtype_b, known)
    max_abs = float(np.max(np.abs(difference, out=difference), initial=0.0))
    num_differing, first = _differing(a, b, dtype_a, dtype_b)
    return Statistics(
        num_elements=a.size,
        num_differing=num_differing,
        num_unequal=num_unequal,
        num_nan_a=0,
        num_nan_b=0,
        num_nan_on_one_side=0,
        max_abs=max_abs,
        max_ulp=_max_ulp(a, b, dtype_a) if dtype_a == dtype_b else None,
        sum_squares_a=squares_a,
        sum_squares_b=squares_b,
        sum_products=float(np.dot(values_a, values_b)),
        sum_squared_differences=squares,
        first=first,
        worst=int(difference.argmax()) if max_abs > known else None,
    )


def _is_exact(sum_of_squares: float, values: Array | int) -> bool:
    if sum_of_squares < SAFE_SQUARES[0]:
        return not np.any(values)
    return sum_of_squares < SAFE_SQUARES[1]


@np.errstate(all="ignore")
def _chunk_in_float64(a: Array, b: Array, dtype_a: str, dtype_b: str, known: float) -> Statistics:
    """Measure any window: integers, complex numbers, NaN, infinities, squares beyond float32. Slower, but exact.

    Complex numbers are pairs of values; counts are of elements. Differences of integers are taken between integers.
    """
    values_a, values_b = _alike(as_floats(a, dtype_a), as_floats(b, dtype_b), a.size)
    nan_a, nan_b = np.isnan(values_a), np.isnan(values_b)
    is_apart = ~_are_equal(a, b, dtype_a, dtype_b, values_a, values_b) & ~(nan_a & nan_b)
    is_finite = np.isfinite(values_a) & np.isfinite(values_b)
    left, right = values_a[is_finite], values_b[is_finite]
    difference = _distances(a, b, dtype_a, dtype_b) if _are_integers(dtype_a, dtype_b) else np.abs(left - right)
    max_abs = float(np.max(difference, initial=0.0))
    num_differing, first = _differing(a, b, dtype_a, dtype_b)
    worst = int(np.flatnonzero(is_finite)[difference.argmax()]) if max_abs > known else None
    is_float = dtype_a == dtype_b and dtype_a in FLOATS
    return Statistics(
        num_elements=a.size,
        num_differing=num_differing,
        num_unequal=_count(is_apart, a.size),
        num_nan_a=_count(nan_a, a.size),
        num_nan_b=_count(nan_b, a.size),
        num_nan_on_one_side=_count(nan_a ^ nan_b, a.size),
        max_abs=max_abs,
        max_ulp=_max_ulp(a[is_finite], b[is_finite], dtype_a) if is_float else None,
        sum_squares_a=float(np.dot(left, left)),
        sum_squares_b=float(np.dot(right, right)),
        sum_products=float(np.dot(left, right)),
        sum_squared_differences=float(np.dot(difference, difference)),
        first=first,
        worst=None if worst is None else worst * a.size // values_a.size,
        num_infinite_apart=_count(is_apart & (np.isinf(values_a) | np.isinf(values_b)), a.size),
    )


def _alike(a: Array, b: Array, num_elements: int) -> tuple[Array, Array]:
    """Return both as float64, as pairs if either is complex."""
    is_complex = max(a.size, b.size) > num_elements
    found = []
    for values in (a.astype(np.float64), b.astype(np.float64)):
        if is_complex and values.size == num_elements:
            values = np.stack([values, np.zeros_like(values)], axis=-1).reshape(-1)
        found.append(values)
    return found[0], found[1]


def _by_element(is_so: Array, num_elements: int) -> Array:
    """Return for which elements it is so, for at least one of the element's values."""
    return is_so if is_so.size == num_elements else np.asarray(is_so.reshape(num_elements, -1).any(axis=1))


def _count(is_so: Array, num_elements: int) -> int:
    return int(np.count_nonzero(_by_element(is_so, num_elements)))


def _are_integers(*dtypes: str) -> bool:
    return not any(dtype in FLOATS or dtype in COMPLEX for dtype in dtypes)


def _are_equal(a: Array, b: Array, dtype_a: str, dtype_b: str, values_a: Array, values_b: Array) -> Array:
    """Return where two values are equal. A float64 does not hold every integer of 64 bits, so it does not decide."""
    if _are_integers(dtype_a, dtype_b):
        return _equal_integers(a, b)
    if _are_integers(dtype_a) and values_a.size == a.size:
        return np.asarray((values_a == values_b) & _equal_integers(a, _as_integers(values_b, a)))
    if _are_integers(dtype_b) and values_b.size == b.size:
        return np.asarray((values_a == values_b) & _equal_integers(b, _as_integers(values_a, b)))
    return np.asarray(values_a == values_b)


def _equal_integers(a: Array, b: Array) -> Array:
    if a.dtype == b.dtype or max(a.itemsize, b.itemsize) < 8:
        return np.asarray(a == b)
    # Not every version of numpy compares signed and unsigned integers of 64 bits as integers.
    return np.asarray((a.astype(np.uint64) == b.astype(np.uint64)) & ((a < 0) == (b < 0)))


def _as_integers(values: Array, like: Array) -> Array:
    """Return floats as integers of the dtype of `like`, and 0 where a float is none of these."""
    limits = np.iinfo(like.dtype)
    is_inside = (values >= float(limits.min)) & (values < float(limits.max) + 1)
    return np.where(is_inside, values, 0).astype(like.dtype)


def _distances(a: Array, b: Array, dtype_a: str, dtype_b: str) -> Array:
    """Return the distances between integers, correctly rounded if the dtypes are the same."""
    if dtype_a != dtype_b:
        return np.abs(a.astype(np.float64) - b.astype(np.float64))
    # The distance of two signed integers fits an unsigned one of the same width, even if the subtraction overflows.
    distance = np.maximum(a, b) - np.minimum(a, b)
    return distance.view(UNSIGNED[a.itemsize]).astype(np.float64)


def _differing(a: Array, b: Array, dtype_a: str, dtype_b: str) -> tuple[int, int | None]:
    """Return how many elements have different bits (if the dtypes differ, different values), and the first of them."""
    are_apart = _are_apart(a, b, dtype_a, dtype_b)
    count = int(np.count_nonzero(are_apart))
    return count, int(are_apart.argmax()) if count else None


def _are_apart(a: Array, b: Array, dtype_a: str, dtype_b: str) -> Array:
    if dtype_a != dtype_b:
        values_a, values_b = _alike(as_floats(a, dtype_a), as_floats(b, dtype_b), a.size)
        return _by_element(~_are_equal(a, b, dtype_a, dtype_b, values_a, values_b), a.size)
    if a.itemsize == 16:
        return np.asarray((a.view(np.uint64) != b.view(np.uint64)).reshape(-1, 2).any(axis=1))
    bits = UNSIGNED[a.itemsize]
    return np.asarray(a.view(bits) != b.view(bits))


def _max_ulp(a: Array, b: Array, dtype: str) -> int:
    if not a.size:
        return 0
    left, right = _ordered(a, dtype), _ordered(b, dtype)
    distance = np.maximum(left, right) - np.minimum(left, right)
    # The distance of two signed integers fits an unsigned one of the same width, even if the subtraction overflows.
    return int(distance.view(UNSIGNED[a.itemsize]).max())


def _ordered(stored: Array, dtype: str) -> Array:
    """Return the bits of floats as integers in the order of their values, with both zeros as 0."""
    if dtype in SMALL_FLOATS or dtype == SCALE:
        return ordered_codes(stored, dtype)
    bits = stored.view(SIGNED[stored.itemsize])
    sign = bits >> (8 * stored.itemsize - 1)
    magnitude = bits & np.iinfo(bits.dtype).max
    return np.asarray((magnitude ^ sign) - sign)

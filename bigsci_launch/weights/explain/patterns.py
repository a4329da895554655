"""Patterns that differences share. Each pattern is a function from a comparison to matches.

A match says what one difference probably is. Matches of one pattern with the same words become one finding. The first
pattern that matches a difference keeps it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from bigsci_launch.topology.naming import agree
from bigsci_launch.weights.compare.comparison import (
    Comparison,
    Difference,
    WeightsFinding,
    names_text,
    where_text,
)
from bigsci_launch.weights.compare.places import describe_places
from bigsci_launch.weights.compare.work import is_equal
from bigsci_launch.weights.files.boxes import chunks_of, index_of
from bigsci_launch.weights.files.elements import COMPLEX, as_floats, read_elements, round_to, windows
from bigsci_launch.weights.files.pool import MANY_FILES, FilePool, equal_segments
from bigsci_launch.weights.files.tensors import DTYPE_BYTES, PACKED_DTYPES, Place, Segment, StoredTensor

# Relative error that rounding may leave between a tensor and its multiple, with a margin for the summation error.
ROUNDING = {"BF16": 4e-3, "F16": 1e-3, "F32": 1e-3, "F64": 1e-6}
# Early in training, all elements of a norm are near 1 and move almost equally. That is not scaling.
LEAST_SCALING = 0.05
FINGERPRINT_BYTES = 4096
CHECK_ELEMENTS = 1 << 20
RANDOM_STATE = re.compile(r"rng|random", re.IGNORECASE)
GRADIENT_COSINE = 0.9
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class PatternMatch:
    """What one difference probably is; `words` begin with a verb and follow the tensor's name."""

    difference: Difference
    pattern: str
    words: str


Detector = Callable[[Comparison, FilePool], Iterator[PatternMatch]]


def find_patterns(comparison: Comparison) -> Comparison:
    """Add the likely cause of each difference, and findings that summarize them.

    Existing findings stay first. Where no pattern matches, a difference takes its cause from the finding about it.
    """
    files = FilePool(MANY_FILES)
    matches: dict[int, PatternMatch] = {}
    for detect in DETECTORS:
        for match in detect(comparison, files):
            matches.setdefault(id(match.difference), match)
    files.close_all()
    steps = tuple(_optimizer_steps(comparison))
    told = {name: finding.pattern for finding in (*comparison.findings, *steps) for name in finding.tensors}
    differences = tuple(
        replace(difference, likely=_likely(difference, matches.get(id(difference)), told))
        for difference in comparison.differences
    )
    findings = (*_other_steps(comparison), *_sum_up(comparison, matches.values()), *steps)
    return replace(comparison, differences=differences, findings=(*comparison.findings, *findings))


def _other_steps(comparison: Comparison) -> Iterator[WeightsFinding]:
    if comparison.is_other_step:
        claim = f"A is at step {comparison.steps[0]}, B at step {comparison.steps[1]}: the run trained in between"
        yield WeightsFinding("other step", (), (), claim, is_fault=False)


def _likely(difference: Difference, match: PatternMatch | None, told: dict[str, str]) -> str | None:
    if match is not None:
        return match.pattern
    return told.get(difference.name)


def _sum_up(comparison: Comparison, matches: Iterable[PatternMatch]) -> Iterator[WeightsFinding]:
    by_words: dict[tuple[str, str], list[Difference]] = {}
    for match in matches:
        by_words.setdefault((match.pattern, match.words), []).append(match.difference)
    for (pattern, words), differences in by_words.items():
        titles = tuple(dict.fromkeys(difference.title for difference in differences))
        places = tuple(dict.fromkeys(difference.place for difference in differences))
        where = where_text(comparison, differences)
        claim = f"{names_text(titles)} {agree(words, len(titles))}{f' ({where})' if where else ''}"
        yield WeightsFinding(pattern, titles, places, claim)


def constant_of(tensor: StoredTensor, files: FilePool) -> float | None:
    """Return the value of every element if all have the same bits; None otherwise, and for an empty tensor."""
    if not tensor.has_shape:
        from bigsci_launch.weights.formats.text_dump import printed_constant

        return printed_constant(tensor)
    parts = [chunk.tensor for chunk in chunks_of(tensor)]
    if not tensor.has_bytes or tensor.num_elements == 0 or DTYPE_BYTES[tensor.dtype] > 8:
        return None
    if any(part.strides is not None for part in parts) or tensor.dtype in {*COMPLEX, *PACKED_DTYPES}:
        return None
    segments = [segment for part in parts for segment in part.segments if segment.num_bytes]
    if not all(_is_constant(segment, segments[0], DTYPE_BYTES[tensor.dtype], files) for segment in segments):
        return None
    return float(as_floats(read_elements(tensor, 0, 1, files), tensor.dtype)[0])


def _is_constant(segment: Segment, first: Segment, width: int, files: FilePool) -> bool:
    """Whether all elements of a segment have the bits of the first element of the `first` segment."""
    if not equal_segments((replace(segment, num_bytes=width),), (replace(first, num_bytes=width),), files):
        return False
    head = replace(segment, num_bytes=segment.num_bytes - width)
    shifted = replace(head, offset=segment.offset + width)
    return equal_segments((head,), (shifted,), files)


def _missing_and_extra(comparison: Comparison, files: FilePool) -> Iterator[PatternMatch]:
    for difference in comparison.differences:
        if difference.kind == "missing":
            yield PatternMatch(difference, "missing", "is missing in B")
        elif difference.kind == "extra":
            yield PatternMatch(difference, "extra", "is in B only")


def _resets(comparison: Comparison, files: FilePool) -> Iterator[PatternMatch]:
    for difference in comparison.differences:
        a, b = difference.a, difference.b
        statistics = difference.statistics
        if a is None or b is None or difference.kind != "value" or statistics is None:
            continue
        if statistics.num_elements < 2:
            continue
        before, after = constant_of(a, files), constant_of(b, files)
        if after == 0 and difference.role in MOMENTS:
            yield PatternMatch(difference, "optimizer state lost", "is zero in B: the optimizer state was lost")
        elif before == 0 and difference.role in MOMENTS:
            yield PatternMatch(difference, "optimizer state lost", "is zero in A: the optimizer state was lost")
        elif after in (0.0, 1.0):
            yield PatternMatch(
                difference, "reset to default", f"is reset to its default {after:g} in B{_history(before)}"
            )
        elif before in (0.0, 1.0):
            yield PatternMatch(difference, "reset to default", f"is at its default {before:g} in A but not in B")


def _history(before: float | None) -> str:
    if before is None:
        return ""
    decayed = ": never trained, moved by weight decay only" if 0 < before < 1 else ""
    return f" (was {before:.4g} everywhere{decayed})"


def _other_bits(comparison: Comparison, files: FilePool) -> Iterator[PatternMatch]:
    for difference in comparison.differences:
        if difference.kind == "bits" and difference.statistics is not None:
            is_nan = difference.statistics.num_nan_a > 0
            what = "NaN payloads or signs of zero" if is_nan else "0.0 and -0.0"
            yield PatternMatch(
                difference, "equal values, other bits", f"is equal in value but stored as different bits ({what})"
            )


def _nans(comparison: Comparison, files: FilePool) -> Iterator[PatternMatch]:
    for difference in comparison.differences:
        if difference.kind == "nan" and difference.statistics is not None:
            side = "B" if difference.statistics.num_nan_b >= difference.statistics.num_nan_a else "A"
            yield PatternMatch(difference, "NaN", f"is NaN in {side} where the other side has numbers")


def _roundings(comparison: Comparison, files: FilePool) -> Iterator[PatternMatch]:
    for difference in comparison.differences:
        a, b = difference.a, difference.b
        if difference.kind != "dtype" or a is None or b is None or difference.statistics is None:
            continue
        if not (a.has_bytes and b.has_bytes):
            continue
        wide, narrow = (a, b) if DTYPE_BYTES[a.dtype] >= DTYPE_BYTES[b.dtype] else (b, a)
        if is_rounded(wide, narrow, files):
            words = f"is {a.dtype} in A and {b.dtype} in B, equal after rounding"
            yield PatternMatch(difference, "dtype rounding only", words)


def is_rounded(wide: StoredTensor, narrow: StoredTensor, files: FilePool) -> bool:
    """Whether `narrow` is `wide` rounded to nearest even, element by element. False for other formats."""
    if wide.dtype not in ("F64", "F32") or narrow.dtype not in ("F32", "F16", "BF16"):
        return False
    width = f"u{DTYPE_BYTES[narrow.dtype]}"
    return all(
        bool((round_to(window.left, narrow.dtype).view(width) == window.right.view(width)).all())
        for window in windows(wide, narrow, files, CHECK_ELEMENTS)
    )


def _permutations(comparison: Comparison, files: FilePool) -> Iterator[PatternMatch]:
    """Yield tensors of B that are bit-identical to another tensor of A: shards or layers changed places."""
    candidates = [
        difference
        for difference in comparison.differences
        if difference.kind in ("value", "nan") and difference.a and difference.b and _is_comparable(difference.a)
    ]
    origins: dict[tuple[str, tuple[int, ...], bytes], list[Difference]] = {}
    for difference in candidates:
        assert difference.a is not None
        origins.setdefault(_fingerprint(difference.a, files), []).append(difference)
    for difference in candidates:
        b = difference.b
        assert b is not None
        for origin in origins.get(_fingerprint(b, files), ()):
            if origin is not difference and origin.a and _is_same(origin.a, b, files):
                yield PatternMatch(
                    difference, "permuted shards", f"holds in B what {_source_text(origin, difference)} in A"
                )
                break


def _is_comparable(tensor: StoredTensor) -> bool:
    return tensor.digest is not None or (tensor.has_shape and tensor.num_elements > 1)


def _is_same(a: StoredTensor, b: StoredTensor, files: FilePool) -> bool:
    """Whether two tensors with the same fingerprint are equal. A digest is its own fingerprint."""
    if a.digest is not None and b.digest is not None:
        return True
    return is_equal((a, b), files)


def _source_text(origin: Difference, difference: Difference) -> str:
    if origin.name == difference.name:
        return f"{origin.place} holds"
    return f"{origin.title} holds"


def _fingerprint(tensor: StoredTensor, files: FilePool) -> tuple[str, tuple[int, ...], bytes]:
    if tensor.digest is not None:
        return tensor.dtype, tensor.shape, tensor.digest.encode()
    count = min(tensor.num_elements, FINGERPRINT_BYTES // DTYPE_BYTES[tensor.dtype])
    head = read_elements(tensor, 0, count, files).tobytes()
    tail = read_elements(tensor, tensor.num_elements - count, tensor.num_elements, files).tobytes()
    return tensor.dtype, tensor.shape, head + tail


def _scalings(comparison: Comparison, files: FilePool) -> Iterator[PatternMatch]:
    for difference in comparison.differences:
        factor = scale_of(difference)
        if factor is not None:
            yield PatternMatch(difference, "scaled by a constant", f"is scaled by {factor:.4g} in B")


def scale_of(difference: Difference) -> float | None:
    """Return the constant c with `b = c * a` up to rounding; None if there is none, or if it is too close to 1."""
    statistics = difference.statistics
    if difference.kind != "value" or statistics is None or difference.a is None or statistics.num_elements < 8:
        return None
    cosine, ratio = statistics.cosine, statistics.norm_ratio
    if cosine is None or ratio is None:
        return None
    residual = math.sqrt(max(0.0, 1 - cosine * cosine))
    rounding = ROUNDING.get(difference.a.dtype, 0.0)
    factor = math.copysign(ratio, cosine)
    return factor if residual < rounding and abs(factor - 1) > LEAST_SCALING else None


def _corrupted_bytes(comparison: Comparison, files: FilePool) -> Iterator[PatternMatch]:
    """Yield the only differing tensor if just one byte of one element differs: corruption, not training."""
    alone = comparison.differences[0] if len(comparison.differences) == 1 else None
    if alone is None or alone.a is None or alone.b is None or alone.statistics is None or alone.kind == "dtype":
        return
    at = alone.statistics.first
    if alone.statistics.num_differing != 1 or at is None:
        return
    raw_a, raw_b = (read_elements(side, at, at + 1, files).tobytes() for side in (alone.a, alone.b))
    if sum(x != y for x, y in zip(raw_a, raw_b, strict=True)) == 1:
        where = list(index_of(at, alone.a.shape))
        yield PatternMatch(
            alone, "corrupted byte", f"differs in one byte of element {where} and nowhere else: a byte was corrupted"
        )


def _random_states(comparison: Comparison, files: FilePool) -> Iterator[PatternMatch]:
    for difference in comparison.differences:
        if difference.role == "other" and RANDOM_STATE.search(difference.name) and difference.kind == "value":
            words = "differs: dropout and everything else that draws random numbers will diverge"
            yield PatternMatch(difference, "random state differs", words)


def _scaled_gradients(comparison: Comparison, files: FilePool) -> Iterator[PatternMatch]:
    """Yield moments that show scaled gradients: same direction, |m| times a factor and |v| times its square.

    If the sides are at different steps, training explains the difference; a single tensor may match by chance.
    """
    moments: dict[tuple[str, Place], dict[str, Difference]] = {}
    for difference in comparison.differences:
        if difference.role in MOMENTS and difference.kind == "value" and not comparison.is_other_step:
            moments.setdefault((difference.name, difference.place), {})[difference.role] = difference
    by_words: dict[str, list[Difference]] = {}
    for pair in moments.values():
        ratio = _gradient_ratio(pair.get("exp_avg"), pair.get("exp_avg_sq"))
        if ratio is not None:
            by_words.setdefault(f"has gradients {_about(ratio)} as long in B", []).extend(pair.values())
    for words, scaled in by_words.items():
        if len({difference.name for difference in scaled}) > 1:
            yield from (PatternMatch(difference, "gradients scaled", words) for difference in scaled)


def _gradient_ratio(first: Difference | None, second: Difference | None) -> float | None:
    """Return the gradients' length in B divided by that in A; None if the moments imply no single ratio."""
    if first is None or second is None or first.statistics is None or second.statistics is None:
        return None
    cosine, ratio, squares = first.statistics.cosine, first.statistics.norm_ratio, second.statistics.norm_ratio
    if not cosine or not ratio or not squares or cosine < GRADIENT_COSINE or abs(math.log(ratio)) < math.log(1.25):
        return None
    return ratio if abs(math.log(squares / ratio**2)) < math.log(1.5) else None


def _about(ratio: float) -> str:
    """Describe a ratio, to the nearest power of two (`1/2`, `4 times`) since tp sizes are powers of two."""
    power = round(math.log2(ratio))
    if power:
        return f"about 1/{2**-power}" if power < 0 else f"about {2**power} times"
    return f"{ratio:.2g} times"


def _one_index_apart(comparison: Comparison, files: FilePool) -> Iterator[PatternMatch]:
    """Yield tensors that several ranks of an axis have and that differ on only one of them."""
    by_title: dict[str, list[Difference]] = {}
    for difference in comparison.differences:
        if difference.kind == "value":
            by_title.setdefault(difference.title, []).append(difference)
    for differences in by_title.values():
        holders = comparison.places[differences[0].name]
        for axis in ("tp", "dp"):
            index = _only_index(differences, holders, axis)
            if index is not None:
                words = f"differs on {axis}{index} only"
                yield from (PatternMatch(difference, f"one {axis} rank apart", words) for difference in differences)
                break


def _only_index(differences: list[Difference], holders: Iterable[Place], axis: str) -> int | None:
    here = {getattr(difference.place, axis) for difference in differences}
    known = {getattr(place, axis) for place in holders}
    index: int | None = next(iter(here)) if len(here) == 1 else None
    return index if len(known - {None}) > 1 else None


def _optimizer_steps(comparison: Comparison) -> Iterator[WeightsFinding]:
    apart: dict[tuple[float | None, float | None], set[Place]] = {}
    for place, groups_a in comparison.groups_a.items():
        groups_b = comparison.groups_b.get(place, ())
        for group_a, group_b in zip(groups_a, groups_b, strict=False):
            if group_a.step != group_b.step and not _is_training(group_a.step, group_b.step, comparison.steps):
                apart.setdefault((group_a.step, group_b.step), set()).add(place)
    counters = (d.name for d in comparison.differences if d.role == "other" and d.name.endswith(".step"))
    names = tuple(dict.fromkeys(counters))
    for (step_a, step_b), places in apart.items():
        where = describe_places(places, comparison.groups_a, comparison.groups_a)
        claim = f"the optimizer's step is {_step_text(step_a)} in A and {_step_text(step_b)} in B"
        side = _side_that_lost(step_a, step_b, comparison.steps)
        tail = f": lost when {side} was loaded, so Adam's bias correction restarted" if side else ""
        pattern = "optimizer step restarted" if side else "optimizer step differs"
        yield WeightsFinding(pattern, names, tuple(places), claim + (f" ({where})" if where else "") + tail)


def _side_that_lost(step_a: float | None, step_b: float | None, steps: tuple[int | None, int | None]) -> str:
    """Return the side (`A` or `B`) whose optimizer restarted its step count; empty if neither is known to have."""
    if step_a is None or step_b is None:
        return "A" if step_a is None else "B"
    is_same_moment = None not in steps and steps[0] == steps[1]
    low, high = sorted((step_a, step_b))
    if not is_same_moment and low > 1:
        return ""
    return "A" if step_a == low < high else "B"


def _is_training(step_a: float | None, step_b: float | None, steps: tuple[int | None, int | None]) -> bool:
    """Whether the optimizer steps are as far apart as the steps of the two sides."""
    if None in (step_a, step_b, *steps):
        return False
    assert step_a is not None and step_b is not None and steps[0] is not None and steps[1] is not None
    return step_b - step_a == steps[1] - steps[0]


def _step_text(step: float | None) -> str:
    return "missing" if step is None else f"{step:g}"


# The order matters: a difference belongs to the first pattern that matches it.
DETECTORS: tuple[Detector, ...] = (
    _missing_and_extra,
    _other_bits,
    _random_states,
    _resets,
    _roundings,
    _corrupted_bytes,
    _permutations,
    _nans,
    _scalings,
    _scaled_gradients,
    _one_index_apart,
)

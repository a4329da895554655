"""Renders the answer of a comparison: as text, as table rows, and as a JSON document."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from bigsci_launch.units import finite, format_bytes, format_percent
from bigsci_launch.weights.compare.comparison import (
    Comparison,
    ComponentCounts,
    Difference,
    ValueDifference,
    WeightsFinding,
    names_text,
    where_text,
)
from bigsci_launch.weights.compare.places import describe_places, describe_range, is_product
from bigsci_launch.weights.files.boxes import index_of
from bigsci_launch.weights.files.tensors import NotRead, StoredTensor

if TYPE_CHECKING:
    from bigsci_launch.weights.compare.statistics import Statistics

SCHEMA_VERSION = 1
COLUMNS = ("where", "tensor", "kind", ">differs", ">rel L2", ">max abs", ">max ulp", "likely")
MAX_ROWS = 40
MAX_SENTENCES = 12
ABSENT = ("missing", "extra")
# Up to this many unexplained differences get one sentence per group of places, even if most tensors differ.
FEW = 12


def summary_lines(comparison: Comparison) -> list[str]:
    """Return the answer as lines of text, the most important first."""
    lines = [] if comparison.is_empty else [_headline(comparison), *map(_component_line, comparison.components)]
    lines += [f"could not read {item.path}: {item.why}" for item in comparison.unreadable[:MAX_SENTENCES]]
    if len(comparison.unreadable) > MAX_SENTENCES:
        lines.append(f"... and {len(comparison.unreadable) - MAX_SENTENCES} more files that could not be read")
    lines += _not_read_lines(comparison.not_read)
    sentences = [*(finding.claim for finding in comparison.findings), *_unexplained(comparison)]
    lines += sentences[:MAX_SENTENCES]
    if len(sentences) > MAX_SENTENCES:
        lines.append(f"... and {len(sentences) - MAX_SENTENCES} more statements; --json lists them all")
    notes = [*(f"note: {note}" for note in comparison.notes), *_extent_lines(comparison)]
    return [*lines, *_value_lines(comparison), *notes]


def _not_read_lines(not_read: Sequence[NotRead]) -> list[str]:
    lines = [f"not read: {entry.name or 'an entry'} ({entry.type}) in {entry.path}: {entry.why}" for entry in not_read]
    return _shortened(lines, "entries that were not read")


def _shortened(lines: list[str], things: str) -> list[str]:
    rest = len(lines) - MAX_SENTENCES
    return lines if rest <= 0 else [*lines[:MAX_SENTENCES], f"... and {rest} more {things}; --json lists them all"]


def _value_lines(comparison: Comparison) -> list[str]:
    """Return one line per value that differs; a value that differs alike in several files has one line."""
    found: dict[str, list[ValueDifference]] = {}
    for difference in comparison.value_differences:
        sides = ["nothing" if value is None else value.text for value in (difference.a, difference.b)]
        alike = ", which differ" if sides[0] == sides[1] else ""
        found.setdefault(f"{difference.name}: {sides[0]} in A, {sides[1]} in B{alike}", []).append(difference)
    lines = [line if len(same) == 1 else f"{line} (in {len(same)} files)" for line, same in found.items()]
    return _shortened(lines, "values that differ")


def _component_line(counts: ComponentCounts) -> str:
    """Return the answer for one part of a checkpoint: `optimizer: 24 tensors and 12 values compared, all equal`."""
    compared = _tensors_and_values((counts.num_tensors, counts.num_values))
    why = f" (only {counts.only_in} has it)" if counts.only_in else ""
    parts = [f"{compared} compared" if compared else f"nothing compared{why}"]
    if any(counts.differing):
        verb = "differs" if sum(counts.differing) == 1 else "differ"
        parts.append(f"{_tensors_and_values(counts.differing)} {verb}")
    if any(counts.alone):
        parts.append(f"{_tensors_and_values(counts.alone)} on one side only")
    if compared and len(parts) == 1:
        parts.append("all equal")
    return f"{counts.name}: {', '.join(parts)}{_unread_text(counts.num_unreadable, counts.num_not_read)}"


def _tensors_and_values(numbers: tuple[int, int]) -> str:
    counted = zip(numbers, ("tensor", "value"), strict=True)
    return " and ".join(f"{number:,} {word}{'s' * (number != 1)}" for number, word in counted if number)


def _unread_text(num_files: int, num_entries: int) -> str:
    files = f"; {num_files:,} file{'s' * (num_files != 1)} could not be read" if num_files else ""
    return files + (f"; {num_entries:,} {'entry' if num_entries == 1 else 'entries'} not read" if num_entries else "")


def closing_line(comparison: Comparison) -> str | None:
    """Return the count of what was compared and what was not read, to end a long answer; None if all was read."""
    return _headline(comparison) if not comparison.is_complete and not comparison.is_empty else None


def _headline(comparison: Comparison) -> str:
    parts = [_tensors_text(comparison), _values_text(comparison)]
    unread = _unread_text(len(comparison.unreadable), len(comparison.not_read))
    return f"{'; '.join(part for part in parts if part)}{unread}.".removeprefix("; ")


def _tensors_text(comparison: Comparison) -> str:
    if not comparison.num_compared and not comparison.differences:
        if comparison.num_values and not comparison.is_audit:
            return ""
        return "no two copies to compare" if comparison.is_audit else "no tensor was compared"
    thing = "pair of copies" if comparison.is_audit else "tensor"
    things = thing if comparison.num_compared == 1 else "pairs of copies" if comparison.is_audit else "tensors"
    size = f" ({format_bytes(comparison.num_bytes)})" if comparison.num_bytes else ""
    count = f"{comparison.num_compared:,} {things} compared{size}"
    within = f", {comparison.num_within_tolerance:,} of them within the tolerance" * bool(
        comparison.num_within_tolerance
    )
    if comparison.extent.is_sample:
        return f"{count}: {_sample_text(comparison)}"
    if not comparison.differences:
        exactly = within or _how_equal(comparison)
        values = f" and {_counted_values(comparison)}" if _are_values_equal(comparison) else ""
        return f"{count}{values}, all equal{exactly}"
    return f"{count}, {comparison.num_equal:,} equal{within}. {_count_of_differing(comparison)}"


def _how_equal(comparison: Comparison) -> str:
    if comparison.is_printed:
        return " as far as they are printed"
    if comparison.extent.num_by_digest and not comparison.extent.num_read:
        return " by the digests recorded when they were saved; bytes not read"
    return ", bit for bit"


def _sample_text(comparison: Comparison) -> str:
    """Say what a sample shows. That the rest is equal is not known, and never said."""
    total = comparison.num_bytes
    share = format_percent(min(1.0, comparison.extent.num_read / total)) if total else "part"
    if not comparison.differences:
        return f"no difference in the {share} that was read"
    return f"{_count_of_differing(comparison)}, as the {share} that was read shows"


def _extent_lines(comparison: Comparison) -> Iterator[str]:
    extent = comparison.extent
    if extent.num_by_digest:
        count = f"{extent.num_files_by_digest:,} file{'s' * (extent.num_files_by_digest != 1)}"
        yield (
            f"note: {count} ({format_bytes(extent.num_by_digest)}) not read: equal by the digests recorded when they "
            "were saved"
        )
    if extent.is_sample and comparison.differences:
        yield "note: the figures are those of the sample"


def _are_values_equal(comparison: Comparison) -> bool:
    return bool(comparison.num_values) and not comparison.value_differences


def _counted_values(comparison: Comparison) -> str:
    return f"{comparison.num_values:,} value{'s' * (comparison.num_values != 1)}"


def _values_text(comparison: Comparison) -> str:
    if not comparison.num_values and not comparison.value_differences:
        return ""
    if _are_values_equal(comparison):
        is_counted = comparison.num_compared and not comparison.differences
        return "" if is_counted else f"{_counted_values(comparison)} compared, all equal"
    differing = sum(item.a is not None and item.b is not None for item in comparison.value_differences)
    alone = len(comparison.value_differences) - differing
    parts = [f"{comparison.num_values - differing:,} equal"]
    parts += [f"{differing:,} {'differs' if differing == 1 else 'differ'}"] * bool(differing)
    parts += [f"{alone:,} on one side only"] * bool(alone)
    return f"{_counted_values(comparison)} compared, {', '.join(parts)}"


def _count_of_differing(comparison: Comparison) -> str:
    absent = [difference for difference in comparison.differences if difference.kind in ABSENT]
    present = [difference for difference in comparison.differences if difference.kind not in ABSENT]
    parts = [_counted(present, "differs", "differ"), _counted(absent, "is on one side only", "are on one side only")]
    return f"{' and '.join(part for part in parts if part)}{_all_on(comparison)}"


def _counted(differences: Sequence[Difference], one: str, more: str) -> str:
    """Return the number of tensors (and of places, if larger) with a verb; empty if there are none."""
    if not differences:
        return ""
    titles = {difference.title for difference in differences}
    counted = f"{len(titles):,}"
    if len(differences) > len(titles):
        counted += f" (in {len(differences):,} places)"
    return f"{counted} {one if len(titles) == 1 else more}"


def _all_on(comparison: Comparison) -> str:
    """Say where all differences are: the exact places if they can be named, otherwise the range that contains them."""
    names = {difference.name for difference in comparison.differences}
    places = {difference.place for difference in comparison.differences}
    holders = {place for name in names for place in comparison.places[name]}
    everywhere = {place for held in comparison.places.values() for place in held}
    if is_product(places, holders):
        where = describe_places(places, holders, everywhere)
        return f", {'' if where.startswith('every ') else 'all '}on {where}" if where else ""
    within = describe_range(places, everywhere)
    return f", all within {within}" if within else ""


def _unexplained(comparison: Comparison) -> Iterator[str]:
    """Yield one sentence per group of places, for the differences that no pattern explains."""
    told = {name for finding in comparison.findings for name in finding.tensors}
    rest = [
        difference
        for difference in comparison.differences
        if difference.likely is None and not (comparison.is_audit and difference.name in told)
    ]
    if len(rest) > comparison.num_compared / 2 and len(rest) > FEW:
        yield _sentence("", rest)
        return
    for where, differences in group_by_place(comparison, rest):
        yield _sentence(where, differences)


def _sentence(where: str, differences: Sequence[Difference]) -> str:
    titles = tuple(dict.fromkeys(difference.title for difference in differences))
    worst = max(differences, key=lambda difference: _relative(difference.statistics))
    verb = "differs" if len(titles) == 1 else "differ"
    prefix = f"{where}: " if where else ""
    return f"{prefix}{names_text(titles)} {verb} ({_amount(worst, is_worst=len(differences) > 1)})"


def _relative(statistics: Statistics | None) -> float:
    relative = statistics.relative if statistics else None
    return math.inf if relative is None else relative


def _amount(difference: Difference, *, is_worst: bool) -> str:
    statistics = difference.statistics
    if statistics is None:
        one, other = _shape(difference.a), _shape(difference.b)
        return f"{one} in A, {other} in B" if one != other else "by their digests, which do not show by how much"
    worst = f"at most, in {difference.title}: " if is_worst else ""
    relative = statistics.relative
    rel = "" if relative is None else f", rel {relative:.2g}"
    ulp = "" if statistics.max_ulp is None else f", up to {statistics.max_ulp:,} ulp"
    share = _share(statistics)
    at = _where(difference) if not share.endswith("%") else " of elements"
    return f"{worst}{share}{at}{rel}, max {statistics.max_abs:.3g}{ulp}"


def _where(difference: Difference) -> str:
    if difference.a is None or difference.statistics is None or difference.statistics.first is None:
        return ""
    index = _index(difference, difference.statistics.first)
    return f" at {index}" if difference.statistics.num_differing == 1 else f" (the first at {index})"


def _share(statistics: Statistics) -> str:
    """Return how many elements differ: a count if they are few, otherwise a percentage."""
    few = statistics.num_differing
    return f"{few} element{'s' if few != 1 else ''}" if few < 10 else format_percent(statistics.fraction)


def _shape(tensor: StoredTensor | None) -> str:
    return "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def group_by_place(comparison: Comparison, differences: Sequence[Difference]) -> list[tuple[str, list[Difference]]]:
    """Group differences by the places where their tensors differ; the places are given in words."""
    by_title: dict[tuple[str, str], list[Difference]] = {}
    for difference in differences:
        by_title.setdefault((difference.title, difference.kind), []).append(difference)
    groups: dict[str, list[Difference]] = {}
    for same in by_title.values():
        groups.setdefault(where_text(comparison, same), []).extend(same)
    return list(groups.items())


def table_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return rows with columns `COLUMNS`: one per tensor, grouped by where it differs, with its worst copy."""
    rows: list[tuple[str, ...]] = []
    for where, differences in group_by_place(comparison, comparison.differences):
        worst: dict[tuple[str, str], Difference] = {}
        for difference in differences:
            key = (difference.title, difference.kind)
            if key not in worst or _relative(difference.statistics) > _relative(worst[key].statistics):
                worst[key] = difference
        group = [
            *_absent_rows(worst.values()),
            *(_row(difference) for difference in worst.values() if difference.statistics),
            *(_row(item) for item in worst.values() if not item.statistics and item.kind not in ABSENT),
        ]
        rows += [(where if index == 0 else "", *row) for index, row in enumerate(group)]
    if len(rows) > MAX_ROWS:
        return [*rows[:MAX_ROWS], ("...", f"{len(rows) - MAX_ROWS} more rows; --json lists them all", *[""] * 6)]
    return rows


def _absent_rows(differences: Iterable[Difference]) -> Iterator[tuple[str, ...]]:
    for kind in ABSENT:
        titles = tuple(difference.title for difference in differences if difference.kind == kind)
        if titles:
            yield (names_text(titles), kind, "", "", "", "", "")


def _row(difference: Difference) -> tuple[str, ...]:
    statistics = difference.statistics
    likely = difference.likely or ""
    if statistics is None:
        return (difference.title, difference.kind, "", "", "", "", likely)
    relative = "" if statistics.relative is None else f"{statistics.relative:.3g}"
    ulp = "" if statistics.max_ulp is None else f"{statistics.max_ulp:,}"
    numbers = (_share(statistics), relative, f"{statistics.max_abs:.3g}", ulp)
    return (difference.title, difference.kind, *numbers, likely)


def as_document(comparison: Comparison, seam: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the document of `bsl diff-weights --json`; `seam` is the result of `--seam`, if it was given."""
    return {
        "schema_version": SCHEMA_VERSION,
        "a": None if comparison.is_empty else str(comparison.a),
        "b": None if comparison.is_empty else str(comparison.b),
        "equal": comparison.is_equal,
        "compared": comparison.num_compared,
        "within_tolerance": comparison.num_within_tolerance,
        "different": [_difference_document(difference) for difference in comparison.differences],
        "findings": [_finding_document(finding) for finding in comparison.findings],
        "values_compared": comparison.num_values,
        "values": [_value_document(difference) for difference in comparison.value_differences],
        "components": [_component_document(counts) for counts in comparison.components],
        "not_read": [
            {"entry": entry.name, "type": entry.type, "file": str(entry.path), "why": entry.why}
            for entry in comparison.not_read
        ],
        "unreadable": [{"file": str(item.path), "why": item.why} for item in comparison.unreadable],
        "notes": list(comparison.notes),
        "bytes": {
            "compared": comparison.num_bytes,
            "read": comparison.extent.num_read,
            "by_digest": comparison.extent.num_by_digest,
        },
        "sample": comparison.extent.is_sample,
        "seam": seam,
    }


def _difference_document(difference: Difference) -> dict[str, Any]:
    statistics = difference.statistics
    return {
        "tensor": difference.name,
        "role": difference.role,
        "a": _side_document(difference.a),
        "b": _side_document(difference.b),
        "coordinate": difference.place.as_dict(),
        "kind": difference.kind,
        "max_abs": finite(statistics.max_abs) if statistics else None,
        "rel_l2": finite(statistics.relative) if statistics else None,
        "max_ulp": statistics.max_ulp if statistics else None,
        "fraction": statistics.fraction if statistics else None,
        "first_at": _index(difference, statistics.first) if statistics else None,
        "worst_at": _index(difference, statistics.worst) if statistics else None,
        "likely": difference.likely,
        "relation": difference.relation or None,
    }


def _index(difference: Difference, position: int | None) -> list[int] | None:
    return None if position is None or difference.a is None else list(index_of(position, difference.a.shape))


def _component_document(counts: ComponentCounts) -> dict[str, Any]:
    return {
        "component": counts.name,
        "compared": counts.num_tensors,
        "values_compared": counts.num_values,
        "different": counts.differing[0] + counts.alone[0],
        "values_different": counts.differing[1] + counts.alone[1],
        "not_read": counts.num_not_read,
        "unreadable": counts.num_unreadable,
    }


def _value_document(difference: ValueDifference) -> dict[str, Any]:
    a, b = difference.a, difference.b
    return {
        "value": difference.name,
        "coordinate": difference.place.as_dict(),
        "a": None if a is None else {"file": str(a.path), "text": a.text},
        "b": None if b is None else {"file": str(b.path), "text": b.text},
    }


def _side_document(tensor: StoredTensor | None) -> dict[str, Any] | None:
    if tensor is None:
        return None
    return {"file": str(tensor.path), "dtype": tensor.dtype, "shape": list(tensor.shape)}


def _finding_document(finding: WeightsFinding) -> dict[str, Any]:
    coordinates = [coordinate for place in finding.places if (coordinate := place.as_dict()) is not None]
    return {
        "pattern": finding.pattern,
        "tensors": list(finding.tensors),
        "coordinates": coordinates,
        "claim": finding.claim,
    }

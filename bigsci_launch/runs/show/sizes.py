"""What `bsl status` says about the micro-batch size of a run with `training.micro_batch_size: auto`. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bigsci_launch.runs.sizes.record import FoundSize, SizeChange

_WHY = {
    "found": "found",
    "remembered": "taken again",
    "out_of_memory": "out of memory",
    "thrash": "memory too tight",
}
_MOST_LINES = 3
"""The newest of so many changes; --json has all."""


def size_facts(found: FoundSize | None) -> list[tuple[str, str]]:
    """Return lines about the size and its newest changes; nothing without `auto`."""
    if found is None:
        return []
    room = "" if found.headroom is None else f", {100 * found.headroom:.0f} % of the memory free at the peak"
    limit = "" if found.too_large is None else f"; {found.too_large} does not fit"
    other = "" if found.evaluation_size == found.size else f"; {found.evaluation_size} in evaluations"
    facts = [("micro-batch", f"{found.size} (auto){room}{limit}{other}")]
    return facts + [("", _line(each)) for each in found.history[-_MOST_LINES:]]


def _line(change: SizeChange) -> str:
    sizes = f"{change.was} -> {change.size}" if change.was not in (None, change.size) else f"{change.size}"
    return f"after step {change.step}: {sizes}, {_WHY.get(change.why, change.why)}: {change.words}"


def size_document(found: FoundSize | None) -> dict[str, Any] | None:
    """Return the part of the JSON document of `bsl status` that is about the size; None without `auto`."""
    return None if found is None else asdict(found)

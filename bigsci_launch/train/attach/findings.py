"""Findings of all ranks: merged, ordered by cause, and in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from bigsci_launch.train.attach.places import Places
from bigsci_launch.train.guards.copies import Violation

# Checks closer to the cause come first.
_ORDER = (
    *("load", "data", "optimizer settings", "changed between steps", "non-finite", "missing gradients"),
    *("gradient reduction", "reduced gradients", "magnitude", "moments", "skipped steps"),
)


def gather_findings(mine: Sequence[Violation]) -> list[Violation]:
    """Return the findings of all ranks, one per check and tensor; a collective call over the world."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, list(mine))
    return merged([violation for found in everywhere for violation in found])


def merged(found: Sequence[Violation]) -> list[Violation]:
    """Merge what several ranks have found of the same tensor by the same check."""
    together: dict[tuple[str, str], list[Violation]] = {}
    for violation in found:
        together.setdefault((violation.check, violation.tensor), []).append(violation)
    return [
        Violation(check, tensor, tuple(sorted({rank for each in same for rank in each.ranks})), same[0].text)
        for (check, tensor), same in together.items()
    ]


def in_order(found: Sequence[Violation]) -> list[Violation]:
    """Sort findings so that causes come before their effects. Of what is not finite, the fewest ranks come first."""
    last = len(_ORDER)
    return sorted(found, key=lambda each: (_ORDER.index(each.check) if each.check in _ORDER else last, len(each.ranks)))


def in_words(violation: Violation, places: Places) -> str:
    """`data-parallel copies: head.weight on rank 1 (dp1 pp0 tp0): differs from the copy on rank 0`."""
    return f"{violation.check}: {violation.tensor} on {places.describe(violation.ranks)}: {violation.text}"

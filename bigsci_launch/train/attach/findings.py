"""Findings of all ranks: merged, ordered by cause, and in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from bigsci_launch.train.attach.places import Places
from bigsci_launch.train.guards.copies import Violation, merge

# Checks closer to the cause come first.
_ORDER = (
    *("load", "data", "optimizer settings", "changed between steps", "non-finite", "missing gradients"),
    *("gradient reduction", "reduced gradients", "magnitude", "moments", "skipped steps"),
)


def gather_findings(mine: Sequence[Violation]) -> list[Violation]:
    """Return the findings of all ranks, one per check and tensor; a collective call over the world."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, list(mine))
    return merge(violation for found in everywhere for violation in found)


def in_order(found: Sequence[Violation]) -> list[Violation]:
    """Sort findings: causes before effects, those that accuse before those that do not, few ranks before many."""
    last = len(_ORDER)

    def place(each: Violation) -> tuple[int, bool, int]:
        return _ORDER.index(each.check) if each.check in _ORDER else last, not each.is_decided, len(each.ranks)

    return sorted(found, key=place)


def in_words(violation: Violation, places: Places) -> str:
    """`data-parallel copies: head.weight on rank 1 (dp1 pp0 tp0): differs from the copy on rank 0`."""
    return f"{violation.check}: {violation.tensor} on {places.describe(violation.ranks)}: {violation.text}"

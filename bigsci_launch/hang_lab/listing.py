"""Renders the catalogue as rows of a table and as a JSON document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bigsci_launch.hang_lab.catalogue import NotReproduced, Reproduction, class_order
from bigsci_launch.hang_lab.needs import missing_need
from bigsci_launch.hang_lab.zoo import NOT_REPRODUCED, REPRODUCTIONS

SCHEMA_VERSION = 1


def _in_order() -> Iterator[Reproduction | NotReproduced]:
    entries = {one.name: one for one in REPRODUCTIONS} | {str(one.hang_class): one for one in NOT_REPRODUCED}
    yield from (entries[name] for name in sorted(entries, key=class_order))


def catalogue_rows() -> list[tuple[str, str, str, str]]:
    """Return name, title, right states, and whether it can be reproduced here, of every entry."""
    return [_row(one) for one in _in_order()]


def _row(one: Reproduction | NotReproduced) -> tuple[str, str, str, str]:
    if isinstance(one, NotReproduced):
        return (str(one.hang_class), one.hang_class.title, "", f"no: {one.reason}")
    reason = missing_need(one)
    return (one.name, one.title, " or ".join(state.value for state in one.states), f"no: {reason}" if reason else "yes")


def catalogue_document() -> dict[str, Any]:
    """Return `{schema_version, classes: [{name, class, title, reproducible, reason, ...}]}`."""
    return {"schema_version": SCHEMA_VERSION, "classes": [_entry(one) for one in _in_order()]}


def _entry(one: Reproduction | NotReproduced) -> dict[str, Any]:
    if isinstance(one, NotReproduced):
        name = str(one.hang_class)
        return {"name": name, "class": name, "title": one.hang_class.title, "reproducible": False,
                "reason": one.reason}  # fmt: skip
    reason = missing_need(one)
    return {
        "name": one.name,
        "class": str(one.hang_class),
        "title": one.title,
        "reproducible": reason is None,
        "reason": reason,
        "family": one.family,
        "recipe": one.recipe,
        "min_ranks": one.min_ranks,
        "needs": list(one.needs),
        "is_hang": one.is_hang,
        "states": [state.value for state in one.states],
        "classes": [str(hang_class or "") for hang_class in one.classes],
        "accuses": one.must_accuse,
        "culprits": one.culprits,
    }

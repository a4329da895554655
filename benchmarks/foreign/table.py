"""The whole table of foreign programs."""

from __future__ import annotations

import importlib
import importlib.util

from foreign.case import ForeignCase

PARTS = ("cases_ddp", "cases_libraries", "cases_more", "cases_errands", "cases_majority")


def all_cases() -> tuple[ForeignCase, ...]:
    """Every case of every part of the table that is there.

    Raises:
        ValueError: two cases have the same name.
    """
    parts = [f"foreign.{part}" for part in PARTS if importlib.util.find_spec(f"foreign.{part}")]
    cases = tuple(case for part in parts for case in importlib.import_module(part).CASES)
    names = [case.name for case in cases]
    if len(set(names)) < len(names):
        raise ValueError(f"two cases have the same name: {sorted({name for name in names if names.count(name) > 1})}")
    return cases

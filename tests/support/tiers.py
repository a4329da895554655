"""Which variants of a test belong to the long tier."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def with_long(values: Iterable[Any], further: Collection[Any]) -> list[Any]:
    """Return parameters for all `values`; those in `further` have the marker of the long tier."""
    return [pytest.param(value, marks=pytest.mark.long) if value in further else value for value in values]

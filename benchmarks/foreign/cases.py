"""The table of foreign programs of the torch family."""

from __future__ import annotations

from foreign.case import ForeignCase
from foreign.cases_ddp import CASES as DDP
from foreign.cases_libraries import CASES as LIBRARIES

CASES: tuple[ForeignCase, ...] = (*DDP, *LIBRARIES)

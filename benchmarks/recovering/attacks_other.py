"""Further attacks on `survive`, the guards and the ends of runs, by another hand than those of attacks_known.py."""

from __future__ import annotations

from recovering.attack import Attack
from recovering.other.inside import ATTACKS as INSIDE
from recovering.other.outside import ATTACKS as OUTSIDE
from recovering.other.timing import ATTACKS as TIMING

ATTACKS: tuple[Attack, ...] = (*OUTSIDE, *INSIDE, *TIMING)

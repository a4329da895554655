"""The 40 attacks that a first adversary made on `survive`. `attack.py` explains how to add one."""

from __future__ import annotations

from recovering.attack import Attack
from recovering.known import cluster, guards, kills, places, settings

_ALL = (
    *kills.ATTACKS,
    *places.ATTACKS,
    *settings.ATTACKS,
    *guards.ATTACKS,
    *cluster.ATTACKS,
)
ATTACKS: tuple[Attack, ...] = tuple(sorted(_ALL, key=lambda attack: int(attack.what.partition(".")[0])))
"""In the order of the numbers that `what` begins with."""

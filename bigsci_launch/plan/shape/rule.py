"""What a rule on setups is, and what setups must fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bigsci_launch.plan.shape.ramp import Phase
from bigsci_launch.plan.shape.setup import Setup


@dataclass(frozen=True, slots=True)
class Limits:
    """What a setup must fit: the nodes that the site offers, the batch sizes of the ramp, and the nodes of an NVLink
    domain."""

    max_nodes: int | None = None
    phases: tuple[Phase, ...] = ()
    domain_nodes: int = 1


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: its name in lists, what it requires, where that comes from, the keys of the run file that it concerns,
    the check, which returns what is wrong or None, and what of a layout the check looks at: `nodes`, the sizes of axes,
    `size` (of micro-batches), `cut` (the partition method). A search asks once for all layouts that agree in these; all
    its layouts use all ranks of their nodes."""

    name: str
    asks: str
    source: str
    keys: tuple[str, ...]
    looks_at: tuple[str, ...]
    check: Callable[[Setup, Limits], str | None]

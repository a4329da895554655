"""Maintenance that the admins of a cluster have reserved nodes for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from bigsci_launch.scheduler.command import run_slurm
from bigsci_launch.scheduler.hostlist import expand_hostlist
from bigsci_launch.scheduler.job import parse_time

_FIELD = re.compile(r"\b(\w+)=(\S*)")


@dataclass(frozen=True, slots=True)
class Maintenance:
    """A reservation with the flag MAINT: its name, when it begins and ends (seconds since the epoch), and its nodes."""

    name: str
    begins: float
    ends: float | None
    nodes: frozenset[str]


def query_maintenance(nodes: Iterable[str]) -> list[Maintenance]:
    """Return the maintenance that will take any of `nodes`, the earliest first.

    Raises:
        SlurmUnavailable, SlurmRefused: as `run_slurm`.
    """
    wanted = frozenset(nodes)
    completed = run_slurm(["scontrol", "show", "reservation", "-o"])
    found = (parse_reservation(line) for line in completed.stdout.splitlines())
    mine = [each for each in found if each is not None and each.nodes & wanted]
    return sorted(mine, key=lambda each: each.begins)


def parse_reservation(line: str) -> Maintenance | None:
    """Parse a line of `scontrol show reservation -o`; None for one that is no maintenance, or names no time or node."""
    fields = dict(_FIELD.findall(line))
    begins = parse_time(fields.get("StartTime", ""))
    if "MAINT" not in fields.get("Flags", "").split(",") or begins is None:
        return None
    try:
        nodes = frozenset(expand_hostlist(fields.get("Nodes", "")))
    except ValueError:
        return None
    return Maintenance(fields.get("ReservationName", ""), begins, parse_time(fields.get("EndTime", "")), nodes)

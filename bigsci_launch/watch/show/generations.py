"""The generations of the newest attempt as cells of a table on the page of a run. Pure."""

from __future__ import annotations

import time

from bigsci_launch.runs.generations.failures import rank_failure_text
from bigsci_launch.runs.generations.records import Generation, recoveries
from bigsci_launch.runs.generations.recovery_text import back_text, source_text, timing_text
from bigsci_launch.status.read import RunStatus

COLUMNS = ("generation", "began", "ranks", "recovery", "seconds", "ended by")
SHORT = (0, 1)


def generation_rows(status: RunStatus) -> list[list[str]]:
    """Return a row for each generation, the newest first; none for an attempt that had only one."""
    found = status.generations
    if found is None or (len(found.all) == 1 and not found.newest.is_disturbed):
        return []
    back = {each.generation.number: each for each in recoveries(found)}
    rows = []
    for generation in reversed(found.all):
        recovery = back.get(generation.number)
        came, seconds = "", ""
        if recovery is not None:
            source = source_text(recovery, status.recorded_steps)
            came = f"{back_text(recovery, has_phases=found.have_phases)}; {source}"
            seconds = timing_text(recovery, has_phases=found.have_phases)
        ended = rank_failure_text(generation.cause, generation) if generation.is_disturbed else ""
        rows.append([str(generation.number), _clock(generation.began), _size(generation), came, seconds, ended])
    return rows


def _size(generation: Generation) -> str:
    size = "?" if generation.world_size is None else str(generation.world_size)
    spares = f", {generation.num_spares} spare slots" if generation.num_spares else ""
    return (f"{size} ({generation.topology})" if generation.topology else size) + spares


def _clock(moment: float | None) -> str:
    return "?" if moment is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(moment))

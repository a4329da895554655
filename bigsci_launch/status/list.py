"""The output of `bsl list`: a table and a JSON document. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bigsci_launch.status.read import RunSummary
from bigsci_launch.units import age_s, format_age

SCHEMA_VERSION = 1
LIST_COLUMNS = ("run", "state", "attempt", ">step", "job", ">last sign", "directory")


def list_rows(summaries: Sequence[RunSummary], now: float) -> list[list[str]]:
    """Return the rows of `bsl list` under `LIST_COLUMNS`."""
    return [_list_row(summary, now) for summary in summaries]


def _list_row(summary: RunSummary, now: float) -> list[str]:
    if summary.problem:
        return [summary.run.name, "?", summary.attempt, "", summary.problem, "", _from_here(summary.run.path)]
    total = f"/{summary.total_steps}" if summary.total_steps else ""
    step = f"{summary.step}{total}" if summary.step is not None else "-"
    age = _age(summary, now)
    state = summary.state.value + (" (reconstructed)" if summary.is_worked_out else "")
    return [summary.run.name, state, summary.attempt, step, summary.label, age, _from_here(summary.run.path)]


def _age(summary: RunSummary, now: float) -> str:
    if summary.last_sign is None:
        return "-"
    age = age_s(summary.last_sign, now)
    return "its clock differs" if age is None else format_age(age)


def _from_here(path: Path) -> str:
    """Return the path as a person types it: relative if it is below the current folder."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def list_document(summaries: Sequence[RunSummary], root: str) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "root": root,
        "runs": [
            {
                "name": summary.run.name,
                "directory": str(summary.run.path),
                "attempt": summary.attempt or None,
                "state": summary.state.value,
                "is_worked_out": summary.is_worked_out,
                "job": summary.label or None,
                "step": summary.step,
                "total_steps": summary.total_steps,
                "last_sign": summary.last_sign,
                "problem": summary.problem or None,
            }
            for summary in summaries
        ],
    }

"""The report of a rehearsal: a JSON document, which is stored, and text for people."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import bigsci_launch
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.launch.provenance import installed_packages
from bigsci_launch.rehearse.arrange import Arrangement
from bigsci_launch.rehearse.phases import Decision, Measured, PhaseResult, Played
from bigsci_launch.runs.rehearsals import CodeRevision, config_identity, revision_document
from bigsci_launch.units import format_age

SCHEMA_VERSION = 1
PACKAGES = ("torch", "deepspeed", "numpy")
MUCH = 3.0
"""An expected time that is this many times longer than the measured one is worth a remark."""
COLUMNS = ("phase", "outcome", ">seconds", "found")
EXIT_CODES: dict[Decision, int] = {"go": 0, "no-go": 1, "unknown": 4}


@dataclass(frozen=True, slots=True)
class RehearsalReport:
    """Everything that a rehearsal has to say. `made` is seconds since the epoch, `seconds` how long it took."""

    arrangement: Arrangement
    played: Played
    revision: CodeRevision
    made: float
    seconds: float
    is_stored: bool = True

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.played.decision]

    @property
    def advice(self) -> tuple[str, ...]:
        return tuple(find_advice(self.arrangement.loaded.config, self.played.measured))


def find_advice(config: RunConfig, measured: Measured) -> Iterator[str]:
    """Yield what the measured times mean for the keys that the exit margin is computed from."""
    step_s = None if measured.step_s is None else measured.step_s * measured.slower_by
    estimated = measured.slower_by != 1.0
    for key, what, found in (
        ("step_time_s", "a step", step_s),
        ("save_time_s", "a save", measured.save_s),
        ("eval_time_s", "an evaluation", measured.eval_s),
    ):
        expected = getattr(config.monitor, key)
        if found is None or found <= expected <= found * MUCH:
            continue
        took = f"{what} took {found:.3g} s"
        if key == "step_time_s" and estimated:
            took = f"a step took {measured.step_s:.3g} s, so about {found:.3g} s with all micro batches of the run"
        if found > expected:
            why = "the margin before the time limit is too short" if key != "eval_time_s" else "evaluations take longer"
            yield f"{took}: {why}; set monitor.{key} (now {expected:g}) to {_rounded(found)} or more"
        elif expected:
            yield f"{took}: monitor.{key} (now {expected:g}) may be {_rounded(found)}"


def _rounded(seconds: float) -> str:
    """Round up to what a person would write into a run file."""
    return f"{math.ceil(seconds)}" if seconds >= 1 else f"{math.ceil(seconds * 10) / 10:g}"


def report_document(report: RehearsalReport) -> dict[str, Any]:
    arrangement, played = report.arrangement, report.played
    request, loaded = arrangement.prepared.request, arrangement.loaded
    packages = installed_packages()
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": played.decision,
        "never_started": played.never_started,
        "not_checked": list(played.not_checked),
        "run": {"name": loaded.config.run.name, "file": str(arrangement.path)},
        "directory": str(arrangement.folder.path),
        "site": loaded.site.name,
        "scheduler": request.scheduler,
        "topology": request.topology.as_dict(),
        "made": report.made,
        "seconds": round(report.seconds, 1),
        "identity": config_identity(loaded),
        "revision": revision_document(report.revision),
        "versions": {
            "bigsci_launch": bigsci_launch.__version__,
            "python": platform.python_version(),
            **{name: packages.get(name) for name in PACKAGES},
        },
        "changes": [asdict(change) for change in arrangement.changes],
        "phases": [_phase_document(phase) for phase in played.phases],
        "measured": asdict(played.measured),
        "advice": list(report.advice),
    }


def _phase_document(phase: PhaseResult) -> dict[str, Any]:
    seconds = None if phase.seconds is None else round(phase.seconds, 2)
    return {"name": phase.name, "outcome": phase.outcome, "seconds": seconds, "found": list(phase.evidence)}


def verdict_text(played: Played) -> str:
    """Return the verdict: `go, with 2 things not checked`."""
    if played.decision == "unknown":
        return f"not known: {played.never_started}"
    if played.decision == "no-go":
        failed = [phase.name for phase in played.phases if phase.outcome == "failed"]
        return f"no-go: {', '.join(failed)} failed"
    number = len(played.not_checked)
    return "go" if not number else f"go, with {number} thing{'s'[: number > 1]} not checked"


def phase_rows(phases: Sequence[PhaseResult]) -> list[list[str]]:
    """Return one row for each phase, for the columns in `COLUMNS`."""
    return [
        [phase.name, phase.outcome, "" if phase.seconds is None else f"{phase.seconds:.1f}", "; ".join(phase.evidence)]
        for phase in phases
    ]


def heading_lines(report: RehearsalReport) -> list[str]:
    """Return what stands above the phases."""
    arrangement = report.arrangement
    request = arrangement.prepared.request
    where = (
        "this machine" if request.scheduler == "local" else f"{request.nodes} nodes of {arrangement.loaded.site.name}"
    )
    made = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(report.made))
    return [
        f"rehearsal of {arrangement.loaded.config.run.name}: {verdict_text(report.played)}",
        f"at {report.revision.short}, {made}, in {format_age(report.seconds)}, "
        f"with {request.topology.world_size} ranks ({request.topology}) on {where}",
    ]


def closing_lines(report: RehearsalReport) -> list[str]:
    alone = report.played.more_unchecked
    return [
        *(f"not checked: {text}" for text in alone),
        *report.advice,
        *([f"report: {report.arrangement.folder.report}"] if report.is_stored else []),
    ]

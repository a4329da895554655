"""What `bsl watch --once` prints: lines for people and one JSON document. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bigsci_launch.runs.watching.heartbeat import Health
from bigsci_launch.runs.watching.ledger import RunFinding
from bigsci_launch.watch.rounds.loop import WatchStatus
from bigsci_launch.watch.watched import WatchedRun

SCHEMA_VERSION = 1


def status_lines(watched: WatchedRun, status: WatchStatus) -> list[str]:
    """Return the health of the run, what is wrong, and what could not be seen, one fact a line."""
    attempt = f"  attempt {status.attempt}" if status.attempt else ""
    facts = [("run", f"{watched.name}{attempt}"), ("health", f"{_HEALTH[status.health]}: {status.sentence}")]
    for finding in status.findings:
        facts += [("finding", finding.sentence), *(("", text) for text in finding.details)]
        facts += [("evidence", finding.bundle)] if finding.bundle else []
    facts += [("not seen", text) for text in status.blind if text != status.sentence]
    facts += [("remark", text) for text in status.remarks if text != status.sentence]
    width = max(len(name) for name, _ in facts)
    return [f"{name:<{width}}  {text}" for name, text in facts]


_HEALTH = {Health.HEALTHY: "healthy", Health.FINDING: "not healthy", Health.BLIND: "not known"}


def status_document(watched: WatchedRun, status: WatchStatus) -> dict[str, Any]:
    """Return everything that is known as one document."""
    silence = status.seen.silence
    return {
        "schema_version": SCHEMA_VERSION,
        "run": str(watched.run.path) if watched.run is not None else None,
        "job_id": watched.job_id,
        "attempt": status.attempt,
        "health": status.health.value,
        "sentence": status.sentence,
        "is_over": status.seen.view.is_over,
        "step": silence.step,
        "phase": silence.phase,
        "silent_s": round(silence.lasts_s, 1),
        "usual_s": silence.usual_s,
        "pace": silence.pace.value,
        "findings": [finding_document(finding) for finding in status.findings],
        "blind": list(status.blind),
        "remarks": list(status.remarks),
    }


def finding_document(finding: RunFinding) -> dict[str, Any]:
    return asdict(finding)

"""Sections of the answer of `bsl status`, as lines and as JSON: the restart, micro-batches, watchers. Pure."""

from __future__ import annotations

from dataclasses import asdict
from textwrap import shorten
from typing import Any

from bigsci_launch.checkpoints.found_size import FoundSize, SizeChange
from bigsci_launch.checkpoints.restart import Restart, advice_about
from bigsci_launch.loss_jump import figures_of
from bigsci_launch.runs.watching.heartbeat import Health, WatcherHeartbeat
from bigsci_launch.runs.watching.ledger import Act, RunFinding
from bigsci_launch.runs.watching.read import Watching
from bigsci_launch.units import ago

WHY_WIDTH = 80
_HEALTH = {Health.HEALTHY: "healthy", Health.FINDING: "not healthy", Health.BLIND: "not known"}
_WHY = {
    "found": "found",
    "remembered": "taken again",
    "out_of_memory": "out of memory",
    "thrash": "memory too tight",
}
_MOST_LINES = 3
"""The newest of so many changes; --json has all."""


def restart_facts(restart: Restart | None) -> list[tuple[str, str]]:
    """Return what is known of the restart; nothing for an attempt that began at step 1."""
    if restart is None:
        return []
    start = "" if restart.checkpoint is None else f"from {restart.checkpoint.name}: "
    facts = [("restart", f"{start}{restart.sentence}")]
    if not restart.is_changed:
        return facts
    facts += [("likely cause", cause) for cause in restart.causes]
    if not restart.causes:
        facts.append(("likely cause", "unknown: no record shows a changed setting, a failed check or a skipped step"))
    facts += [("unknown", text) for text in restart.not_known]
    return facts + [("compare", command) for command in advice_about(restart)]


def restart_document(restart: Restart | None) -> dict[str, Any] | None:
    if restart is None:
        return None
    return {
        "verdict": restart.verdict,
        "checkpoint": None if restart.checkpoint is None else str(restart.checkpoint),
        "after_attempt": None if restart.before is None else restart.before.name,
        **figures_of(restart.jump),
        "text": restart.sentence,
        "causes": list(restart.causes),
        "not_known": list(restart.not_known),
        "compare": list(advice_about(restart)),
    }


def size_facts(found: FoundSize | None) -> list[tuple[str, str]]:
    """Return lines about the size and its newest changes; nothing without `auto`."""
    if found is None:
        return []
    room = "" if found.headroom is None else f", {100 * found.headroom:.0f} % of the memory free at the peak"
    limit = "" if found.too_large is None else f"; {found.too_large} does not fit"
    other = "" if found.evaluation_size == found.size else f"; {found.evaluation_size} in evaluations"
    facts = [("micro-batch", f"{found.size} (auto){room}{limit}{other}")]
    return facts + [("", _line(each)) for each in found.history[-_MOST_LINES:]]


def _line(change: SizeChange) -> str:
    sizes = f"{change.was} -> {change.size}" if change.was not in (None, change.size) else f"{change.size}"
    return f"after step {change.step}: {sizes}, {_WHY.get(change.why, change.why)}: {change.words}"


def watching_facts(watching: Watching, asked: float, *, may_run: bool) -> list[tuple[str, str]]:
    """Return who watches the run, what is wrong with it, and what was done. `may_run`: its attempt may still run."""
    facts = [("watcher", heartbeat_text(heartbeat, asked)) for heartbeat in watching.heartbeats if may_run]
    for finding in watching.findings:
        facts.append(("finding", finding_text(finding, asked)))
        facts += [("", text) for text in (*lost_text(finding, asked if may_run else None), *finding.details)]
        facts += [("evidence", finding.bundle)] if finding.bundle else []
    facts += [("undelivered", text) for text in watching.undelivered]
    facts += [("left out", text) for text in watching.remarks]
    return facts + [("act", act_text(act, asked)) for act in watching.acts]


def heartbeat_text(heartbeat: WatcherHeartbeat, asked: float) -> str:
    """Return who watches, and its last report; that it is dead, if that is known."""
    age = ago(heartbeat.time, asked)
    who = f"{heartbeat.name} on {heartbeat.host}"
    if (is_dead := heartbeat.is_dead(asked)) is not False:
        sure = "is dead" if is_dead else "may be dead"
        clock = "" if heartbeat.is_here else ", by the clock of this machine"
        return f"{who} {sure}: its newest heartbeat was {age}{clock}"
    acts = ", may act" if heartbeat.may_act else ""
    return f"{who}{acts}, {age}: {_HEALTH[heartbeat.health]}: {heartbeat.sentence}"


def lost_text(finding: RunFinding, asked: float | None) -> list[str]:
    """Return what a finding has cost so far, if that is known."""
    hours = finding.lost_hours(asked)
    if hours is None or finding.lost_ranks is None:
        return []
    each = f"it costs the time of {finding.lost_ranks:.2g} ranks"
    return [f"{each}: {hours:.2g} rank-hours so far (GPU-hours, if each rank has a GPU)"]


def finding_text(finding: RunFinding, asked: float) -> str:
    return f"{finding.kind.replace('_', ' ')}, {ago(finding.noticed, asked)}: {finding.sentence}"


def act_text(act: Act, asked: float) -> str:
    """Return an act with who did it or asked for it, why, and its result."""
    why = f" ({shorten(act.why, WHY_WIDTH, placeholder=' ...')})" if act.why else ""
    age = ago(act.time, asked)
    came = f": {act.words}" if act.words else ""
    return f"{act.what.replace('_', ' ')} by {act.who}{why}, {age}, {act.state}{came}"


def watching_document(watching: Watching, asked: float, *, may_run: bool) -> dict[str, Any]:
    return {
        "watchers": [
            {**asdict(heartbeat), "health": heartbeat.health.value, "is_dead": heartbeat.is_dead(asked)}
            for heartbeat in watching.heartbeats
        ],
        "findings": [
            {**asdict(finding), "lost_rank_hours": finding.lost_hours(asked if may_run else None)}
            for finding in watching.findings
        ],
        "acts": [asdict(act) for act in watching.acts],
        "undelivered": list(watching.undelivered),
        "left_out": list(watching.remarks),
    }

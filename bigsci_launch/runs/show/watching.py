"""What watchers of a run say, in `bsl status`: text and JSON. Pure."""

from __future__ import annotations

from dataclasses import asdict
from textwrap import shorten
from typing import Any

from bigsci_launch.runs.watching.beat import Beat, Health
from bigsci_launch.runs.watching.ledger import Act, RunFinding
from bigsci_launch.runs.watching.read import Watching
from bigsci_launch.units import ago

WHY_WIDTH = 80
_HEALTH = {Health.HEALTHY: "healthy", Health.FINDING: "not healthy", Health.BLIND: "not known"}


def watching_facts(watching: Watching, asked: float, *, may_run: bool) -> list[tuple[str, str]]:
    """Return who watches the run, what is wrong with it, and what was done. `may_run`: its attempt may still run."""
    facts = [("watcher", beat_text(beat, asked)) for beat in watching.beats if may_run]
    for finding in watching.findings:
        facts.append(("finding", finding_text(finding, asked)))
        facts += [("", text) for text in finding.details]
        facts += [("evidence", finding.bundle)] if finding.bundle else []
    facts += [("not told", text) for text in watching.not_told]
    facts += [("left out", text) for text in watching.remarks]
    return facts + [("act", act_text(act, asked)) for act in watching.acts]


def beat_text(beat: Beat, asked: float) -> str:
    """Return who watches, and what it says; that it is dead, if that is known."""
    age = ago(beat.time, asked)
    who = f"{beat.name} on {beat.host}"
    if (is_dead := beat.is_dead(asked)) is not False:
        sure = "is dead" if is_dead else "may be dead"
        clock = "" if beat.is_here else ", by the clock of this machine"
        return f"{who} {sure}: its newest sign of life was {age}{clock}"
    acts = ", may act" if beat.may_act else ""
    return f"{who}{acts}, {age}: {_HEALTH[beat.health]}: {beat.sentence}"


def finding_text(finding: RunFinding, asked: float) -> str:
    """Return a finding with its kind and age."""
    return f"{finding.kind.replace('_', ' ')}, {ago(finding.noticed, asked)}: {finding.sentence}"


def act_text(act: Act, asked: float) -> str:
    """Return an act with who did it or asked for it, why, and what came of it."""
    why = f" ({shorten(act.why, WHY_WIDTH, placeholder=' ...')})" if act.why else ""
    age = ago(act.time, asked)
    came = f": {act.words}" if act.words else ""
    return f"{act.what.replace('_', ' ')} by {act.who}{why}, {age}, {act.state}{came}"


def watching_document(watching: Watching, asked: float) -> dict[str, Any]:
    """Return the part of the JSON document of `bsl status` that is about watchers."""
    return {
        "watchers": [
            {**asdict(beat), "health": beat.health.value, "is_dead": beat.is_dead(asked)} for beat in watching.beats
        ],
        "findings": [asdict(finding) for finding in watching.findings],
        "acts": [asdict(act) for act in watching.acts],
        "not_told": list(watching.not_told),
        "left_out": list(watching.remarks),
    }

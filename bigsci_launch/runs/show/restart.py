"""What `bsl status` says about the loss where an attempt continued its run: text and JSON. Pure."""

from __future__ import annotations

import math
from typing import Any

from bigsci_launch.runs.restart.restart import Restart, advice_about


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
        facts.append(("likely cause", "not known: no record shows a changed setting, a failed check or a skipped step"))
    facts += [("not known", text) for text in restart.not_known]
    return facts + [("compare", command) for command in advice_about(restart)]


def restart_document(restart: Restart | None) -> dict[str, Any] | None:
    """Return the part of the JSON document of `bsl status` that is about the restart."""
    if restart is None:
        return None
    jump = restart.jump
    return {
        "verdict": restart.verdict,
        "checkpoint": None if restart.checkpoint is None else str(restart.checkpoint),
        "after_attempt": None if restart.before is None else restart.before.name,
        "step": None if jump is None else jump.step,
        "loss_before": None if jump is None else _number(jump.before),
        "loss_after": None if jump is None else _number(jump.after),
        "jump": None if jump is None else _number(jump.jump),
        "spread": None if jump is None else _number(jump.spread),
        "spreads": None if jump is None else _number(jump.spreads),
        "text": restart.sentence,
        "causes": list(restart.causes),
        "not_known": list(restart.not_known),
        "compare": list(advice_about(restart)),
    }


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None

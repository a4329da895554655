"""Why an attempt ended, and what to do about it: lines from the contents of `exit.json`. Pure.

Records of older versions lack some fields; what is missing is left out.
"""

from __future__ import annotations

from typing import Any

from bigsci_launch.checkpoints.resume import NextStart
from bigsci_launch.runs.ending.failures import failure_text
from bigsci_launch.topology.naming import name_ranks

EndRecord = dict[str, Any]
FULL_DISK = ("No space left on device", "Disk quota exceeded")
START: dict[NextStart, str] = {
    "checkpoint": "it resumes from its newest checkpoint",
    "beginning": "it has no checkpoint: it starts from the beginning",
    "unknown": "unknown whether it has a checkpoint to resume from",
}
"""Where the next attempt of a run begins."""
EXPLAINED_BY_LOGS = ("crashed", "launch_failed", "unknown")
"""Ends without a known culprit, which the output of the ranks or of the job script may explain."""


def ending_facts(ended: EndRecord) -> list[tuple[str, str]]:
    """Return lines (name, text): the reason, who failed first, and what supports it."""
    code = ended.get("exit_code")
    reason = f"{ended['reason']}" + (f", exit code {code}" if code is not None else "")
    facts = [("ended", reason)]
    if ended.get("cause"):
        facts.append(("cause", str(ended["cause"])))
    failure = ended.get("first_failure")
    if failure is not None:
        facts.append(("first failure", failure_text(failure)))
        if failure.get("last_words"):
            facts.append(("last words", str(failure["last_words"])))
    elif ended["reason"] == "hang":
        facts.append(("first failure", "unknown: no record shows which rank hung"))
    elif ended.get("suspects"):
        ranks = [each["rank"] for each in ended["suspects"]]
        facts.append(("first failure", f"unknown: a guard accuses none of {name_ranks(ranks)}"))
    is_plain = ended["reason"] in ("finished", "stopped")
    evidence = [("evidence", sentence) for sentence in ([] if is_plain else ended.get("evidence") or [])]
    stacks = [("stacks", str(ended["spy_bundle"]))] if ended.get("spy_bundle") else []
    return [*facts, *evidence, *stacks]


def ending_advice(ended: EndRecord, run: str, start: NextStart = "unknown") -> str | None:
    """Return what to do after an attempt has ended; None if there is nothing. `run` is the run as a person types it,
    `start` where the next attempt would begin.
    """
    reason, failure = ended["reason"], ended.get("first_failure")
    logs = f"bsl logs {run}" + (f" --rank {failure.get('rank')}" if failure is not None else "")
    if any(words in (ended.get("cause") or "") for words in FULL_DISK):
        return f"make room there, and submit it again   ({START[start]})"
    if reason == "out_of_memory":
        return f"{logs}   (and ask for more memory, or use fewer workers of the data loader: Slurm killed by memory)"
    if reason != "node_failure" and failure is not None and failure.get("rank") is None:
        return f"submit it again: {failure.get('node')} is left out   (bsl nodes)"
    if reason == "hang" and ended.get("spy_bundle"):
        return f"bsl spy --bundle {ended['spy_bundle']}   (the stacks while it hung)"
    if reason == "hang":
        return f"{logs}   (and `bsl spy {run}` while it hangs, if it does so again)"
    if reason == "node_failure" and failure is not None and failure.get("node"):
        return f"submit it again; `bsl nodes` shows whether {failure['node']} is left out"
    if reason == "hung_at_exit":
        return f"{logs}   (if the rank was still working at its exit, raise slurm.wait_s)"
    if failure is not None and failure.get("signal") == "SIGKILL":
        return f"{logs}   (SIGKILL comes from outside the program, often because the node ran out of memory)"
    if reason in EXPLAINED_BY_LOGS or failure is not None:
        return logs
    return None

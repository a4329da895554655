"""What `bsl status` shows where the end of an attempt was reconstructed, or could not be. Pure."""

from __future__ import annotations

from typing import Any

from bigsci_launch.scheduler.job import JobInfo, JobState

UNKNOWN = "unknown: not `bsl cancel`, and only Slurm's accounting (sacct) records others"


def source_facts(ended: dict[str, Any], job: JobInfo, cancelled_by: str | None) -> list[tuple[str, str]]:
    """Return who ended a cancelled job, and where the reason of the end comes from if it is not exit.json."""
    facts = []
    if job.state is JobState.CANCELLED and job.source in ("squeue", "sacct"):
        facts.append(("cancelled by", cancelled_by or UNKNOWN))
    source = ended.get("reconstructed")
    if source and source["source"] == "job.out":
        facts.append(("source", "job.out, where the batch script printed the record that it could not write"))
    elif source:
        text = f"reconstructed on {source['host']} from the records of the ranks: the batch script left no exit.json"
        facts.append(("source", text))
    return facts


def unknown_end(last_line: str | None) -> str:
    """Return the sentence about an attempt that has ended for an unknown reason."""
    quoted = f"; the last line of the script: {last_line}" if last_line else ""
    why = "it was killed before it could write exit.json, could not write it, or was lost with its host"
    return f"unknown: the job script recorded no end: {why}{quoted}"

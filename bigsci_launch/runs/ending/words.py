"""What `bsl status` says where the end of an attempt was worked out, or could not be. Pure."""

from __future__ import annotations

from typing import Any


def source_facts(ended: dict[str, Any]) -> list[tuple[str, str]]:
    """Return where the reason of the end comes from, if it is not from exit.json."""
    source = ended.get("reconstructed")
    if not source:
        return []
    if source["source"] == "job.out":
        return [("says", "job.out, where the batch script printed the record that it could not write")]
    text = f"worked out on {source['host']} from the records of the ranks: the batch script left no exit.json"
    return [("says", text)]


def unknown_end(last_line: str | None) -> str:
    """Return what is said of an attempt that has ended, nobody knows why."""
    quoted = f"; the last line of the script: {last_line}" if last_line else ""
    return f"unknown: there is no exit.json, and the records do not show why{quoted}"

"""Finds earlier rehearsals of a run, and says in one line whether this code and this run file were rehearsed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bigsci_launch.errors import RunDirError
from bigsci_launch.runs.layout import read_json, rehearsals_of
from bigsci_launch.runs.rehearsals.identity import CodeRevision, parse_revision


@dataclass(frozen=True, slots=True)
class PastRehearsal:
    """What a stored report says. `made` is seconds since the epoch, `failed` the phases that failed."""

    path: Path
    verdict: str
    made: float
    identity: str
    revision: CodeRevision
    failed: tuple[str, ...]
    num_not_checked: int

    @property
    def words(self) -> str:
        """The verdict and the day: `go, with 1 thing not checked, on 2026-11-23`."""
        text = self.verdict
        if self.failed:
            text += f" ({', '.join(self.failed)} failed)"
        if self.verdict == "go" and self.num_not_checked:
            text += f", with {self.num_not_checked} thing{'s'[: self.num_not_checked > 1]} not checked"
        return f"{text}, on {time.strftime('%Y-%m-%d', time.gmtime(self.made))}"


def read_rehearsals(root: Path, name: str) -> list[PastRehearsal]:
    """Return the rehearsals of run `name` with a verdict, the oldest first.

    Those that were interrupted, that never started, or that another version stored are left out.
    """
    found = []
    for folder in rehearsals_of(root, name):
        try:
            document = read_json(folder.report)
            if document["verdict"] == "unknown":
                continue
            found.append(
                PastRehearsal(
                    folder.path,
                    str(document["verdict"]),
                    float(document["made"]),
                    str(document["identity"]),
                    parse_revision(document["revision"]),
                    tuple(phase["name"] for phase in document["phases"] if phase["outcome"] == "failed"),
                    len(document["not_checked"]),
                )
            )
        except (RunDirError, KeyError, TypeError, ValueError):
            continue
    return found


def describe_past(past: Sequence[PastRehearsal], revision: CodeRevision, identity: str, *, command: str) -> str:
    """Return one line on whether this revision and this configuration were rehearsed; `command` would do it."""
    same = [each for each in past if each.identity == identity and each.revision.is_same(revision)]
    if same and same[-1].verdict == "go":
        return f"rehearsed at {revision.short}: {same[-1].words}"
    if same:
        return f"warning: rehearsed at {revision.short}: {same[-1].words}; {command} rehearses it again"
    last = f" (last rehearsal: at {past[-1].revision.short}: {past[-1].words})" if past else ""
    if not revision.is_known:
        what = "the revision of the code is not known, so it cannot be told whether it was rehearsed"
    elif past and past[-1].revision.is_same(revision):
        what = "never rehearsed with this configuration"
    elif past and past[-1].revision.repositories == revision.repositories:
        what = f"never rehearsed at {revision.short}: what is not committed has changed"
    else:
        what = f"never rehearsed at {revision.short}"
    return f"note: {what}{last}; {command} does it in minutes"

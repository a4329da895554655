"""What a message says: a subject of one line, a text for people, a document for programs. Pure."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import PurePath
from typing import Any

from bigsci_launch.runs.layout import RunDir
from bigsci_launch.runs.watching.ledger import Act, RunFinding
from bigsci_launch.runs.watching.outbox import Notice

SUBJECT_LENGTH, MOST_OF_NAME = 160, 60
TEXT_LENGTH = 3500
"""Slack cuts longer texts, and phones show less."""


def notice_of_finding(run: RunDir, finding: RunFinding, who: str, look: str) -> Notice:
    """Return the message about a finding in the run's ledger. `look` is the command that shows more."""
    return Notice(
        key=f"finding {finding.key} {finding.noticed:.0f}",
        what=finding.kind,
        sentence=finding.sentence,
        run=str(run.path),
        who=who,
        time=finding.noticed,
        attempt=finding.attempt,
        step=finding.step,
        details=finding.details,
        next=look,
        bundle=finding.bundle,
    )


def notice_of_act(run: RunDir, act: Act, look: str) -> Notice:
    """Return the message about something that a watcher has done to the run, or could not do."""
    came = f": {act.words}" if act.words else ""
    return Notice(
        key=f"act {act.key} {act.state}",
        what=act.what,
        sentence=f"{act.what.replace('_', ' ')} by {act.who} is {act.state}{came}",
        run=str(run.path),
        who=act.who,
        time=act.time,
        attempt=act.attempt,
        step=act.step,
        details=(f"why: {act.why}",) if act.why else (),
        next=look,
    )


def subject(notice: Notice) -> str:
    """Return the message in one short line without control characters, fit for the header of a mail.

    It begins with what is wrong, as a phone shows only that, and ends with the run.
    """
    run = f" [{_plain(PurePath(notice.run).name)[:MOST_OF_NAME]}]"
    line, room = _plain(notice.sentence), SUBJECT_LENGTH - len(run)
    return (line if len(line) <= room else f"{line[: room - 3]}...") + run


def text(notice: Notice) -> str:
    """Return the message as lines for people: what, where, when, and how to look next."""
    place = f", attempt {notice.attempt}" if notice.attempt else ""
    place += f", step {notice.step}" if notice.step is not None else ""
    lines = [
        f"{PurePath(notice.run).name}: {notice.sentence}",
        *notice.details,
        f"run: {notice.run}{place}",
        f"noticed: {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime(notice.time))} by {notice.who}",
        *([f"evidence: {notice.bundle}"] if notice.bundle else []),
        *([f"next: {notice.next}"] if notice.next else []),
    ]
    whole = "\n".join(_plain(line) for line in lines)
    return whole if len(whole) <= TEXT_LENGTH else f"{whole[: TEXT_LENGTH - 4]}\n..."


def document(notice: Notice) -> dict[str, Any]:
    """Return the message for programs. `text` is what chat services show."""
    return {"schema_version": 1, "text": text(notice), "subject": subject(notice), **asdict(notice)}


def _plain(line: str) -> str:
    """Return a line without characters that end it, or that terminals and mail programs obey."""
    said = "".join(letter if letter.isprintable() else " " for letter in line)
    return said.encode("utf-8", "backslashreplace").decode()

"""What launchers of ranks left, such as torchrun, where each task starts one (`slurm.ranks_per_task`).

A launcher is no rank: its end counts only where its workers do not show why the attempt ended.
"""

from __future__ import annotations

from typing import NamedTuple

from bigsci_launch.endings.conclude import conclude
from bigsci_launch.endings.ending import JobEnding
from bigsci_launch.endings.lines import Speaker
from bigsci_launch.endings.statements import Statement, read_statements
from bigsci_launch.endings.words import read_words
from bigsci_launch.file_names import launcher_of_name
from bigsci_launch.runs.ending.blame import NOTHING, EndFinding
from bigsci_launch.runs.ending.failures import make_failure
from bigsci_launch.runs.ending.records import LOG_TAIL_BYTES, STAMP, Record, last_line, tail
from bigsci_launch.runs.layout import AttemptDir, rank_files, read_record


class LauncherEnd(NamedTuple):
    """How a launcher ended by itself, before it was told to: by a signal or with an exit code."""

    number: int
    node: str
    status: Record
    time: float

    def __str__(self) -> str:
        how = self.status["signal"] or f"exit code {self.status['code']}"
        return f"launcher {self.number} on {self.node} ended with {how}"


def find_first_end(attempt: AttemptDir) -> LauncherEnd | None:
    """Return the launcher that was the first to fail by itself; None if none did."""
    files = rank_files(attempt.exits, ".json", launcher_of_name)
    ended = [found for number, path in files.items() if (found := _end_of(number, read_record(path)))]
    return min(ended, key=lambda each: each.time, default=None)


def _end_of(number: int, record: Record) -> LauncherEnd | None:
    ended_by, code, moment = record.get("signal"), record.get("code"), record.get("time")
    status = {
        "signal": ended_by if isinstance(ended_by, str) else None,
        "code": code if isinstance(code, int) else None,
    }
    if not any(status.values()) or record.get("terminated") is not None or not isinstance(moment, (int, float)):
        return None
    return LauncherEnd(number, str(record.get("node") or "an unknown node"), status, moment)


def blame_launcher(attempt: AttemptDir, finding: EndFinding) -> EndFinding:
    """Return the finding with what launchers left, where no rank explains the end."""
    is_open = finding.reason in ("crashed", "launch_failed") and finding.first is None and not finding.failed
    first = find_first_end(attempt) if is_open else None
    if first is None:
        return finding
    ending, last = _words_of(attempt, first)
    named = ending.culprit.ranks
    if finding.reason == "crashed" or len(named) != 1:
        said = last if ending.kind == "unknown" else ending.evidence[0].said
        return finding._replace(cause=f"{first}{f': {said}' if said else ''}", status_of=first.status)
    failure = make_failure(named[0], {**NOTHING, "pid": {"node": first.node}}, ending.sentence, first.time)
    return EndFinding("crashed", failure, [named[0]], status_of=first.status)


def _words_of(attempt: AttemptDir, launcher: LauncherEnd) -> tuple[JobEnding, str]:
    """Return what the log of a launcher says about the end, and the line that explains it."""
    path = rank_files(attempt.logs, ".log", launcher_of_name).get(launcher.number)
    lines = tail(path, LOG_TAIL_BYTES) if path else []
    text = "\n".join(STAMP.sub(b"", line).decode(errors="replace") for line in lines)
    told: tuple[Statement, ...] = read_statements(text, "", Speaker(node=launcher.node), read_words()).statements
    return conclude(told), last_line(lines)

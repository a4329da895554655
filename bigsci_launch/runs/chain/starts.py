"""Reads what the starts of a run left, for the decision whether it starts again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from bigsci_launch.file_names import LATEST, step_of_tag
from bigsci_launch.runs.chain.decision import ChainStart, Mark
from bigsci_launch.runs.chain.records import ChainRecord
from bigsci_launch.runs.events import read_last_events, read_tail
from bigsci_launch.runs.layout import AttemptDir, RunDir, rank_files, read_record, write_json
from bigsci_launch.runs.step_forms import forms_of, printed_text
from bigsci_launch.runs.watching.ended import read_ended_by
from bigsci_launch.safe_files import read_file
from bigsci_launch.step_lines import parse_steps

TAIL_BYTES = 2**16
MAX_LOGS = 16
"""Logs that are searched for a step, the newest first: one rank of a program prints it."""


def starts_before(attempt: AttemptDir, chain: ChainRecord, *, including: bool) -> list[AttemptDir]:
    """Return the starts of the chain, oldest first, up to `attempt`, which is left out unless `including`."""
    first, last = attempt.run.attempt(chain.first).order, attempt.order
    found = [each for each in attempt.run.attempts() if first <= each.order <= last]
    return [each for each in found if including or each != attempt]


def read_starts(attempts: Sequence[AttemptDir], chain: ChainRecord, newest: Mark | None) -> list[ChainStart]:
    """Return what is known of the starts. `newest` is the checkpoint after the last of them."""
    later = [mark_before(attempt) for attempt in attempts[1:]] + [newest]
    return [read_start(attempt, chain, after) for attempt, after in zip(attempts, later, strict=True)]


def read_start(attempt: AttemptDir, chain: ChainRecord, after: Mark | None) -> ChainStart:
    end = read_record(attempt.exit)
    step, total = steps_of(attempt, has_records=chain.total_steps is not None)
    return ChainStart(
        name=attempt.name,
        reason=end.get("reason"),
        step=step,
        checkpoint=after,
        started=read_record(attempt.chain).get("started") or end.get("started"),
        total_steps=total,
        is_cancelled=attempt.cancel_mark.exists(),
        ended_by=read_ended_by(attempt),
    )


def steps_of(attempt: AttemptDir, *, has_records: bool) -> tuple[int | None, int | None]:
    """Return the last step that a start made, and the last of the run if that is printed; 0: none, None: not known."""
    events = [path for path in rank_files(attempt.events, ".jsonl").values() if path.stat().st_size]
    if events or has_records:
        return max((step for path in events for step in recorded_steps(path)), default=0), None
    logs = [*rank_files(attempt.logs, ".log").values(), attempt.job_output]
    tails = (printed_text(attempt, path, read_tail(path, TAIL_BYTES, follow=True)) for path in newest_files(logs))
    forms = forms_of(attempt)
    found = sorted({(step, line.total_steps or 0) for text in tails for step, line in parse_steps(text, forms)})
    if not found:
        return None, None
    (before, _), (step, total) = found[max(0, len(found) - 2)], found[-1]
    is_next = step < total < step + (step - before)  # it prints every tenth step: those after the last ten are not seen
    return step, (step if is_next else total) or None


def recorded_steps(path: Path) -> list[int]:
    records = read_last_events(path, TAIL_BYTES, holding=b'"step"')
    return [each["step"] for each in records if each.get("kind") == "step" and isinstance(each.get("step"), int)]


def newest_files(paths: Sequence[Path]) -> list[Path]:
    found = [(path.stat().st_mtime, path) for path in paths if path.exists()]
    return [path for _, path in sorted(found, reverse=True)[:MAX_LOGS]]


def newest_checkpoint(run: RunDir) -> Mark | None:
    """Return the checkpoint that the `latest` files of the run's folder name; None if there is none."""
    marks = []
    for path in run.checkpoints.glob(f"{LATEST}*"):
        with contextlib.suppress(OSError):
            name = read_file(path, follow=True).decode("utf-8", "replace").strip()
            step = int(name) if name.isdecimal() else step_of_tag(name)
            marks.append(Mark(step, path.stat().st_mtime))
    return max(marks, key=lambda mark: (mark.step is not None, mark.step or 0, mark.time), default=None)


def mark_before(attempt: AttemptDir) -> Mark | None:
    """Return the newest checkpoint at the beginning of a start, as the start recorded it."""
    record = read_record(attempt.chain).get("checkpoint")
    return Mark(record["step"], record["time"]) if record else None


def note_start(attempt: AttemptDir, newest: Mark | None, number: int) -> None:
    """Record when a start began, from which checkpoint, and the starts of its chain so far."""
    began = {"num_starts": number, "started": time.time(), "checkpoint": newest._asdict() if newest else None}
    write_json(attempt.chain, {**read_record(attempt.chain), **began})

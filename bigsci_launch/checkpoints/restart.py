"""Whether the loss jumped when an attempt continued the run, and what is known to have changed there.

A cause is only named if a record shows it. If none does, the answer says what to compare next.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from bigsci_launch.checkpoints.folder import read_record
from bigsci_launch.errors import BslError, RunDirError
from bigsci_launch.loss_jump import FIRST, RECENT, LossJump, describe_jump, measure_jump
from bigsci_launch.runs.layout import AttemptDir, RunDir, rank_files
from bigsci_launch.runs.step_forms import forms_of, printed_text
from bigsci_launch.safe_files import open_stream, parse_json
from bigsci_launch.step_lines import parse_steps

MAX_CAUSES = 6
SAME_STEP = {"learning_rate": "learning rate", "global_batch_size": "global batch size"}
PART_BYTES = 32 << 20
"""How much of the beginning or the end of a file is read: the steps around a restart are there."""
MAX_LOGS_READ = 16
STEP = b'"kind": "step"'

Part = Literal["begin", "end"]


@dataclass(frozen=True, slots=True)
class Restart:
    """How an attempt continued the run: from which checkpoint, how the loss moved there, and what else changed.

    `checkpoint` is None for programs that do not record it. `jump` is None if the losses on one side are not known;
    `unknown` then says why. `causes` are sentences, the likeliest first, `not_known` what was not recorded. `logs` are
    those of the two sides.
    """

    attempt: AttemptDir
    checkpoint: Path | None
    jump: LossJump | None
    causes: tuple[str, ...] = ()
    not_known: tuple[str, ...] = ()
    unknown: str = ""
    before: AttemptDir | None = None
    logs: tuple[Path, Path] | None = None

    @property
    def is_changed(self) -> bool:
        """Whether the restart is known to have changed the loss, by a jump or for the same step."""
        return self.jump is not None and self.jump.is_changed

    @property
    def verdict(self) -> str:
        """`spike`, `other loss`, `equal`, `no jump` or `unknown`."""
        return "unknown" if self.jump is None else self.jump.verdict

    @property
    def sentence(self) -> str:
        if self.jump is None:
            return f"unknown whether the loss jumped: {self.unknown}"
        return describe_jump(self.jump, source=f"in attempt {self.before.name}" if self.before else "before")


def find_restart(run: RunDir, attempt: AttemptDir) -> Restart | None:
    """Return how `attempt` continued the run; None if it began at step 1, or if nothing shows where it began."""
    load = next(read_kinds(attempt, "load"), None)
    checkpoint = Path(load["path"]) if load and isinstance(load.get("path"), str) else None
    after = read_losses(attempt, "begin")
    if after is None:
        return Restart(attempt, checkpoint, None, unknown="no step since") if checkpoint else None
    step = min(after.by_step)
    earlier = _earlier(run, attempt, checkpoint)
    if step == 1 or not (checkpoint or earlier):
        return None
    sources = _sources(earlier, step)
    before = {at: loss for each in reversed(sources) for at, loss in each.by_step.items()}
    if not any(at <= step for at in before):
        return Restart(attempt, checkpoint, None, unknown="no attempt has reported the losses before it")
    changes = list(read_kinds(attempt, "changed"))
    return Restart(
        attempt=attempt,
        checkpoint=checkpoint,
        jump=measure_jump(before, {at: after.by_step[at] for at in sorted(after.by_step)[:RECENT]}),
        causes=_causes(changes, checkpoint, after, sources),
        not_known=tuple(dict.fromkeys(_texts(change for change in changes if change.get("severity") == "unknown"))),
        before=sources[0].attempt,
        logs=(sources[0].log, after.log),
    )


def _earlier(run: RunDir, attempt: AttemptDir, checkpoint: Path | None) -> list[AttemptDir]:
    """Return the attempts before this one, the newest first; those of the checkpoint's run if that is another one."""
    source = None if checkpoint is None else RunDir(checkpoint.parent.parent)
    with suppress(RunDirError):
        if source is not None and source.path.resolve() != run.path.resolve():
            return list(reversed(source.attempts())) if source.record.is_file() else []
        names = [each.name for each in run.attempts()]
        return list(reversed(run.attempts()[: names.index(attempt.name)])) if attempt.name in names else []
    return []


def _sources(earlier: Sequence[AttemptDir], step: int) -> list[Losses]:
    """Return the losses of as many attempts, the newest first, as have the steps before `step` that are needed."""
    found: list[Losses] = []
    known: set[int] = set()
    for attempt in earlier:
        losses = read_losses(attempt, "end")
        if losses is None or min(losses.by_step) > step:
            continue
        found.append(losses)
        known |= {at for at in losses.by_step if at < step}
        if len(known) > RECENT:
            break
    return found


def _causes(
    changes: Sequence[Mapping[str, Any]], checkpoint: Path | None, after: Losses, sources: Sequence[Losses]
) -> tuple[str, ...]:
    last = sorted(after.by_step)[:FIRST][-1]
    found = [
        *_texts(change for change in changes if change.get("severity") != "unknown"),
        *_of_steps(after, sources),
        *_of_guards(after.attempt, last),
        # An attempt that compares its settings with the checkpoint's compares this too.
        *([] if changes else _of_checkpoint(checkpoint)),
    ]
    return tuple(dict.fromkeys(found))[:MAX_CAUSES]


def _texts(events: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    return (event["text"] for event in events if isinstance(event.get("text"), str))


def _of_steps(after: Losses, sources: Sequence[Losses]) -> Iterator[str]:
    """Yield what the records of the first step say about its settings, against the same step or the one before."""
    step = min(after.by_step)
    now = after.records.get(step)
    if now is None:
        return
    same = next((each for each in sources if step in each.records), None)
    if same is not None:
        yield from _other_settings(now, same.records[step], step, same.attempt)
    last = next((each.records[step - 1] for each in sources if step - 1 in each.records), None)
    samples, size = (now.get(key) for key in ("consumed_samples", "global_batch_size"))
    if last is None or not (isinstance(samples, int) and isinstance(size, int)):
        return
    expected = last.get("consumed_samples")
    if isinstance(expected, int) and samples - size != expected:
        yield f"step {step} begins at sample {samples - size:,}, but {expected:,} were consumed before: other data"


def _other_settings(now: Mapping[str, Any], then: Mapping[str, Any], step: int, attempt: AttemptDir) -> Iterator[str]:
    for key, words in SAME_STEP.items():
        if key in now and key in then and now[key] != then[key]:
            yield f"the {words} of step {step} is {now[key]:g}, {then[key]:g} in attempt {attempt.name}"


def _of_guards(attempt: AttemptDir, last: int) -> Iterator[str]:
    for event in read_kinds(attempt, "guard", "skipped"):
        step = event.get("skipped_step", event.get("step"))
        if not isinstance(step, int) or step > last:
            continue
        if event["kind"] == "skipped":
            began = event.get("began") or ()
            yield f"step {step} was skipped" + (f": {began[0]}" if isinstance(began, list) and began else "")
        else:
            yield from _texts([event])


def _of_checkpoint(checkpoint: Path | None) -> Iterator[str]:
    if checkpoint is None:
        return
    with suppress(BslError):
        health = getattr(read_record(checkpoint), "health", None)
        if isinstance(health, dict) and health.get("passed") is False:
            findings = [str(each) for each in health.get("findings") or ()]
            yield f"{checkpoint.name} was saved although its checks failed" + "".join(
                f": {each}" for each in findings[:1]
            )


def advice_about(restart: Restart) -> tuple[str, ...]:
    """Return the commands that compare what no record shows; nothing if the loss did not change."""
    if not restart.is_changed or restart.jump is None:
        return ()
    commands = []
    if restart.logs is not None:
        commands.append(f"bsl diff-weights --seam {quote(str(restart.logs[0]))} {quote(str(restart.logs[1]))}")
    if restart.checkpoint is not None:
        commands.append(f"bsl diff-weights --audit {quote(str(restart.checkpoint))}")
    return tuple(commands)


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses of an attempt. `log` is the log of the rank that reported them; `records` are its records of steps.

    A program without records has only lines in its log, and `records` is empty.
    """

    attempt: AttemptDir
    by_step: Mapping[int, float]
    log: Path
    records: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)


def read_losses(attempt: AttemptDir, part: Part) -> Losses | None:
    """Return the losses at the beginning or at the end of an attempt; None if it has reported none.

    If a step was reported twice, the later report counts.
    """
    by_rank: dict[int, dict[int, dict[str, Any]]] = {}
    for rank, path in _files_with_steps(attempt):
        if records := _step_records(path, part):
            by_rank[rank] = records
            if not _may_be_several(attempt):
                break
    if by_rank:
        first = min(by_rank, key=lambda rank: min(by_rank[rank]))
        reported = [each for found in by_rank.values() for each in found.values()]
        if len(by_rank) > 1:
            reported.sort(key=_moment)
        records = {record["step"]: record for record in reported}
        losses = {step: record["loss"] for step, record in records.items()}
        return Losses(attempt, losses, attempt.log_file(first), records)
    forms = forms_of(attempt)
    for path in newest_logs(attempt):
        printed = parse_steps(printed_text(attempt, path, _read(path, part)), forms)
        if losses := {step: line.loss for step, line in printed if line.loss is not None}:
            return Losses(attempt, losses, path)
    return None


def read_kinds(attempt: AttemptDir, *kinds: str) -> Iterator[dict[str, Any]]:
    """Yield the records of these kinds at the beginning of an attempt, by rank; steps are not searched for them."""
    wanted = [f'"kind": "{kind}"'.encode() for kind in kinds]
    for path in rank_files(attempt.events, ".jsonl").values():
        for line in _read(path, "begin").splitlines():
            if any(text in line for text in wanted) and (record := _parse(line)) and record.get("kind") in kinds:
                yield record


def files_of_steps(attempt: AttemptDir) -> list[Path]:
    """Return the records of the rank that reports steps, or of each that has."""
    found = (path for _, path in _files_with_steps(attempt))
    return list(found) if _may_be_several(attempt) else list(islice(found, 1))


def _files_with_steps(attempt: AttemptDir) -> Iterator[tuple[int, Path]]:
    for rank, path in rank_files(attempt.events, ".jsonl").items():
        if _has_steps(path):
            yield rank, path


def _may_be_several(attempt: AttemptDir) -> bool:
    """Whether several ranks may have reported steps, one after the other: with `survive`, a generation with fewer
    ranks has another last one."""
    return attempt.generations.exists()


def _moment(record: Mapping[str, Any]) -> float:
    return float(record.get("time") or 0.0)


def _has_steps(path: Path) -> bool:
    """Whether a rank reports steps: one that does reports each. Only a part of the file is searched."""
    return STEP in _read(path, "begin", 1 << 16) or STEP in _read(path, "end", 1 << 16)


def _step_records(path: Path, part: Part) -> dict[int, dict[str, Any]]:
    lines = (line for line in _read(path, part).splitlines() if STEP in line)
    records = [record for line in lines if (record := _parse(line))]
    return {record["step"]: record for record in records if _is_step(record)}


def _is_step(record: Mapping[str, Any]) -> bool:
    is_number = isinstance(record.get("loss"), (int, float))
    return record.get("kind") == "step" and is_number and isinstance(record.get("step"), int)


def _parse(line: bytes) -> dict[str, Any]:
    try:
        record = parse_json(line, allow_nan=True)
    except ValueError:  # torn, or cut where reading began
        return {}
    return record if isinstance(record, dict) else {}


def newest_logs(attempt: AttemptDir) -> list[Path]:
    """Return the logs that may have lines of steps, the one written last first."""
    found = []
    for path in [*rank_files(attempt.logs, ".log").values(), attempt.job_output]:
        try:
            found.append((path.stat().st_mtime, path))
        except OSError:
            continue
    return [path for _, path in sorted(found, reverse=True)[:MAX_LOGS_READ]]


def _read(path: Path, part: Part, num_bytes: int = PART_BYTES) -> bytes:
    try:
        with open_stream(path, follow=True) as stream:
            if part == "end":
                stream.seek(max(0, stream.seek(0, os.SEEK_END) - num_bytes))
            return stream.read(num_bytes)
    except OSError:
        return b""

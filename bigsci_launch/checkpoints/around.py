"""The weights of a run: the latest that it has saved, and those around a restart whose loss changed, unasked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from bigsci_launch.checkpoints.restart import Restart, find_restart
from bigsci_launch.checkpoints.verify import recorded_digests
from bigsci_launch.errors import BslError, CheckpointError
from bigsci_launch.file_names import checkpoint_tag, steps_done_at_dump
from bigsci_launch.runs.attempts import run_of
from bigsci_launch.runs.find import runs_root
from bigsci_launch.runs.layout import AttemptDir, RunDir
from bigsci_launch.runs.step_forms import forms_of
from bigsci_launch.weights.answer import Question, answer_question
from bigsci_launch.weights.explain.seam import LossLog, causes_in, measure_seam, read_log
from bigsci_launch.weights.files.sources import Weights
from bigsci_launch.weights.locate.choice import SideName
from bigsci_launch.weights.locate.locate import open_weights

UNASKED_BYTES = 8 << 30
"""How much is read at most without being asked for, because a loss jumped: some seconds' worth."""
NOTHING_CHANGED = "the restart did not change the weights: check data order and random states"


def open_sides(*paths: Path) -> tuple[Weights, ...]:
    """Open weights, or the latest checkpoint of a run that is named or given by its directory.

    A dump is opened with the checkpoint that its run saved at the same step.

    Raises:
        BslError: one of them cannot be opened, or has no weights.
    """
    names: tuple[SideName, ...] = ("a", "b")
    opened = (open_weights(_weights_folder(path), name) for path, name in zip(paths, names, strict=False))
    return tuple(map(_with_checkpoint, opened))


def _weights_folder(path: Path) -> Path:
    with suppress(PermissionError):
        run = RunDir(path if path.exists() else runs_root() / path)
        if run.record.is_file():
            return run.checkpoints
    return path


def _with_checkpoint(weights: Weights) -> Weights:
    saved = _checkpoint_of_dump(weights.sources[0].path.parent) if weights.layout == "rank dumps" else None
    return weights if saved is None else replace(weights, moments_from=open_weights(saved))


def digests_of(sides: tuple[Weights, ...]) -> dict[Path, str]:
    """Return the digests of checkpoints' files, recorded by the ranks that saved them.

    Raises:
        CheckpointError: there are none.
    """
    try:
        recorded = [recorded_digests(side.sources[0].path.parent) for side in sides]
    except CheckpointError as error:
        raise CheckpointError(
            f"no digests to compare: {error.message}", hint="leave out --digests to compare the bytes"
        ) from error
    return {path: digest for found in recorded for path, digest in found.items()}


def with_seam(question: Question, logs: tuple[Path, Path]) -> Question:
    """Return the question with the seam between two logs, and what is recorded of it if the second one is of a run.

    If that run's loss changed there, and no weights are asked about, its weights around the restart are.

    Raises:
        BslError: a log cannot be read, has no steps, or the second one begins before the first.
    """
    first, attempt = (attempt_of_log(log) for log in logs)
    seam = measure_seam(_read_log(logs[0], first), _read_log(logs[1], attempt))
    restart = None if attempt is None else find_restart(run_of(attempt), attempt)
    if restart is None:
        return replace(question, seam=seam)
    question = replace(question, seam=seam, causes=restart.causes)
    if question.sides or not seam.loss.is_changed:
        return question
    return replace(question, sides=_sides_around(restart, seam.loss.step, UNASKED_BYTES), may_fail=True)


def _read_log(log: Path, attempt: AttemptDir | None) -> LossLog:
    return read_log(log, None if attempt is None else forms_of(attempt))


def _sides_around(restart: Restart, step: int, most_bytes: int) -> tuple[Weights, ...]:
    """Return the dumps on both sides of a restart (`step` is the first after it), else the checkpoint between, alone.

    Empty if the run has neither, or if what it has is larger than `most_bytes` or cannot be read: it was not asked for.
    """
    with suppress(BslError):
        for paths in _kept_around(restart, step):
            sides = open_sides(*paths) if all(path.is_dir() for path in paths) else ()
            if sides and len(sides) * sides[0].num_bytes() <= most_bytes:
                return sides
    return ()


def _kept_around(restart: Restart, step: int) -> Iterator[tuple[Path, ...]]:
    run = run_of(restart.attempt)
    yield run.dump_folder(step - 1, "after"), run.dump_folder(step, "before")
    if restart.checkpoint is not None:
        yield (restart.checkpoint,)


@dataclass(frozen=True, slots=True)
class RestartAudit:
    """What the weights around a restart show. `unknown` says why they were not looked at; empty if they were."""

    causes: tuple[str, ...]
    unknown: str = ""


def audit_restart(restart: Restart, most_bytes: int = UNASKED_BYTES) -> RestartAudit:
    """Compare the dumps on both sides of a restart whose loss changed, else check the checkpoint against itself.

    Never raises: what cannot be read is reported.
    """
    assert restart.jump is not None
    sides = _sides_around(restart, restart.jump.step, most_bytes)
    if not sides:
        return RestartAudit((), "its weights were not checked: there are none that can be read, or they are too large")
    try:
        found = answer_question(Question(sides)).found
    except BslError as error:
        return RestartAudit((), f"its weights were not checked: {error.message}")
    if found.is_equal and not found.is_audit:
        return RestartAudit((NOTHING_CHANGED,))
    return RestartAudit(tuple(causes_in(found)))


def _checkpoint_of_dump(folder: Path) -> Path | None:
    """Return the checkpoint that a run saved when it dumped its weights to `folder`; None if it saved none then."""
    step, run = steps_done_at_dump(folder.name), RunDir(folder.parent.parent)
    if step is None or run.dumps != folder.parent:
        return None
    saved = run.checkpoints / checkpoint_tag(step)
    return saved if saved.is_dir() else None


def attempt_of_log(log: Path) -> AttemptDir | None:
    """Return the attempt that a rank's log belongs to; None if the file lies in no run."""
    attempt = AttemptDir(log.resolve().parent.parent)
    is_log = log.resolve().parent == attempt.logs and attempt.path.parent == attempt.run.attempts_folder
    return attempt if is_log and attempt.run.record.is_file() else None

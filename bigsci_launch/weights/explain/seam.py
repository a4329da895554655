"""Measures the jump of the loss at a restart, relative to its usual movement from step to step."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigsci_launch.errors import CheckpointError
from bigsci_launch.loss_jump import RECENT, LossJump, describe_jump, figures_of, measure_jump
from bigsci_launch.step_lines import StepForm, StepLine, StepReader
from bigsci_launch.typed_path import open_typed
from bigsci_launch.units import finite
from bigsci_launch.weights.compare.comparison import Comparison, WeightsFinding, names_text
from bigsci_launch.weights.files.mapped import os_reason


@dataclass(frozen=True, slots=True)
class Seam:
    """Where log B continues log A: the jump of the loss, and the seconds per step on both sides."""

    loss: LossJump
    seconds_before: float | None
    seconds_after: float | None


@dataclass(frozen=True, slots=True)
class LossLog:
    """The losses of a log by step; a later line for the same step counts. Without numbers of steps, they are by report:
    the first one is 1, and `epochs` says how far the run was at each, None if that is not printed."""

    path: Path
    lines: Mapping[int, StepLine]
    is_numbered: bool = True

    @property
    def epochs(self) -> list[float] | None:
        found = [line.epochs for line in self.lines.values() if line.epochs is not None]
        return found if len(found) == len(self.lines) else None


def read_log(path: Path, forms: Sequence[StepForm] | None = None) -> LossLog:
    """Read the losses of a log.

    Raises:
        CheckpointError: the file cannot be read, or contains no loss in a known form.
    """
    try:
        with open_typed(path) as stream:
            text = stream.read().decode("utf-8", "replace")
    except OSError as error:
        raise CheckpointError(f"{path}: {os_reason(error)}") from error
    found = [line for line in StepReader(forms).steps_in(text) if line.loss is not None and not line.is_evaluation]
    if not found:
        raise CheckpointError(
            f"{path}: has no step lines",
            hint="expected lines of a known trainer, such as `iteration 10/ 20 | ... | lm loss: 3.5E+00 |`; for "
            "another program, monitor.step_line in the run file says how its steps are printed",
        )
    numbered = {line.step: line for line in found if line.step is not None}
    return LossLog(path, numbered) if numbered else LossLog(path, dict(enumerate(found, 1)), is_numbered=False)


def measure_seam(before: LossLog, after: LossLog) -> Seam:
    """Measure the seam between two logs.

    Raises:
        BslError: the second log begins before the first, or where it begins is not known.
    """
    if before.is_numbered != after.is_numbered:
        without = after if before.is_numbered else before
        raise CheckpointError(f"{without.path}: its losses have no step, those of the other log do")
    later = after.lines if after.is_numbered else _number_reports(before, after)
    jump = measure_jump(_losses(before.lines), _losses(later), "step" if after.is_numbered else "report")
    history = [before.lines[at] for at in sorted(before.lines) if at < jump.step]
    seconds_before = [item.seconds for item in history[-RECENT:] if item.seconds is not None]
    seconds_after = [item.seconds for item in later.values() if item.seconds is not None]
    return Seam(
        loss=jump,
        seconds_before=statistics.median(seconds_before) if seconds_before else None,
        seconds_after=statistics.median(seconds_after) if seconds_after else None,
    )


def _number_reports(before: LossLog, after: LossLog) -> dict[int, StepLine]:
    """Return the reports of the second log with the numbers that they would have in the first, by their epochs."""
    epochs, later = before.epochs, after.epochs
    if epochs is None or later is None:
        raise CheckpointError(f"{after.path}: neither steps nor epochs say where it continues {before.path}")
    begin = sum(each < later[0] for each in epochs)
    if begin < len(epochs) and epochs.count(later[0]) != 1:
        raise CheckpointError(
            f"{after.path}: epoch {later[0]:g} does not say which report of {before.path} is the same"
        )
    return {begin + at: line for at, line in after.lines.items()}


def _losses(lines: Mapping[int, StepLine]) -> dict[int, float]:
    return {at: line.loss for at, line in lines.items() if line.loss is not None}


def seam_finding(jump: LossJump, *, is_equal: bool | None, causes: Sequence[str] = ()) -> WeightsFinding:
    """Describe the seam; `is_equal` says whether the weights of A and B were equal, None if not compared.

    `causes` are sentences that say what the restart changed.
    """
    claim = describe_jump(jump)
    is_changed = jump.is_jump or (jump.is_overlap and not jump.is_exact)
    if is_changed and causes:
        claim = f"{claim}. Likely cause{'s' * (len(causes) > 1)}: {'; '.join(causes)}"
    elif is_changed and is_equal:
        return WeightsFinding("data or random state", (), (), f"{claim}. Weights equal: look at data order and RNG")
    if jump.is_jump:
        return WeightsFinding("restart spike", (), (), claim)
    return WeightsFinding("other loss" if jump.is_other else "no loss jump", (), (), claim, is_fault=jump.is_other)


def causes_in(found: Comparison | None) -> Iterator[str]:
    """Yield the faults that a comparison of the weights, or an audit, has found: each with its tensors."""
    for finding in found.findings if found else ():
        if finding.is_fault:
            yield f"{finding.pattern}: {names_text(finding.tensors)}" if finding.tensors else finding.pattern


def seam_document(seam: Seam, causes: Sequence[str] = ()) -> dict[str, Any]:
    """Return the seam as part of the JSON document."""
    jump = seam.loss
    return {
        **figures_of(jump),
        "is_jump": jump.is_jump,
        "verdict": jump.verdict,
        "causes": list(causes),
        "overlapping_steps": jump.num_overlapping,
        "equal_steps": jump.num_equal,
        "seconds_before": finite(seam.seconds_before),
        "seconds_after": finite(seam.seconds_after),
    }

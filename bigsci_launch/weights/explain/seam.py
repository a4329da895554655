"""Measures the jump of the loss at a restart, relative to its usual movement from step to step."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigsci_launch.errors import CheckpointError
from bigsci_launch.iteration_line import IterationLine, parse_iterations
from bigsci_launch.loss_jump import RECENT, LossJump, describe_jump, figures_of, measure_jump
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


def read_log(path: Path) -> dict[int, IterationLine]:
    """Read the steps of a log. If a step was printed twice, the later line counts.

    Raises:
        CheckpointError: the file cannot be read, or contains no step line.
    """
    try:
        with open_typed(path) as stream:
            text = stream.read().decode("utf-8", "replace")
    except OSError as error:
        raise CheckpointError(f"{path}: {os_reason(error)}") from error
    found = {line.step: line for line in parse_iterations(text) if line.loss is not None}
    if not found:
        raise CheckpointError(
            f"{path}: has no step lines", hint="expected lines such as `iteration 10/ 20 | ... | lm loss: 3.5E+00 |`"
        )
    return found


def measure_seam(before: Mapping[int, IterationLine], after: Mapping[int, IterationLine]) -> Seam:
    """Measure the seam between two logs, neither of which is empty.

    Raises:
        BslError: the second log begins before the first.
    """
    jump = measure_jump(_losses(before), _losses(after))
    history = [before[at] for at in sorted(before) if at < jump.step]
    seconds_before = [item.seconds for item in history[-RECENT:] if item.seconds is not None]
    seconds_after = [item.seconds for item in after.values() if item.seconds is not None]
    return Seam(
        loss=jump,
        seconds_before=statistics.median(seconds_before) if seconds_before else None,
        seconds_after=statistics.median(seconds_after) if seconds_after else None,
    )


def _losses(log: Mapping[int, IterationLine]) -> dict[int, float]:
    return {step: line.loss for step, line in log.items() if line.loss is not None}


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

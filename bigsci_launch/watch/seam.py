"""The restart between two attempts: how the loss moved there, and what its checkpoint or dumps show, unasked."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from bigsci_launch.errors import BslError
from bigsci_launch.runs.attempts import run_of
from bigsci_launch.runs.layout import checkpoint_of_dump
from bigsci_launch.runs.restart.restart import Restart
from bigsci_launch.weights.compare.comparison import Comparison, parse_selection
from bigsci_launch.weights.explain.seam import causes_in
from bigsci_launch.weights.files.sources import Weights
from bigsci_launch.weights.locate.locate import open_weights

UNASKED_BYTES = 8 << 30
"""How much is read at most without being asked for, because a loss jumped: some seconds' worth."""
NOTHING_CHANGED = "the restart left the weights as they were: look at data order and random states"


@dataclass(frozen=True, slots=True)
class WeightsAround:
    """What a run has kept around a restart: dumps on both sides, or the checkpoint between, alone."""

    before: Path
    after: Path | None


def weights_around(restart: Restart, step: int, most_bytes: int) -> WeightsAround | None:
    """Return the dumps on both sides of a restart (`step` is the first after it), else the checkpoint between.

    None if the run has neither, or if what it has is larger than `most_bytes` or cannot be read: nobody asked for it.
    """
    run = run_of(restart.attempt)
    after, before = run.dump_folder(step - 1, "after"), run.dump_folder(step, "before")
    with suppress(BslError):
        if after.is_dir() and before.is_dir() and 2 * open_weights(after, "a").num_bytes() <= most_bytes:
            return WeightsAround(after, before)
        saved = restart.checkpoint
        if saved is not None and saved.is_dir() and open_weights(saved, "a").num_bytes() <= most_bytes:
            return WeightsAround(saved, None)
    return None


@dataclass(frozen=True, slots=True)
class RestartAudit:
    """What the weights around a restart show. `unknown` says why nobody looked; empty if somebody did."""

    causes: tuple[str, ...]
    unknown: str = ""


def audit_restart(restart: Restart, most_bytes: int = UNASKED_BYTES) -> RestartAudit:
    """Compare the dumps on both sides of a restart whose loss changed, else check the checkpoint against itself.

    Never raises: what cannot be read is said.
    """
    assert restart.jump is not None
    found = weights_around(restart, restart.jump.step, most_bytes)
    if found is None:
        return RestartAudit((), "its weights were not checked: there are none that can be read, or they are too large")
    try:
        compared = _compare(found)
    except BslError as error:
        return RestartAudit((), f"its weights were not checked: {error.message}")
    if compared.is_equal and not compared.is_audit:
        return RestartAudit((NOTHING_CHANGED,))
    return RestartAudit(tuple(causes_in(compared)))


def _compare(found: WeightsAround) -> Comparison:
    from bigsci_launch.weights.compare.compare import compare_weights, require_numpy

    require_numpy("an audit measures tensors")
    from bigsci_launch.weights.explain.audit import audit_weights
    from bigsci_launch.weights.explain.explain import explain

    selection = parse_selection((), ())
    if found.after is None:
        return audit_weights(open_weights(found.before, "a"), selection=selection)
    left = with_checkpoint(open_weights(found.before, "a"))
    right = with_checkpoint(open_weights(found.after, "b"))
    compared = compare_weights(left, right, selection=selection)
    return explain(compared, left, right) if compared.differences or compared.apart else compared


def with_checkpoint(weights: Weights) -> Weights:
    """Return a dump together with the checkpoint that its run saved at the same step; other weights unchanged."""
    saved = checkpoint_of_dump(weights.sources[0].path.parent) if weights.layout == "rank dumps" else None
    return weights if saved is None else replace(weights, moments_from=open_weights(saved))

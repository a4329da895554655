"""Finds why two copies drifted apart, from Adam's moments alone.

Copies that must stay equal see the same gradients, so their moments are equal. If they differ, the angle between the
first moments and the lengths of both moments show what happened to the gradients. The thresholds come from deliberate
defects: not reduced, cosine -0.01 to 0.14; clipped on one side, cosine 0.92 to 0.99, |m| and |v| both longer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from bigsci_launch.weights.compare.statistics import Statistics

CauseName = Literal[
    "not reduced", "clipped on one side", "decay only", "never trained", "no gradient", "set apart", "scaled"
]

SAME_DIRECTION = 0.7
# The factor of clipping changes from step to step. One factor for all steps preserves the direction exactly.
EXACT_DIRECTION = 0.9995
SAME_LENGTH = 0.1
# How far the ratio of |v| may be from the squared ratio of |m| under one factor for all steps. Clipping has no such
# bound: it shrinks the largest gradients most, and |v| remembers those of the warm-up long after |m| (180 for 3.6).
SQUARE_FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause: its name, and words that complete a sentence."""

    name: CauseName
    words: str


@dataclass(frozen=True, slots=True)
class CopyState:
    """What is known about a copy without a gradient: its constant value, if any, and its optimizer group."""

    constant: float | None
    decay: float | None
    learning_rate: float | None
    step: float | None


def cause_of_drift(
    first: Statistics, second: Statistics, *, axis: str, at: tuple[str, str], states: tuple[CopyState, CopyState]
) -> Cause:
    """Return why the copy at `at[1]` drifted from the copy at `at[0]`, along `axis`.

    `first` and `second` are the statistics of exp_avg and exp_avg_sq, comparing the first copy with the second.
    """
    for has_none, where, state in (
        (second.sum_squares_b == 0 or first.sum_squares_b == 0, at[1], states[1]),
        (second.sum_squares_a == 0 or first.sum_squares_a == 0, at[0], states[0]),
    ):
        if has_none:
            return _without_gradient(where, state)
    if first.num_differing == 0 and second.num_differing == 0:
        return Cause("set apart", "equal moments: only the weights differ, set differently at load or at the start")
    cosine, ratio, ratio_of_squares = first.cosine or 0.0, first.norm_ratio or 0.0, second.norm_ratio or 0.0
    lengths = f"cos {cosine:.2f}, |m| x{ratio:.2g}, |v| x{ratio_of_squares:.2g}"
    is_other_length = abs(ratio - 1) > SAME_LENGTH
    if is_other_length and cosine > EXACT_DIRECTION and _is_square(ratio, ratio_of_squares):
        return Cause("scaled", f"the same gradients multiplied by {ratio:.3g} on {at[1]} ({lengths})")
    # Clipping does not differ between tp ranks. Partial gradients that were never summed can point the same way.
    if axis == "tp" or cosine < SAME_DIRECTION:
        return Cause("not reduced", f"different gradients (cos {cosine:.2f}): not reduced over {axis}")
    if is_other_length and (ratio > 1) == (ratio_of_squares > 1):
        clipped, free = at if ratio > 1 else at[::-1]
        which = f"one copy was clipped ({clipped}), the other not ({free})"
        return Cause("clipped on one side", f"same direction, different length ({lengths}): {which}")
    return Cause("not reduced", f"similar gradients ({lengths}): only partly reduced over {axis}")


def cause_of_constant(where: str, constant: float) -> Cause:
    """Return the cause for a copy that has one value everywhere, if its moments are unknown."""
    if constant in (0.0, 1.0):
        return Cause("never trained", f"the copy on {where} is {constant:g} everywhere: never trained")
    head = f"the copy on {where} is {constant:.4g} everywhere"
    if not can_be_decayed(constant):
        return Cause("set apart", f"{head}, which weight decay cannot make of an initial 1 or 0: it was set")
    return Cause("decay only", f"{head}: moved by weight decay only")


def can_be_decayed(constant: float) -> bool:
    """Return whether weight decay can bring a parameter that begins at 1 to `constant`: it only shrinks towards 0."""
    return 0 < constant < 1


def _is_square(ratio: float, ratio_of_squares: float) -> bool:
    if ratio <= 0 or ratio_of_squares <= 0:
        return False
    return abs(math.log(ratio_of_squares / ratio**2)) < math.log(SQUARE_FACTOR)


def _without_gradient(where: str, state: CopyState) -> Cause:
    """Return the cause for a copy whose moments are zero: it only decayed, or never moved."""
    head = f"the copy on {where} has no gradient"
    if state.constant in (0.0, 1.0):
        return Cause("never trained", f"{head} and never left its initial {state.constant:g}")
    if not state.decay or state.learning_rate is None or state.step is None:
        return Cause("no gradient", f"{head} at all")
    if state.constant is not None and not can_be_decayed(state.constant):
        moved = f"a weight decay of {state.decay:g} cannot make {state.constant:.4g} of an initial 1 or 0: it was set"
        return Cause("no gradient", f"{head}, and {moved}")
    left = (1 - state.learning_rate * state.decay) ** state.step
    if state.constant is not None and math.isclose(state.constant, left, rel_tol=2e-3):
        power = f"(1 - lr x {state.decay:g}) ^ {state.step:g}"
        return Cause("decay only", f"{head} and moved by weight decay only: {state.constant:.4g} is {power}")
    return Cause("decay only", f"{head}; only its weight decay of {state.decay:g} moves it")

"""What no training leaves: the size of weights and moments, and how large AdamW's first moment is for its second one.

AdamW's moments are m = (1 - b1) sum b1^k g_k and v = (1 - b2) sum b2^k g_k^2 over the gradients of all steps, the
newest first. By the inequality of Cauchy and Schwarz, with each term of m written as (b1 / sqrt b2)^k * sqrt(b2)^k g_k,

    |m| <= (1 - b1) / sqrt(1 - b2) * sqrt(sum over k < t of (b1^2 / b2)^k) * sqrt(v)

after t steps, whatever the gradients were, as long as the betas did not change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

ABSURD = 1e12
"""No weight and no first moment comes near this, and no second moment near its square. The top bit of an exponent,
flipped, makes at least 1e29 of any number from 1e-9 to 1, and the next one 3e19 of any from 2 on."""
SLACK = 1.1
"""How far rounding may lift a moment above its limit. 32 bits lose 2^-24 / (1 - b2), less than 0.1 %; moments that are
kept in 16 bits, 0.6 %; and a norm for clipping that is summed in 32 bits, 0.4 % over 50 M elements and more in
larger models. A flipped bit of an exponent is a factor of 2, and 1.4 in the root of a second moment."""
UNDERFLOW = 1e-16
"""A first moment this small proves nothing: the square of its gradients, times 1 - b2, may vanish in 32 bits, which end
at 1e-38 where a device drops the numbers below."""


def moment_bound(betas: Sequence[float], num_steps: float = math.inf, before: float = 0.0) -> float:
    """Return the largest |m| / sqrt(v) that `num_steps` steps of AdamW can lead to; infinite if there is no limit.

    `before` was the largest one that they began with: 0 if the moments were zero.
    """
    first, second = betas
    if not (0 <= first < 1 and 0 < second < 1):
        return math.inf
    decay = first**2 / second
    kept = _power(decay, num_steps)
    total = num_steps if decay == 1 else (1 - kept) / (1 - decay)
    remains = kept * before * before if kept and before else 0.0
    square = (1 - first) ** 2 / (1 - second) * total + remains
    return math.sqrt(square) if square >= 0 else math.inf


def _power(base: float, exponent: float) -> float:
    try:
        return math.pow(base, exponent)
    except OverflowError:
        return math.inf

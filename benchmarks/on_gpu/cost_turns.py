"""Which steps of the attempt of `cost.py` are measured in which way. Its rank and the phase both need it."""

from __future__ import annotations

from dataclasses import dataclass

WARM_UP = 4
"""The guards check the first two steps in any case; the next ones are still slow."""
SYNC_STEPS = 3
RESULT = "cost.json"
"""What rank 0 leaves in the attempt's folder."""


@dataclass(frozen=True, slots=True)
class Turns:
    """The steps of each block. `checked`: every second step is checked. `every`: what the guards do in an unchecked
    step is timed. `ring`: every second step is without the ring. `syncs`: waits for the device are counted."""

    checked: range
    every: range
    ring: range
    syncs: range

    @property
    def last(self) -> int:
        """The step at whose beginning all is known; it is not trained."""
        return self.syncs.stop


def turns_of(num_steps: int) -> Turns:
    """Return blocks of `num_steps`, an even number, so that each begins with an odd step: even steps are compared with
    both their neighbours."""
    starts = [WARM_UP + 1 + block * num_steps for block in range(4)]
    blocks = [range(start, start + num_steps) for start in starts[:3]]
    return Turns(*blocks, range(starts[3], starts[3] + SYNC_STEPS))

"""What weights and AdamW's moments must satisfy in any healthy run, on each shard alone: `adam_limits` says why.

Clipping to a norm c also makes |m| <= c and v <= c^2, because no single gradient exceeds the norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bigsci_launch.adam_limits import ABSURD, SLACK, UNDERFLOW
from bigsci_launch.train.guards.copies import Violation
from bigsci_launch.train.guards.flat import Flat

FIRST, SECOND = "exp_avg", "exp_avg_sq"


@dataclass(frozen=True, slots=True)
class MomentLimits:
    """How large moments may be: |m| at most `factor` times the root of v, and both at most `size`."""

    factor: float = math.inf
    size: float = ABSURD

    def most(self, key: str) -> float:
        """The largest magnitude of what the optimizer keeps as `key`."""
        size = self.size if key in (FIRST, SECOND) else ABSURD
        return size * size if key.endswith("_sq") else size


def largest_size(clip: float, before: float) -> float:
    """Return how large |m| and the root of v may be with gradients of norm `clip` at most (0: not clipped).

    `before` was the largest when the attempt began: a moment that keeps its own size may be rounded above it.
    """
    return max(clip, before) * SLACK if clip > 0 else ABSURD


def largest_factor(first: Tensor, second: Tensor) -> float:
    """Return the largest |m|/sqrt(v) of these moments; infinity if there is no limit that they keep."""
    factors = (
        float(
            ((portion[FIRST].abs() - UNDERFLOW).clamp_(min=0) / portion[SECOND].sqrt())
            .nan_to_num_(nan=0.0, posinf=math.inf, neginf=math.inf)
            .max()
        )
        for portion in _portions({FIRST: first, SECOND: second})
    )
    return max(factors, default=0.0)


def _portions(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Cut flat tensors into portions, so that a check needs little memory; on a CPU they fit into a cache."""
    size = 1 << 18 if all(each.device.type == "cpu" for each in tensors.values()) else 1 << 26
    for start in range(0, max(map(len, tensors.values())), size):
        pieces = {key: each[start : start + size] for key, each in tensors.items()}
        yield {key: piece for key, piece in pieces.items() if len(piece)}


@torch.no_grad()
def find_wrong_state(states: Sequence[tuple[Mapping[str, Flat], MomentLimits]], rank: int) -> Iterator[Violation]:
    """Find numbers that are not finite, too large, or that AdamW cannot have made; waits for a device once.

    Each of `states` is what the optimizer keeps of the same parameters: AdamW's moments as `exp_avg` and `exp_avg_sq`,
    weights and all else under any other key. What ends in `_sq` is a mean of squares.
    """
    filled = [(flats, limits) for flats, limits in states if any(len(each.tensor) for each in flats.values())]
    if not filled:
        return
    sound = [_is_sound({key: each.tensor for key, each in flats.items()}, limits) for flats, limits in filled]
    for (flats, limits), is_sound in zip(filled, torch.stack(sound).tolist(), strict=True):
        for key in () if is_sound else flats:
            yield from _name_wrong(key, flats, limits, rank)


def _is_sound(tensors: Mapping[str, Tensor], limits: MomentLimits) -> Tensor:
    return torch.stack([_is_portion_sound(portion, limits) for portion in _portions(tensors)]).all()


def _is_portion_sound(portion: Mapping[str, Tensor], limits: MomentLimits) -> Tensor:
    """Return whether a portion is sound; NaN fails every comparison."""
    sound = []
    for key, piece in portion.items():
        lowest, highest = (each.double() for each in torch.aminmax(piece))
        most = limits.most(key)
        sound += [highest <= most, lowest >= (0 if key.endswith("_sq") else -most)]
    if _has_bound(portion, limits):
        first, second = portion[FIRST].to(portion[SECOND].dtype), portion[SECOND]
        factor = limits.factor * SLACK
        excess = (second * -(factor * factor)).addcmul_(first, first)
        sound.append(excess.max() <= UNDERFLOW**2)
    return torch.stack(sound).all()


def _has_bound(pieces: Mapping[str, Tensor], limits: MomentLimits) -> bool:
    """Return whether m has a limit: in 16 bits, v stops growing long before it is what the recurrence says."""
    is_pair = {FIRST, SECOND} <= pieces.keys() and len(pieces[FIRST]) == len(pieces[SECOND])
    return is_pair and math.isfinite(limits.factor) and pieces[SECOND].dtype in (torch.float32, torch.float64)


def _name_wrong(key: str, flats: Mapping[str, Flat], limits: MomentLimits, rank: int) -> Iterator[Violation]:
    pieces = {each: flat.pieces() for each, flat in flats.items()}
    for name in flats[key].slices:
        mine = {each: found[name] for each, found in pieces.items() if name in found}
        if wrong := _explain(key, mine, limits):
            yield Violation(wrong[0], flats[key].title.format(name), (rank,), wrong[1])


def _explain(key: str, pieces: Mapping[str, Tensor], limits: MomentLimits) -> tuple[str, str] | None:
    """Return what is wrong with a piece: the name of the check, and the finding in words."""
    piece = pieces[key]
    if not len(piece):
        return None
    if wrong := len(piece) - int(torch.isfinite(piece).sum()):
        return "non-finite", f"{wrong} of {len(piece)} elements are not finite"
    lowest, largest, most = float(piece.min()), float(piece.abs().max()), limits.most(key)
    if key.endswith("_sq") and lowest < 0:
        return "moments", f"holds {lowest:.3g}, though it is a mean of squares"
    if largest > most:
        return "magnitude", f"holds {largest:.3g}, but no run reaches more than {most:.3g}"
    if key == FIRST and _has_bound(pieces, limits):
        factor = largest_factor(piece, pieces[SECOND])
        if factor > limits.factor * SLACK:
            text = f"is {factor:.3g} times the root of the second moment; AdamW's betas allow {limits.factor:.3g}"
            return "moments", text
    return None
